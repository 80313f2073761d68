"""Our attention kernel against vLLM's, for each kind of layer, on keys that show windows, soft caps, sinks and biases.

On a CPU, trees and plain steps share our kernel: a comparison of them cannot show that the kernel leaves out a window,
a soft cap, sinks or a bias.  Here most queries are aimed at two keys, their own and one that may be at the edge of the
window: the output is their values, and changes at once if the second is seen or hidden, or if their scores change.  The
other queries weigh few keys alike, which shows sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_specplug.cpu.attention import TreeAttentionImpl
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.tree_attention import causal_attention

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
    seen = set()
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if (
            name not in block_sizes
            or not isinstance(impl, TreeAttentionImpl)
            or impl.attn_type != AttentionType.DECODER
        ):
            continue
        window, dtype = impl.traits.window, runner.model_config.dtype
        stored = (layer.isa, impl.kv_cache_dtype, impl.scales(layer))
        kind = (window, impl.traits.soft_cap, impl.num_heads, impl.num_kv_heads, impl.head_size, *stored)
        has_own_values = impl.traits.sinks is not None or impl.traits.alibi_slopes is not None
        if window > LONGEST_WINDOW or (kind in seen and not has_own_values):
            continue
        seen.add(kind)
        difference, keeps_bits = compare_kernels(layer, dtype, block_sizes[name])
        if difference > TOLERANCE[dtype]:
            return f"attention of {name} differs from vLLM's by {difference:.2g} of the largest value"
        if not keeps_bits:
            return f"attention of {name} has other bits in a batch than alone"
    return ""


@torch.inference_mode()
def compare_kernels(layer: Any, dtype: torch.dtype, block_size: int) -> tuple[float, bool]:
    """Compare both kernels for a layer.

    Returns:
        The largest difference, as a part of the largest value; whether our kernel gives a row the same bits alone.
    """
    impl, generator = layer.impl, torch.Generator().manual_seed(0)
    window = max(impl.sliding_window, 0)
    lens = [max(TOKENS, window + ROWS + 8), 4]  # few keys show sinks

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
    query = _aimed_queries(impl, key[: lens[0]].float(), window)
    query = torch.cat([query, 0.1 * random(lens[1], impl.num_heads, impl.head_size)]).to(dtype)
    start = torch.tensor([0, ROWS, ROWS + lens[1]], dtype=torch.int32)
    theirs, ours = torch.zeros_like(query), torch.zeros_like(query)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    metadata = _metadata(layer, query, start, seq_lens, table, slots)
    CPUAttentionBackendImpl.forward(impl, layer, query, key, value, cache, metadata, theirs)
    pages, (scale, value_scale) = impl.numbers(cache), impl.scales(layer)
    rows = (table, seq_lens, start[:-1].contiguous(), start[1:] - start[:-1])
    causal_attention(query, ours, pages, layer.isa, *rows, scale, impl.traits, value_scale)
    alone, last = torch.zeros_like(ours), start[1:2] - 1
    row = (table[:1], seq_lens[:1], last, torch.ones_like(last))
    causal_attention(query, alone, pages, layer.isa, *row, scale, impl.traits, value_scale)
    difference = float((ours.float() - theirs.float()).abs().max() / value.float().abs().max())
    return difference if difference < float("inf") else float("inf"), torch.equal(alone[last], ours[last])


def _aimed_queries(impl: Any, key: torch.Tensor, window: int) -> torch.Tensor:
    """Make the queries of the last ``ROWS`` tokens, each aimed at an earlier key and, a little less, at its own.

    Args:
        key: float32 ``[num_tokens, num_kv_heads, head_size]``.
        window: of the layer; 0 for none.

    Returns:
        float32 ``[ROWS, num_heads, head_size]``.
    """
    edges = [window - 2, window - 1, window, window + 1] if window else [7, 30, 45]
    aim = max(AIM, CAPS * impl.traits.soft_cap)
    queries = []
    for row in range(ROWS):
        position = len(key) - ROWS + row
        target = position - max(0, [0, 1, *edges][row % (len(edges) + 2)])
        aimed = [key[at] / key[at].square().sum(-1, keepdim=True) for at in (max(target, 0), position)]
        queries.append((aim / impl.scale) * (aimed[0] + 0.95 * aimed[1]))
    return torch.stack(queries).repeat_interleave(impl.num_heads // impl.num_kv_heads, dim=1)


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
