"""Grammars on trees, and all differences between vLLM versions in constraining structured output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from vllm.v1.outputs import DraftTokenIds


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """vLLM's flat drafts with, per draft, the row of each node's parent (0 is the root)."""

    parents: list[list[int]] = field(default_factory=list)


def constrained_requests(scheduler: Any, scheduler_output: Any) -> list[Any]:
    """Return the requests of a step whose logits a grammar masks, in the order of the step."""
    return [
        request
        for req_id in scheduler_output.num_scheduled_tokens
        if (request := scheduler.requests.get(req_id)) is not None
        and request.use_structured_output
        and not request.is_prefill_chunk
    ]


def tree_masks(
    manager: Any, requests: Sequence[Any], trees: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> np.ndarray:
    """Compute the token masks of all trees: each row has the mask of its path.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
        requests: vLLM's, all with structured output.
        trees: by request, tokens and parents as of ``walk_grammar``.

    Returns:
        int32 ``[num_rows, words]`` bit masks, in the row order that the worker expects.
    """
    *first_rows, end = first_mask_rows(manager, [len(token_ids) + 1 for token_ids, _ in trees])
    bitmask = manager.backend.allocate_token_bitmask(end)
    bitmask.fill_(-1)  # all tokens are allowed
    words = bitmask.numpy().view(np.uint32)
    for request, (token_ids, parents), first_row in zip(requests, trees, first_rows, strict=True):

        def fill(row: int, grammar: Any, forbidden: Sequence[int], first_row: int = first_row) -> None:
            if grammar is not None:
                grammar.fill_bitmask(bitmask, first_row + row)
            for token_id in forbidden:
                words[first_row + row, token_id // 32] &= ~np.uint32(1 << token_id % 32)

        walk_grammar(manager, request, token_ids, parents, fill)
    return bitmask.numpy()


def walk_grammar(
    manager: Any,
    request: Any,
    token_ids: Sequence[int],
    parents: Sequence[int],
    visit: Callable[[int, Any, Sequence[int]], None],
) -> None:
    """Visit every row whose path the request's grammar allows, with the grammar advanced along that path.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
        request: vLLM's, with structured output.
        token_ids: of the nodes, parents before children; negative ones are placeholders.
        parents: row of each node's parent; node ``i`` is row ``i + 1``.
        visit: receives the row, its grammar, and the tokens that are forbidden besides.  The grammar is None if it does
            not constrain the row (before the end of reasoning, after the end of the grammar).
    """
    grammar = request.structured_output_request.grammar
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []

    def descend(row: int) -> None:
        _, constraint_start = constraint_bounds(manager, request, path)
        if len(path) < constraint_start:
            visit(row, None, forbidden_in_reasoning(manager, request))
        else:
            visit(row, None if grammar.is_terminated() else grammar, ())
        for node in children.get(row, ()):
            token_id = token_ids[node]
            if token_id < 0:
                continue
            path.append(token_id)
            grammar_start, _ = constraint_bounds(manager, request, path)
            if len(path) <= grammar_start:
                descend(node + 1)
            elif grammar.validate_tokens([token_id]):
                grammar.accept_tokens(request.request_id, [token_id])
                descend(node + 1)
                grammar.rollback(1)
            path.pop()

    descend(0)


def constraint_bounds(manager: Any, request: Any, path: Sequence[int]) -> tuple[int, int]:
    """Find the first token of a path that advances the grammar, and the first row that the grammar masks.

    Returns:
        Indices into ``path``, which follows the request's tokens; ``len(path) + 1`` if all of it is reasoning.
    """
    if hasattr(manager, "_get_constraint_bounds"):
        return manager._get_constraint_bounds(request, path)
    if hasattr(manager, "_get_constraint_start"):  # until 0.31: the token that ends reasoning is never content
        start = manager._get_constraint_start(request, path)
    else:
        start = _start_token_by_token(manager, request, path)
    return start, start


def _start_token_by_token(manager: Any, request: Any, path: Sequence[int]) -> int:
    """Find the end of reasoning token by token, as vLLM until 0.29 does while it fills its masks."""
    if manager.should_fill_bitmask(request):
        return 0
    reasoner, seen = manager._get_reasoner(request), list(request.all_token_ids)
    for index, token_id in enumerate(path):
        seen.append(token_id)
        if reasoner.is_reasoning_end_streaming(seen, [token_id]):
            return index + 1
    return len(path) + 1


def forbidden_in_reasoning(manager: Any, request: Any) -> Sequence[int]:
    """Return tokens that would end reasoning with content that the grammar cannot start with; none before vLLM 0.33."""
    return manager._masked_reasoning_ends(request) if since_033(manager) else ()


def first_mask_rows(manager: Any, counts: Sequence[int]) -> list[int]:
    """Return the first mask row of each request, and the end of the last one's rows, from their row counts."""
    if since_033(manager):  # all requests get the same number: the worker divides
        return [index * max(counts) for index in range(len(counts) + 1)]
    return [0, *accumulate(counts)]


def since_033(manager: Any) -> bool:
    """Return whether all requests have the same number of mask rows, which vLLM has from 0.33 on."""
    return hasattr(manager, "_masked_reasoning_ends")
