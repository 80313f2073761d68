"""The tree work of a step on a CPU, in C++ operators over small arrays.

There a call of torch takes longer than its work.  Each function has the name and the arguments of its reference in
``core``, which runs where the operators cannot be built.  Greedy decoding works directly from the logits: its reference
is ``core.walk.walk_exact`` with ``argmax`` as the sampler, which runs where ``walks_greedily`` is false.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from vllm_specplug.core import growth, layout, pruning, step
from vllm_specplug.core import tree as core_tree
from vllm_specplug.core.growth import GrowthOps
from vllm_specplug.core.pool import Beam, DraftPool, new_pool
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.types import Draft, TokenTree, TreeLayout, Walk

#: The lowest finite value: only -inf is below it.
_LOWEST = torch.finfo(torch.float32).min
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grow_level(
    pool: DraftPool, beam: Beam | None, token_ids: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> Beam | None:
    """See ``core.growth.grow_level``."""
    if (ops := operators()) is None:
        return growth.grow_level(pool, beam, token_ids, log_probs, num_nodes)
    found = ops.grow_level.default(
        pool.token_ids,
        pool.parents,
        pool.log_values,
        pool.depths,
        pool.size,
        pool.num_levels + 1,
        None if beam is None else beam.nodes,
        None if beam is None else beam.mask,
        token_ids,
        log_probs,
        num_nodes,
    )
    pool.num_levels += 1
    pool.level_start, pool.size = pool.size, pool.size + token_ids.numel() // len(pool.token_ids)
    return Beam(*found) if found[0].shape[1] else None


def rerank_draft(
    pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0
) -> tuple[Draft, torch.Tensor]:
    """See ``core.pruning.rerank_draft``."""
    if (ops := operators()) is None:
        return pruning.rerank_draft(pool, root_token_ids, num_nodes, min_node_value)
    *rows, log_values, pool_indices = ops.rerank_draft.default(
        pool.token_ids,
        pool.parents,
        pool.log_values,
        pool.depths,
        pool.size,
        root_token_ids,
        num_nodes,
        math.log(min_node_value) if min_node_value > 0 else _LOWEST,
    )
    return Draft(TokenTree(*rows), log_values), pool_indices


def prune(draft: Draft, keep: torch.Tensor) -> Draft:
    """See ``core.pruning.prune``."""
    if (ops := operators()) is None:
        return pruning.prune(draft, keep)
    given = draft.tree
    *rows, log_values, sources = ops.prune.default(
        given.token_ids, given.parents, given.depths, given.num_rows, draft.log_values, keep
    )
    bits = draft.source_bits
    if bits is not None:
        bits = bits.gather(1, sources.clamp(min=0)).masked_fill(sources < 0, 0)
    return replace(draft, tree=TokenTree(*rows), log_values=log_values, source_bits=bits, proposal=None)


def from_flat(token_ids: torch.Tensor, parents: torch.Tensor, num_rows: torch.Tensor) -> TokenTree:
    """See ``core.tree.from_flat``."""
    if (ops := operators()) is None:
        return core_tree.from_flat(token_ids, parents, num_rows)
    return TokenTree(*ops.from_flat.default(token_ids, parents, num_rows), num_rows.long())


def lay_out(tree: TokenTree, context_lens: torch.Tensor, max_depth: int | None = None) -> TreeLayout:
    """See ``core.layout.lay_out``."""
    if (ops := operators()) is None:
        return layout.lay_out(tree, context_lens, max_depth)
    return TreeLayout(*ops.lay_out.default(tree.parents, tree.depths, tree.num_rows, context_lens))


def plan_step(walk: Walk, row_start: torch.Tensor, num_flat_rows: int) -> StepPlan:
    """See ``core.step.plan_step``."""
    if (ops := operators()) is None:
        return step.plan_step(walk, row_start, num_flat_rows)
    return StepPlan(*ops.plan_step.default(walk.path_rows, walk.num_emitted, row_start, num_flat_rows))


def walks_greedily(logits: torch.Tensor) -> bool:
    """Return whether ``greedy_tokens`` and ``greedy_walk`` can be used on these logits."""
    return logits.device.type == "cpu" and logits.dtype in _DTYPES and operators() is not None


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the first largest logit of each row, int32 ``[num_rows, 1]``.

    Args:
        logits: float32, bfloat16 or float16 ``[num_rows, vocab_size]``.
    """
    return operators().greedy_tokens.default(logits)


def greedy_walk(
    tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor, max_emitted: int
) -> Walk:
    """Walk all trees at temperature 0.

    Args:
        tree: the verified trees.
        logits: float32, bfloat16 or float16 ``[num_logits_rows, vocab_size]``.
        first_rows: int64 ``[num_reqs]``; row of each request's root in ``logits``.
        active: bool ``[num_reqs]``; requests to walk; the others emit nothing.
        max_emitted: most tokens to emit.

    Returns:
        The walk, as wide as its longest path.
    """
    walk = operators().greedy_walk.default
    return Walk(*walk(logits, tree.token_ids.contiguous(), tree.parents.contiguous(), first_rows, active, max_emitted))


#: ``core.growth.GrowthOps`` of operators.
OPERATORS = GrowthOps(new_pool, grow_level, rerank_draft, static=False, likeliest=likeliest)
