"""Typical acceptance: the accepted tokens are chosen first, then the walk continues exactly."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.core.typical import accept_typical, path_token_ids
from vllm_specplug.hosts.v1.settled_walk import SettledWalk
from vllm_specplug.types import TokenTree


class TypicalWalk(SettledWalk):
    """Walks each request along the path that typical acceptance selects, and exactly behind its end.

    Args:
        limits: by request, see ``plain_sampling.limits_of``.
    """

    def __init__(self, *args: Any, limits: list[tuple[float, float] | None]):
        super().__init__(*args)
        self.limits = limits

    def settle(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        typical = torch.tensor([limits is not None for limits in self.limits]) & active
        epsilon, delta = torch.tensor([limits or (1.0, 1.0) for limits in self.limits]).unbind(1)

        def log_probs(requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.log_probs(logits[first_rows[requests] + rows], requests)

        last_rows = accept_typical(tree, log_probs, epsilon, delta, typical)
        return path_token_ids(tree, last_rows)
