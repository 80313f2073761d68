"""Our attention kernel against vLLM's, for each kind of layer, on keys that show windows, soft caps, sinks and biases.

On a CPU, trees and plain steps share our kernel: a comparison of them cannot show that the kernel leaves out a window,
a soft cap, sinks or a bias.  Here most queries are aimed at two keys, their own and one that may be at the edge of the
window: the output is their values, and changes at once if the second is seen or hidden, or if their scores change.  The
other queries weigh few keys alike, which shows sinks.

Latents (MLA) are compared with attention over the keys and values that vLLM's definition expands them to.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_specplug.core.tree_rows import KvPages
from vllm_specplug.cpu.attention import TreeAttentionImpl, TreeImpl
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.tree_attention import PlainRows, causal_attention

#: Largest difference that rounding explains, as a part of the largest value: vLLM's kernel for AMX rounds weights to
#: bfloat16.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: Last tokens of the long request that are compared; its tokens if the layer has no window, more than two chunks of the
#: kernel; and the longest window that is tried, in tokens.
ROWS, TOKENS, LONGEST_WINDOW = 24, 300, 8192
#: Score of the key that a query is aimed at, before a soft cap; with one, so many caps.
AIM, CAPS = 16.0, 2.0


def fault_of_attention(runner: Any) -> str:
    """Return which layer's attention differs from vLLM's; empty if none does, or vLLM's kernel serves them."""
    if operators() is None:
        return ""
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)
    groups = runner.kv_cache_config.kv_cache_groups
    block_sizes = {name: group.kv_cache_spec.block_size for group in groups for name in group.layer_names}
    seen: set[tuple[Any, ...]] = {()}
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if name not in block_sizes or not isinstance(impl, TreeImpl) or (kind := _kind(layer)) in seen:
            continue
        seen.add(kind)
        dtype = runner.model_config.dtype
        compare = compare_kernels if isinstance(impl, TreeAttentionImpl) else compare_latents
        difference, keeps_bits = compare(layer, dtype, block_sizes[name])
        if difference > TOLERANCE[dtype]:
            return f"attention of {name} differs from vLLM's by {difference:.2g} of the largest value"
        if not keeps_bits:
            return f"attention of {name} has other bits in a batch than alone"
    return ""


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return the traits of a layer, of which one layer is compared; () if it is not compared."""
    impl = layer.impl
    if not isinstance(impl, TreeAttentionImpl):
        return "latents", impl.num_heads, impl.head_size, impl.kv_lora_rank, impl.qk_nope_head_dim, impl.v_head_dim
    traits = impl.traits
    too_long = max(traits.window, traits.local) > LONGEST_WINDOW
    if impl.attn_type != AttentionType.DECODER or too_long or 0 < traits.local < ROWS:
        return ()
    own = () if traits.sinks is None and traits.alibi_slopes is None else (layer.layer_name,)
    sizes = impl.num_heads, impl.num_kv_heads, impl.head_size, layer.isa, impl.kv_cache_dtype, impl.scales(layer)
    return traits.window, traits.local, traits.soft_cap, *sizes, *own


@torch.inference_mode()
def compare_kernels(layer: Any, dtype: torch.dtype, block_size: int) -> tuple[float, bool]:
    """Compare both kernels for a layer.

    Returns:
        The largest difference, as a part of the largest value; whether our kernel gives a row the same bits alone.
    """
    impl, generator = layer.impl, torch.Generator().manual_seed(0)
    window = max(impl.sliding_window, 0)
    chunk = getattr(layer, "attention_chunk_size", None) or 0
    # vLLM's kernel gets the tokens since the last chunk's first one, `start`.
    start = chunk if chunk % block_size == 0 else 0
    lens = [max(TOKENS, window + ROWS + 8), 4]  # few keys show sinks
    if chunk:
        lens[0] = start + min(TOKENS, chunk)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [-(-length // block_size) for length in lens]
    table = torch.zeros(2, max(blocks), dtype=torch.int32)
    table[0, : blocks[0]], table[1, 0] = torch.arange(blocks[0], 0, -1), blocks[0] + 1
    key, value = random(2, sum(lens), impl.num_kv_heads, impl.head_size).to(dtype)
    positions = torch.cat([torch.arange(length) for length in lens])
    requests = torch.arange(2).repeat_interleave(torch.tensor(lens))
    slots = table[requests, positions // block_size].long() * block_size + positions % block_size
    cache = torch.zeros(sum(blocks) + 1, impl.num_kv_heads, block_size, 2 * impl.head_size)
    cache = cache.to(layer.kv_cache_torch_dtype)
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    edge = start if chunk else None
    query = _aimed_queries(impl.scale, key[: lens[0]].float(), window, impl.traits.soft_cap, edge)
    query = query.repeat_interleave(impl.num_heads // impl.num_kv_heads, dim=1)
    query = torch.cat([query, 0.1 * random(lens[1], impl.num_heads, impl.head_size)]).to(dtype)
    first = torch.tensor([0, ROWS, ROWS + lens[1]], dtype=torch.int32)
    theirs, ours = torch.zeros_like(query), torch.zeros_like(query)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    since = torch.zeros_like(table)
    since[0, : blocks[0] - start // block_size], since[1] = table[0, start // block_size : blocks[0]], table[1]
    metadata = _metadata(layer, query, first, seq_lens - torch.tensor([start, 0], dtype=torch.int32), since, slots)
    CPUAttentionBackendImpl.forward(impl, layer, query, key, value, cache, metadata, theirs)
    pages, (scale, value_scale) = KvPages(impl.numbers(cache), table, layer.isa), impl.scales(layer)
    rows = PlainRows(seq_lens, first[:-1].contiguous(), first[1:] - first[:-1])
    causal_attention(query, ours, pages, rows, scale, impl.traits, value_scale)
    alone, last = torch.zeros_like(ours), first[1:2] - 1
    row = PlainRows(seq_lens[:1], last, torch.ones_like(last))
    causal_attention(query, alone, pages._replace(block_table=table[:1]), row, scale, impl.traits, value_scale)
    return _difference(ours, theirs, value), torch.equal(alone[last], ours[last])


def _difference(ours: torch.Tensor, theirs: torch.Tensor, value: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest value; infinity if it is not a number."""
    difference = float((ours.float() - theirs.float()).abs().max() / value.float().abs().max())
    return difference if difference < float("inf") else float("inf")


