"""The slowest kernels of a V2 step, in plain torch: Triton's interpreter takes most of an engine's time in tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.doubles.attention_inputs import ROWS
from vllm_specplug.core import draft_sampling, growth, pool, pruning
from vllm_specplug.core.growth import GrowthOps
from vllm_specplug.core.layout import WORD_BITS, ancestor_bits
from vllm_specplug.core.pool import Beam, DraftPool
from vllm_specplug.core.tree_rows import CpuTreeRows
from vllm_specplug.cpu.kernels.tree_attention import tree_attention_reference
from vllm_specplug.gpu import attention as paged
from vllm_specplug.gpu import draft_sampling as sampled_v2
from vllm_specplug.gpu.drafters import eagle as eagle_v2
from vllm_specplug.gpu.kernels.tiles import CacheScales
from vllm_specplug.proposers.lookup import device_proposer as lookup_proposer
from vllm_specplug.proposers.union import device_proposer as union_proposer


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for places where nothing may look at a tensor's values: a kernel does not either."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@_unseen
def _attend(query, output, pages, tree, tree_key, tree_value, scale, *, traits, num_splits=None, scales=None) -> None:
    """The device's ``tree_attention``; a number of splits is given to compile it only."""
    if num_splits is not None:
        return
    if scales is not None:
        kv_cache, tree_key, tree_value = scaled(pages.kv_cache, tree_key, tree_value, scales)
        pages = pages._replace(kv_cache=kv_cache)
    rows = {name: getattr(tree, name)[: len(tree.context_lens)] for name in ROWS}
    on_cpu = CpuTreeRows(**rows, mask=_mask(tree.bits))
    tree_attention_reference(query, output, pages, on_cpu, tree_key, tree_value, scale, traits=traits)


def scaled(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: CacheScales
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pages and rows of 8 bits as what they stand for."""
    by_key, by_value = (factor.float().reshape(-1, 1) for factor in scales[1:])
    keys, values = kv_cache.float().chunk(2, dim=-1)
    pages = torch.cat([keys * by_key.unsqueeze(1), values * by_value.unsqueeze(1)], dim=-1)
    return pages, key.float() * by_key, value.float() * by_value


def _mask(bits: torch.Tensor) -> torch.Tensor:
    """Unpack words ``[num_reqs, num_rows, num_words]`` to bool ``[num_reqs, num_rows, num_words * WORD_BITS]``."""
    return ((bits.unsqueeze(-1) >> torch.arange(WORD_BITS)) & 1).bool().flatten(2)


@_unseen
def _grow_level(
    drafted: DraftPool, beam: Beam | None, token_ids: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> Beam | None:
    """``growth.grow_level`` with masks in words."""
    if beam is not None:
        num_fed = drafted.num_levels * token_ids.shape[1]
        beam = Beam(beam.nodes, beam.token_ids, beam.log_values, beam.sources, _mask(beam.mask)[..., :num_fed])
    found = growth.grow_level(drafted, beam, token_ids, log_probs, num_nodes, static=True)
    if found is None:
        return None
    bits = ancestor_bits(found.mask)
    return Beam(found.nodes, found.token_ids.int(), found.log_values, found.sources, bits)


_rerank = _unseen(pruning.rerank_draft)

#: Where a step finds these kernels: module, name, reference; and the kernels themselves.
ORACLE = [
    (paged, "tree_attention", _attend),
    (eagle_v2, "likeliest", _unseen(draft_sampling.likeliest)),
    (sampled_v2, "likeliest", _unseen(draft_sampling.likeliest)),
    (eagle_v2, "KERNELS", GrowthOps(pool.new_pool, _grow_level, _rerank, static=True)),
    (lookup_proposer, "rerank_draft", _rerank),
    (union_proposer, "rerank_draft", _rerank),
]
KERNELS = [(module, name, getattr(module, name)) for module, name, _ in ORACLE]


def use(patch: pytest.MonkeyPatch, functions: list[tuple[Any, str, Any]]) -> None:
    """Use ``ORACLE`` or ``KERNELS`` from now on."""
    for module, name, function in functions:
        patch.setattr(module, name, function)
