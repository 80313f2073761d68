"""Compiling the loops before the first request."""

from __future__ import annotations

import torch

from vllm_specplug.core.loops import pool as pool_loops
from vllm_specplug.core.loops import rows as row_loops
from vllm_specplug.core.pool import new_pool
from vllm_specplug.types import Draft, TokenTree, Walk


def compile_loops() -> None:
    """Compile all loops, or load them from the cache: else the first requests would wait for it."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    rows, value = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)
    tree = TokenTree(rows, rows - 1, rows, one)
    pool = new_pool(1, 1, 1, "cpu")
    pool_loops.grow_level(pool, None, pool_loops.largest(value, 1)[1], value, 1)
    pool_loops.rerank(pool, zero, 1, 0.0)
    row_loops.depths_from_parents(tree.parents)
    row_loops.from_flat(rows, rows, one)
    row_loops.prune(Draft(tree, value), rows == 0)
    row_loops.lay_out(tree, zero)
    row_loops.plan_step(Walk(rows.int(), rows, one), zero, 1)
