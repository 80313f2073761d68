"""vLLM's multi-head latent attention (MLA) on a CPU with tree rows.

A token keeps one *latent*, followed by the rotary part of its key.  Attention runs over these (the absorbed form):
each head's query is projected to the latent's size, and sums of latents are projected to values.  So it is attention
with one KV head, whose values are the first part of its keys, and our kernel computes all rows: prompts, plain rows and
trees.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata, split_kv_b_proj
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from vllm_specplug.config import ConfigError
from vllm_specplug.core.tree_rows import CpuTreeRows, KvPages
from vllm_specplug.cpu.attention import RowsWithoutTree, TreeImpl, keep_rows
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.row_linear import head_linear, pack_heads
from vllm_specplug.cpu.kernels.tree_attention import LATENT_LAYOUT, PlainRows, causal_attention, tree_attention
from vllm_specplug.vllm.attention_backends import FP8, TreeBackend

#: The kernel reads latents, and keys with their rotary part, in vectors of so many numbers.
_VECTOR = 16


@dataclass
class TreeMLAMetadata(RowsWithoutTree, MLACommonMetadata):
    """vLLM's metadata, which sends all rows to ``forward_mha``, with the tree rows of this forward, if any."""

    seq_lens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    tree: CpuTreeRows | None = None


class TreeMLAMetadataBuilder(AttentionMetadataBuilder[TreeMLAMetadata]):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)  # vLLM's is abstract

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TreeMLAMetadata:
        common = common_attn_metadata
        return mla_metadata(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


def mla_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    tree: CpuTreeRows | None = None,
) -> TreeMLAMetadata:
    """Make the metadata of a forward; the tensors are as in vLLM's ``CommonAttentionMetadata``."""
    return TreeMLAMetadata(
        num_reqs=len(seq_lens),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_actual_tokens=num_tokens,
        query_start_loc=query_start_loc,
        slot_mapping=slot_mapping,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=len(seq_lens),
        seq_lens=seq_lens,
        block_table=block_table,
        tree=tree,
    )


class TreeMLAImpl(TreeImpl, CPUMLAImpl):
    #: The projections of ``kv_b_proj`` are ours: vLLM releases its weight, as for its own kernels with AMX.
    uses_amx_bmm = True
    kv_sharing_target_layer_name = None
    reads_latents = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if operators() is None:
            raise ConfigError("tree speculation reads latents (MLA) with the C++ operators only: install g++")
        if self.kv_cache_dtype in FP8:
            raise ConfigError(
                f"on a CPU latents (MLA) have 16 bits or more: found --kv-cache-dtype {self.kv_cache_dtype}, use auto"
            )
        if self.kv_lora_rank % _VECTOR or self.head_size % _VECTOR:
            raise ConfigError(
                f"tree speculation reads latents (MLA) in sizes that are multiples of {_VECTOR}: found kv_lora_rank="
                f"{self.kv_lora_rank}, qk_rope_head_dim={self.qk_rope_head_dim}; serve this model without speculation"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        sizes = self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
        keys, values = split_kv_b_proj(self.kv_b_proj, act_dtype, *sizes)  # [latent, num_heads, size of a head]
        self._to_latent = pack_heads(keys.transpose(0, 1))
        self._to_value = pack_heads(values.permute(1, 2, 0))

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand latents ``[num_tokens, head_size]`` to each head's keys and values, float32.

        Returns:
            ``[num_tokens, num_heads, qk_head_dim]`` and ``[num_tokens, num_heads, v_head_dim]``.
        """
        of_head, of_latent = (
            torch.eye(size, dtype=latents.dtype).unsqueeze(1).expand(-1, self.num_heads, -1)
            for size in (self.qk_nope_head_dim, self.kv_lora_rank)
        )
        to_latent = head_linear(of_head, self._to_latent, self.kv_lora_rank).float()
        to_value = head_linear(of_latent, self._to_value, self.v_head_dim).float()
        latent, rotary = latents.float().split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        key = torch.einsum("tl,phl->thp", latent, to_latent)
        rotary = rotary.unsqueeze(1).expand(-1, self.num_heads, -1)
        return torch.cat([key, rotary], dim=-1), torch.einsum("tl,lhv->thv", latent, to_value)

    @functools.cached_property
    def layer_name(self) -> str:
        """The layer's name; vLLM does not tell it to ``forward_mha``."""
        layers = get_forward_context().no_compile_layers
        return next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)

    def do_kv_cache_update(self, *_: Any) -> None:
        """Write nothing: ``forward_mha`` knows which rows are written before the commit."""

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TreeMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend from all rows.

        Args:
            q: ``[num_tokens, num_heads, qk_head_dim]``, with rotary positions.
            kv_c_normed: the tokens' latents, ``[num_tokens, kv_lora_rank]``.
            k_pe: the rotary part of their keys, ``[num_tokens, 1, qk_rope_head_dim]``.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, head_size]``.
            output: ``[num_tokens, num_heads * v_head_dim]``; it is written.
        """
        nope, rotary = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        query = torch.cat([head_linear(nope, self._to_latent, self.kv_lora_rank), rotary], dim=-1)
        key = torch.cat([kv_c_normed.unsqueeze(1), k_pe], dim=-1)
        latents = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        self.attend(query, latents, key, kv_c_and_k_pe_cache, attn_metadata)
        values = head_linear(latents, self._to_value, self.v_head_dim)
        output.view(values.shape).copy_(values)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        key: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeMLAMetadata,
    ) -> None:
        """Attend over latents.

        Args:
            query: ``[num_tokens, num_heads, head_size]``.
            output: ``[num_tokens, num_heads, kv_lora_rank]``; it is written.
            key: of these tokens, ``[num_tokens, 1, head_size]``.
            kv_cache: ``[num_blocks, block_size, head_size]``.
            metadata: of the forward.
        """
        tree, pages = metadata.tree, KvPages(kv_cache.unsqueeze(1), metadata.block_table, LATENT_LAYOUT)
        if tree is None or not tree.all_rows:
            self._write(key, kv_cache, metadata.slot_mapping)
            rows = PlainRows(metadata.seq_lens, *metadata.rows_without_tree)
            causal_attention(query, output, pages, rows, self.scale)
        if tree is None:
            return
        key, _, kept = keep_rows(tree, self.layer_name, key, key)
        tree_attention(query, output, pages, tree, key, key[..., : self.kv_lora_rank], self.scale, kept)

    @staticmethod
    def _write(key: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows to their slots, but those of the padding (-1)."""
        slots = slots[: len(key)].long()
        written = slots >= 0
        block_size = kv_cache.shape[1]
        kv_cache[slots[written] // block_size, slots[written] % block_size] = key[written, 0]


class TreeMLABackend(TreeBackend, MLACommonBackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_VECTOR)]

    impl, builder = TreeMLAImpl, TreeMLAMetadataBuilder
