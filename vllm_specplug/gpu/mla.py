"""vLLM's multi-head latent attention (MLA) on a device with tree rows; all other rows keep its kernels.

Tree rows are rows of decoding for vLLM's layer, which projects their queries to latents and the sums of latents to
values.  Between these, vLLM's decode kernel attends to the context, and ours to the masked tree.  Both read the paged
cache, into which vLLM has written the latents of the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import vllm.envs as envs
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata, MLACommonMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl, TritonMLAMetadataBuilder
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from vllm_specplug.config import ConfigError
from vllm_specplug.core.tree_rows import DeviceTreeRows, KvPages
from vllm_specplug.gpu.kernels.latent_tree import LINES, continue_with_tree
from vllm_specplug.gpu.states import requests_after
from vllm_specplug.vllm.attention_backends import FP8, TreeBackend

#: Tokens of a context for which one more program is started, at least; vLLM's own number.
SHARE = 512


@dataclass
class TreeMLAMetadata(MLACommonMetadata):
    """Metadata of a step with trees, which come first; to vLLM's layer their rows are rows of decoding.

    Attributes:
        decode: blocks and context lengths of the trees.
        tree: the tree rows.
        num_tree_rows: their number.
        others: vLLM's metadata of the requests after the trees; None: there are none.
        has_trees: so ``step.verify`` adds none.
    """

    has_trees: ClassVar[bool] = True
    tree: DeviceTreeRows | None = None
    num_tree_rows: int = 0
    others: MLACommonMetadata | None = None


class TreeMLABuilder:
    """Mixed into vLLM's builder of metadata.

    It is made as without drafts: vLLM would reserve memory of its decode kernel for all rows of all trees.
    """

    #: Returns the step's trees, or None.
    rows_of_step: Callable[[], DeviceTreeRows | None] = staticmethod(lambda: None)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        super().__init__(kv_cache_spec, layer_names, plain, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        rows, common, others = self.rows_of_step(), common_attn_metadata, None
        if rows is None:
            return super().build(common_prefix_len, common, fast_build)
        num_rows, num_trees = common.num_actual_tokens, len(rows.context_lens)
        if not rows.all_rows:
            if rows.num_tree_rows is None:
                raise RuntimeError("vLLM has scheduled prompt rows before a tree, which MLA does not support")
            num_rows = rows.num_tree_rows
            others = super().build(0, requests_after(common, num_trees, num_rows))
        return TreeMLAMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=num_trees + (others.num_decodes if others else 0),
            num_decode_tokens=num_rows + (others.num_decode_tokens if others else 0),
            num_prefills=others.num_prefills if others else 0,
            prefill=others.prefill if others else None,
            decode=MLACommonDecodeMetadata(common.block_table_tensor[:num_trees], rows.context_lens, None),
            tree=rows,
            num_tree_rows=num_rows,
            others=others,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        if self.rows_of_step() is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)


class TreeMLAImpl:
    """Mixed into an implementation of vLLM whose pages keep latents, then rotary parts."""

    kv_sharing_target_layer_name = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype in FP8:
            raise ConfigError(
                "tree speculation on the V2 model runner reads latents (MLA) of 16 bits or more: found "
                f"--kv-cache-dtype {self.kv_cache_dtype}, use auto"
            )

    def forward_mha(
        self, q: Any, kv_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        others = attn_metadata.others if isinstance(attn_metadata, TreeMLAMetadata) else attn_metadata
        super().forward_mha(q, kv_c_normed, k_pe, kv_cache, others, *args, **kwargs)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from rows of trees, then from those of vLLM's decoding.

        Args:
            q: ``[num_rows, num_heads, head_size]``, or its two parts: projected to the latents, and rotary.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, head_size]``.
            attn_metadata: of the forward.
            layer: vLLM's.

        Returns:
            Sums of latents, ``[num_rows, num_heads, kv_lora_rank]``; vLLM's log-sum-exp in a step without trees.
        """
        if not isinstance(attn_metadata, TreeMLAMetadata):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        first, others = attn_metadata.num_tree_rows, attn_metadata.others
        if others is not None and others.num_decode_tokens:
            output[first:], _ = super().forward_mqa(query[first:], kv_c_and_k_pe_cache, others, layer)
        page = kv_c_and_k_pe_cache.shape[1]
        slots = attn_metadata.slot_mapping[:first]  # of padding rows -1, whose result is arbitrary
        latents = kv_c_and_k_pe_cache[slots // page, slots % page]
        pages = KvPages(kv_c_and_k_pe_cache.unsqueeze(1), attn_metadata.decode.block_table)
        latent_tree_attention(query, output, pages, attn_metadata.tree, latents, self.scale, layer._k_scale)
        return output, None


def latent_tree_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    tree: DeviceTreeRows,
    latents: torch.Tensor,
    scale: float,
    one: torch.Tensor,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    Args:
        query: float ``[num_tokens, num_heads, head_size]``, contiguous: projected to the latents, then rotary.
        output: as ``query``, ``[num_tokens, num_heads, rank]``; only rows that the tree names are written.
        pages: of latents, of the same type.
        tree: the rows; those of ``query`` and of ``latents``.
        latents: ``[num_tree_rows, head_size]``, with rotary parts.
        scale: factor of the scores.
        one: float32 scalar on the device: a factor that vLLM's kernel reads of 8-bit caches only.
    """
    kv_cache, block_table, _ = pages
    longest = tree.max_context_len or block_table.shape[1] * kv_cache.shape[2]
    context, sums = _attend_contexts(
        _rows_by_tree(query, tree), kv_cache.transpose(1, 2), block_table, tree.context_lens, scale, one,
        rank=output.shape[2], longest=longest,
    )  # fmt: skip
    continue_with_tree(query, output, context, sums, tree, latents, scale)


def _rows_by_tree(query: torch.Tensor, tree: DeviceTreeRows) -> torch.Tensor:
    """Return the queries of each tree as lines: ``[num_trees, num_rows * num_heads, head_size]``.

    Where trees differ, each has as many rows as any tree can have: vLLM's kernel is compiled for each number of lines.
    """
    num_trees = len(tree.context_lens)
    if tree.uniform:
        return query[: num_trees * tree.max_query_len].reshape(num_trees, -1, query.shape[2])
    rows = tree.query_start.long().unsqueeze(1) + torch.arange(tree.bits.shape[1], device=query.device)
    # Beyond a tree's rows: any row, its result is unused.
    return query[rows.clamp(max=len(query) - 1)].flatten(1, 2)


def _attend_contexts(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    one: torch.Tensor,
    *,
    rank: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from all rows of each tree to its context by vLLM's decode kernel.

    They see the same context: the kernel gets them as the heads of one token, and no row needs a block table.

    Args:
        query: ``[num_trees, num_lines, head_size]``, contiguous; a line is a row and a head.
        kv_cache: ``[num_blocks, block_size, 1, head_size]``.
        block_table: int32 ``[num_trees, max_blocks]``.
        context_lens: int32 ``[num_trees]``.
        scale: factor of the scores.
        one: float32 scalar on the device.
        rank: numbers of a latent.
        longest: at least the largest of ``context_lens``.

    Returns:
        Sums of latents, float32 ``[num_trees, num_lines, rank]``, and the log-sum-exp of the scores, float32
        ``[num_trees, num_lines]``; for an empty context no numbers.
    """
    num_trees, num_lines, _ = query.shape
    splits = _num_splits(num_trees * triton.cdiv(num_lines, LINES), longest)
    output = query.new_empty(num_trees, num_lines, rank, dtype=torch.float32)
    sums, parts = output.new_empty(num_trees, num_lines), output.new_empty(num_trees, num_lines, splits, rank + 1)
    decode_attention_fwd(
        query, kv_cache, kv_cache[..., :rank], output, sums, block_table, context_lens, parts, splits, scale,
        kv_cache.shape[1], k_scale=one, v_scale=one, is_mla=True,
    )  # fmt: skip
    return output, sums


def _num_splits(num_programs: int, longest: int) -> int:
    """Return into how many parts vLLM's kernel cuts a context: a power of two, since each number is compiled."""
    if envs.VLLM_BATCH_INVARIANT:
        return 1
    wanted = min(2 * current_platform.num_compute_units() // num_programs, longest // SHARE)
    return 1 << max(wanted, 1).bit_length() - 1


def compile_kernels(layers: Mapping[str, Any], bits: torch.Tensor, longest: int) -> None:
    """Compile the kernels of steps with prompts beside trees, so that no step waits for them.

    Args:
        layers: of MLA, by name.
        bits: int64 ``[>= 1, max_query_len, num_words]``, as wide as those of any step; not read.
        longest: tokens of a context, at most.
    """
    for layer in layers.values():
        impl, cache = layer.impl, layer.kv_cache
        query = cache.new_zeros(1, impl.num_heads, impl.head_size)
        nothing = torch.zeros(1, dtype=torch.int32, device=cache.device)
        names = ("context_lens", "query_start", "query_lens", "tree_start", "tree_lens")
        pages, output = KvPages(cache.unsqueeze(1), nothing[None]), query[..., : impl.kv_lora_rank].clone()
        for halvings in range(max(longest // SHARE, 1).bit_length()):
            tree = DeviceTreeRows(
                **dict.fromkeys(names, nothing),
                bits=bits[:1],
                max_query_len=bits.shape[1],
                max_context_len=longest >> halvings,
            )
            latent_tree_attention(query, output, pages, tree, query[:, 0], impl.scale, layer._k_scale)


class TreeTritonMLABuilder(TreeMLABuilder, TritonMLAMetadataBuilder):
    pass


class TreeTritonMLAImpl(TreeMLAImpl, TritonMLAImpl):
    pass


class TreeTritonMLABackend(TreeBackend, TritonMLABackend):
    impl, builder = TreeTritonMLAImpl, TreeTritonMLABuilder
