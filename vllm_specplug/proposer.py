"""What a draft method is, and the registry through which ours and third parties' are found.

A distribution offers a method by an entry point of the group ``vllm_specplug.proposers``; its name
is the ``method`` that users write, its value a :class:`Method`::

    [project.entry-points."vllm_specplug.proposers"]
    parrot = "my_package:PARROT"

    PARROT = Method("parrot", ParrotOptions, make=ParrotProposer)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import torch

from vllm_specplug.types import TokenTree

GROUP = "vllm_specplug.proposers"


@dataclass(frozen=True)
class DraftContext:
    """What a host-free proposer may look at.

    Attributes:
        root_token_ids: int64 ``[num_reqs]``; the last emitted token of each request.
        token_ids: int32 ``[num_reqs, max_model_len]``; prompt and output of each request, the root included.
        num_tokens: int64 ``[num_reqs]``; valid entries of ``token_ids``.
    """

    root_token_ids: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor


class Proposer(Protocol):
    """Drafts one tree per request.  Whatever it drafts, the output stays the target's."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Trees of at most ``num_speculative_tokens + 1`` rows, row 0 being the root."""
        ...


@dataclass(frozen=True)
class Method:
    """A draft method.

    Attributes:
        name: the ``method`` of the speculative config.
        options: frozen dataclass of its options, with the fields of ``config.TreeOptions``.
        make: makes the proposer from its options; None where the drafter is a model of the host
            (EAGLE), whose adapter is part of this package.
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
