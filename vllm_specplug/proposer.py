"""What a draft method is, and the registry through which ours and third parties' are found.

A distribution offers a method by an entry point of the group ``vllm_specplug.proposers``; its name
is the ``method`` that users write, its value a :class:`Method`::

    [project.entry-points."vllm_specplug.proposers"]
    parrot = "my_package:PARROT"

    PARROT = Method("parrot", ParrotOptions, make=ParrotProposer)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

import torch

from vllm_specplug.types import PADDING, Draft, TokenTree

GROUP = "vllm_specplug.proposers"


@dataclass(frozen=True)
class DraftContext:
    """What a host-free proposer may look at.

    What became of a draft needs no report: the tokens that a request has more than at the proposer's last call are
    those that the target chose behind it.  A request may be missing for some calls (preempted, not scheduled).

    Attributes:
        root_token_ids: int64 ``[num_reqs]``; the last emitted token of each request.
        token_ids: int32 ``[num_reqs, max_model_len]``; prompt and output of each request, the root included.  Memory
            of the host, valid during the call only.
        num_tokens: int64 ``[num_reqs]``; valid entries of ``token_ids``.
        request_ids: of each request; stable over its life, while its place in the batch is not.
        wanted: bool ``[num_reqs]``; false for requests whose draft would be thrown away (in the middle of a chunked
            prefill): a root alone will do.
        vocab_size: the target's; drafted ids are from 0 to ``vocab_size - 1``.
        draft_by_model: runs the host's own drafter (EAGLE) in this round, told how many tokens each request's other
            drafts are expected to bring (float ``[num_reqs]``); its checked draft, or None where that would not pay or
            it has failed.  None without such a drafter.
    """

    root_token_ids: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    request_ids: tuple[str, ...]
    wanted: torch.Tensor
    vocab_size: int
    draft_by_model: Callable[[torch.Tensor], Draft | None] | None = None


class Proposer(Protocol):
    """Drafts one tree per request.  Whatever it drafts, the output stays the target's."""

    def propose(self, context: DraftContext) -> TokenTree | Draft:
        """Trees of at most ``num_speculative_tokens + 1`` rows, row 0 being the root; a root alone drafts nothing."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps something for each request."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Requests that have ended (or were aborted): their ids may not come again, or mean other requests."""
        ...


def as_draft(proposed: TokenTree | Draft) -> Draft:
    """A proposal with values; where the proposer gives none, every edge counts as accepted with probability 1/2."""
    if isinstance(proposed, Draft):
        return proposed
    depths = proposed.depths.float()
    return Draft(proposed, torch.where(proposed.token_ids == PADDING, float("-inf"), depths * math.log(0.5)))


@dataclass(frozen=True)
class Method:
    """A draft method.

    Attributes:
        name: the ``method`` of the speculative config.
        options: frozen dataclass of its options, with the fields of ``config.TreeOptions``.
        make: makes the proposer from its options; None where the drafter is a model of the host
            (EAGLE), whose adapter is part of this package.  Called more than once at start-up: other
            proposers than the one that serves are warmed up and timed.
    """

    name: str
    options: type
    make: Callable[[Any], Proposer] | None = None


@cache
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def method_names() -> list[str]:
    """Names of all registered methods; loads none of them."""
    return sorted(_registered())


@cache
def find_method(name: str) -> Method:
    """Load a registered method.

    Raises:
        KeyError: no such method.
        TypeError: the entry point is not a ``Method`` of that name.
    """
    method = _registered()[name].load()
    if not isinstance(method, Method) or method.name != name:
        raise TypeError(f"entry point {name!r} of group {GROUP} must be a Method named {name!r}, found {method!r}")
    return method
