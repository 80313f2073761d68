"""The tree work of a step on a CPU, in C++ operators over small arrays.

There a call of torch takes longer than its work.  Each function has the name and the arguments of its reference in
``core``, which runs where the operators cannot be built.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from vllm_specplug.core import growth, layout, pruning, step, tree
from vllm_specplug.core.growth import GrowthOps
from vllm_specplug.core.pool import Beam, DraftPool, new_pool
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.kernels.cpu_ops import where_built
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.types import Draft, TokenTree, TreeLayout, Walk

#: The lowest finite value: only -inf is below it.
_LOWEST = torch.finfo(torch.float32).min


@where_built(growth.grow_level)
def grow_level(
    ops: Any, pool: DraftPool, beam: Beam | None, token_ids: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> Beam | None:
    """See ``core.growth.grow_level``."""
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


@where_built(pruning.rerank_draft)
def rerank_draft(
    ops: Any, pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0
) -> tuple[Draft, torch.Tensor]:
    """See ``core.pruning.rerank_draft``."""
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


@where_built(pruning.prune)
def prune(ops: Any, draft: Draft, keep: torch.Tensor) -> Draft:
    """See ``core.pruning.prune``."""
    given = draft.tree
    *rows, log_values, sources = ops.prune.default(
        given.token_ids, given.parents, given.depths, given.num_rows, draft.log_values, keep
    )
    bits = draft.source_bits
    if bits is not None:
        bits = bits.gather(1, sources.clamp(min=0)).masked_fill(sources < 0, 0)
    return replace(draft, tree=TokenTree(*rows), log_values=log_values, source_bits=bits, proposal=None)


@where_built(tree.from_flat)
def from_flat(ops: Any, token_ids: torch.Tensor, parents: torch.Tensor, num_rows: torch.Tensor) -> TokenTree:
    """See ``core.tree.from_flat``."""
    return TokenTree(*ops.from_flat.default(token_ids, parents, num_rows), num_rows.long())


@where_built(layout.lay_out)
def lay_out(ops: Any, tree: TokenTree, context_lens: torch.Tensor, max_depth: int | None = None) -> TreeLayout:
    """See ``core.layout.lay_out``."""
    return TreeLayout(*ops.lay_out.default(tree.parents, tree.depths, tree.num_rows, context_lens))


@where_built(step.plan_step)
def plan_step(ops: Any, walk: Walk, row_start: torch.Tensor, num_flat_rows: int) -> StepPlan:
    """See ``core.step.plan_step``."""
    return StepPlan(*ops.plan_step.default(walk.path_rows, walk.num_emitted, row_start, num_flat_rows))


#: ``core.growth.GrowthOps`` of operators.
OPERATORS = GrowthOps(new_pool, grow_level, rerank_draft, static=False, likeliest=likeliest)