@torch.inference_mode()
def compare_latents(layer: Any, dtype: torch.dtype, block_size: int) -> tuple[float, bool]:
    """Do ``compare_kernels`` for a layer of MLA.  Its expanded keys and values are computed in float32."""
    from vllm_specplug.cpu.mla import mla_metadata

    impl, generator = layer.impl, torch.Generator().manual_seed(0)
    pages = -(-TOKENS // block_size)
    latents = torch.randn(TOKENS, impl.head_size, generator=generator).to(dtype)
    cache = torch.zeros(pages + 1, block_size, impl.head_size, dtype=dtype)
    table, lens = torch.arange(pages, 0, -1, dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32)
    positions = torch.arange(TOKENS)
    slots = table[0, positions // block_size].long() * block_size + positions % block_size
    cache.view(-1, impl.head_size)[slots] = latents
    key, value = impl.expand(latents)
    query = _aimed_queries(impl.scale, key, 0)

    def ours(rows: int) -> torch.Tensor:
        output, first = torch.zeros(rows, impl.num_heads * impl.v_head_dim, dtype=dtype), torch.tensor([0, rows])
        sizes = {"num_tokens": rows, "max_query_len": rows, "max_seq_len": TOKENS}
        metadata = mla_metadata(first.int(), lens, table, slots[-rows:], **sizes)
        latent, rotary = latents[-rows:].split([impl.kv_lora_rank, impl.qk_rope_head_dim], dim=-1)
        impl.forward_mha(query[-rows:].to(dtype), latent, rotary.unsqueeze(1), cache, metadata, None, output)
        return output.unflatten(-1, (impl.num_heads, -1))

    scores = torch.einsum("qhd,khd->hqk", query.to(dtype).float(), key) * impl.scale
    scores = scores.masked_fill(positions > positions[-ROWS:, None], float("-inf"))
    theirs = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    together = ours(ROWS)
    return _difference(together, theirs, value), torch.equal(ours(1)[0], together[-1])


def _aimed_queries(
    scale: float, key: torch.Tensor, window: int, soft_cap: float = 0.0, start: int | None = None
) -> torch.Tensor:
    """Make the queries of the last ``ROWS`` tokens, each aimed at an earlier key and, a little less, at its own.

    Args:
        scale, soft_cap: of the layer.
        key: float32 ``[num_tokens, num_kv_heads, head_size]``.
        window: of the layer; 0 for none.
        start: the first position that all of them see, in a layer of local attention.

    Returns:
        float32 ``[ROWS, num_kv_heads, head_size]``.
    """
    edges = [window - 2, window - 1, window, window + 1] if window else [7, 30, 45]
    aim = max(AIM, CAPS * soft_cap)
    queries = []
    for row in range(ROWS):
        position = len(key) - ROWS + row
        if start is not None:
            edges = [position - start + step for step in (-1, 0, 1, 2)]
        target = position - max(0, [0, 1, *edges][row % (len(edges) + 2)])
        aimed = [key[at] / key[at].square().sum(-1, keepdim=True) for at in (max(target, 0), position)]
        queries.append((aim / scale) * (aimed[0] + 0.95 * aimed[1]))
    return torch.stack(queries)


def _metadata(
    layer: Any,
    query: torch.Tensor,
    start: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
) -> CPUAttentionMetadata:
    """Make vLLM's metadata of one forward."""
    impl = layer.impl
    scheduled = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=start,
        causal=True,
        sliding_window_size=impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=True,
        **({"kv_cache_dtype": impl.kv_cache_dtype} if impl.is_fp8 else {}),  # vLLM knows the name since it has fp8
    )
    return CPUAttentionMetadata(
        num_actual_tokens=len(query),
        max_query_len=ROWS,
        query_start_loc=start,
        max_seq_len=int(seq_lens.max()),
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=slots,
        scheduler_metadata=scheduled,
    )
