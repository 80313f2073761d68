"""Random generators at the ends of turns, in sessions with streamed input.

A turn may end inside an accepted path.  The walk has then drawn numbers for tokens that vLLM drops.  Plain decoding has
not, and the next turn goes on with the same generator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


class DrawnStates:
    """Keeps the states of generators along each request's last path."""

    def __init__(self) -> None:
        #: By request: the state after each token of its last walk.
        self._states: dict[str, list[torch.Tensor]] = {}

    def walked(self, req_ids: Sequence[str], drawn: dict[int, list[torch.Tensor]]) -> None:
        """Keep the states of a walk, by batch index."""
        for index, states in drawn.items():
            self._states[req_ids[index]] = states

    def begin_turn(self, request: Any, num_computed_tokens: int) -> None:
        """Wind back the generator of a session whose next turn begins.

        Args:
            request: vLLM's state of the request, still that of the last turn.
            num_computed_tokens: of the next turn: all tokens that were kept, but the last one.
        """
        states = self._states.pop(request.req_id, [])
        dropped = request.num_tokens - 1 - num_computed_tokens
        if 0 < dropped < len(states):
            request.generator.set_state(states[-1 - dropped])

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._states.pop(request_id, None)
