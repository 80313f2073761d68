"""One decode step on the GPU, in the order in which it runs.  vLLM's V2 runner calls the phases through these methods:

========= ==================================== ==========================================================
stage     ``TreeModelState.prepare_attn``      positions and ancestor masks of the tree rows
verify    ``TreeModelState.prepare_attn``      attention metadata with trees; then vLLM's forward runs
walk      ``TreeRejectionSampler.__call__``    a token is sampled at each row; the walk follows the tokens
commit    ``TreeRejectionSampler.__call__``    accepted key/value moves to the end of the context
draft     ``TreeSpeculator.propose``           the drafter reads the accepted rows and drafts the next trees
========= ==================================== ==========================================================

``DeviceTrees`` is the state of the step: the drafted trees and, from ``commit`` on, the plan of the accepted rows.
Nothing is read back to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.attention import with_trees
from vllm_specplug.gpu.kernels.step import move_rows, plan_step, walk_rows
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.types import Walk

if TYPE_CHECKING:
    from vllm_specplug.gpu.drafters.base import TreeSpeculator
    from vllm_specplug.gpu.sampler import TreeRejectionSampler
    from vllm_specplug.gpu.settling import VerifiedRows


def stage(trees: DeviceTrees, input_batch: Any) -> DeviceTreeRows | None:
    """Give the tree rows of a batch their positions and masks in one kernel; None without trees.

    ``core.layout.lay_out`` is the reference.
    """
    return trees.stage(input_batch)


def verify(metadata: dict[str, Any], rows: DeviceTreeRows, draft_layers: set[str]) -> dict[str, Any]:
    """Return the attention metadata of a forward, by layer, with trees for the target's layers.

    Layers that share metadata share the copy.  Layers with a recurrent state or MLA have their trees already.
    """
    draft_layers = draft_layers.union(name for name, layer in metadata.items() if getattr(layer, "has_trees", False))
    target = {id(layer): layer for name, layer in metadata.items() if name not in draft_layers}
    copies = {key: with_trees(layer, rows) for key, layer in target.items()}  # once where layers share their metadata
    return {name: layer if name in draft_layers else copies[id(layer)] for name, layer in metadata.items()}


def walk(sampler: TreeRejectionSampler, trees: DeviceTrees, rows: VerifiedRows) -> tuple[Walk, torch.Tensor]:
    """Walk each tree over the tokens that the target samples at its rows; ``core.walk.walk_exact`` is the reference.

    Returns:
        The walk, and int32 ``[num_reqs]`` rejected rows of each request.
    """
    batch, chosen = rows.batch, sampler.choose(rows)
    if sampler.needs_history(batch):
        output, path_rows, num_emitted = sampler.walk_by_depth(rows, chosen)
    else:
        sampled = sampler.sample_all(rows, chosen)
        output, path_rows, num_emitted = walk_rows(
            batch.idx_mapping, batch.cu_num_logits, rows.token_ids, sampled, trees.parents
        )
    prefill_lens = sampler.sampler.req_states.prefill_len.gpu
    num_sampled, num_rejected = get_num_sampled_and_rejected(
        num_emitted, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_lens
    )
    return Walk(output, path_rows, num_sampled), num_rejected


def commit(
    trees: DeviceTrees,
    walked: Walk,
    caches: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
    slot_mappings: torch.Tensor,
) -> None:
    """Move the accepted rows' key/value to the end of the context, in all layers of the target.

    Args:
        trees: keep the plan of the accepted rows, which the drafter reads next.
        walked: from ``walk``.
        caches: from ``committed_caches``.
        slot_mappings: int64 ``[num_kv_groups, num_rows]``; cache slots of the flat rows.
    """
    row_start = trees.tree_start[: len(walked.path_rows)]
    plan = trees.plan = plan_step(walked, row_start, trees.num_rows)
    for group, cache, pointers in caches:
        move_rows(pointers, cache, slot_mappings[group], plan.source_rows, plan.target_rows)


def draft(speculator: TreeSpeculator, input_batch: Any, propose: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Draft one tree per request.  If the drafter fails, the server keeps decoding; its trees then have no nodes.

    With several tensor-parallel ranks the error stops the server.

    Args:
        speculator: keeps the parents of the drafted nodes in its trees.
        input_batch: vLLM's.
        propose: the speculator's draft phase, or what its KV cache needs in a step without drafts.

    Returns:
        int64 ``[num_reqs, num_nodes]``; the nodes' tokens.
    """
    guard, timer, learning = speculator.guard, speculator.timer, speculator.learning
    failures = guard.failures
    if learning is not None:
        guard.run(learning.begin_phase)
    speculates = speculator.slot_params.speculates[input_batch.idx_mapping_np]
    timer.add("turned off by the request", int((~speculates).sum()))
    # A draft model reads all tokens: later requests may find their key/value in the prefix cache.
    if not speculates.any() and not speculator.draft_attn_layer_names:
        return speculator.draft_nothing(input_batch)
    with timer.timed("draft_seconds"):
        token_ids = guard.run(propose)
        if token_ids is None:
            token_ids = speculator.draft_nothing(input_batch)
    timer.add("proposer failed", guard.failures - failures)
    return token_ids
