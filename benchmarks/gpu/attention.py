"""One layer's attention of an 8B model to a paged context and a tree: each way to compute it, checked and timed.

``triton`` is the option ``tree_attention`` of this project, as are ``flash`` and ``xformers``.  The others are what one
would use without it: ``sdpa`` and ``flex`` over key/value gathered from the pages (the gathering is timed too), and
``chain``, vLLM's FlashAttention over the pages without a tree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.device import Skip, attempt, bandwidth_gb_s, device, device_ms, no_syncs, timed
from tests.doubles.attention_inputs import attend, device_arguments, make_inputs
from tests.doubles.attention_reference import ReferenceContext
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT, tree_attention_reference
from vllm_specplug.gpu.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.gpu.kernels.tree_attention import tree_attention

#: From the reference, relative to the largest output: rounded to bfloat16, twice where parts are merged.
MAX_DEVIATION = 0.012
#: Values of the option ``tree_attention``.
PATHS = ("triton", "flash", "xformers")
PAGE = 16

Row = dict[str, Any]
#: An attention: writes to the output of its inputs.
Attend = Callable[[], Any]


def measure(question: Row) -> Iterator[Row]:
    """Check and time the attention ``name`` for each number of nodes, context and batch."""
    name = question["name"]
    make = functools.partial(_option, name) if name in PATHS else {"sdpa": _sdpa, "flex": _flex, "chain": _chain}[name]
    for nodes, context, batch in itertools.product(question["nodes"], question["contexts"], question["batches"]):
        row: Row = {"nodes": nodes, "context": context, "batch": batch}
        inputs, expected = _case(nodes, context, batch)
        call = make(inputs, nodes, context, batch)
        if name != "chain":  # it has no tree: only its time can be compared
            inputs["output"].fill_(float("nan"))
            call()
            row["deviation"] = float((inputs["output"].float() - expected).abs().max() / expected.abs().max())
            if not row["deviation"] <= MAX_DEVIATION:
                row["problem"] = f"{row['deviation']:.3g} from the reference: {_named(nodes, context, batch)}"
        if name == "triton" and isinstance(problem := attempt(functools.partial(_without_syncs, call)), str):
            row["problem"] = f"waits for the device: {problem}"
        row |= timed(call)
        kv_heads, head_size = inputs["tree_key"].shape[1:]
        width = inputs["query"].element_size()
        rows_bytes = 2 * inputs["query"].numel() * width + 2 * inputs["tree_key"].numel() * width
        row["bytes"] = batch * context * kv_heads * head_size * 2 * width + rows_bytes
        row["floor_ms"] = row["bytes"] / bandwidth_gb_s() / 1e6
        row["times_floor"] = round(row["ms"] / row["floor_ms"], 2)
        if name == "triton":
            splits = (1, 2, 4, 8, 16, 32) if call.keywords["query"].is_cuda else (2,)
            row["ms_by_splits"] = {n: device_ms(functools.partial(call, num_splits=n)) for n in splits}
        yield row


def _named(nodes: int, context: int, batch: int) -> str:
    return f"{nodes} nodes, context {context}, batch {batch}"


def _without_syncs(call: Attend) -> None:
    with no_syncs():
        call()


@functools.lru_cache(maxsize=64)
def _case(nodes: int, context: int, batch: int) -> tuple[Row, torch.Tensor]:
    """Make inputs on the device, and the output of the reference; kept for all attentions of this process."""
    on_gpu = device().type == "cuda"
    heads, dtype = ((32, 8, 128), torch.bfloat16) if on_gpu else ((2, 1, 16), torch.float32)
    inputs = make_inputs(
        (context,) * batch, (nodes + 1,) * batch, num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2],
        block_size=PAGE, dtype=dtype, kv_layout=TOKEN_LAYOUT, garbage=0.0, gap=0, device=device(),
    )  # fmt: skip
    # A token's heads side by side, as in vLLM's default layout.
    inputs["kv_cache"] = inputs["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    expected = torch.empty_like(inputs["output"], dtype=torch.float32)
    attend(tree_attention_reference, **{**inputs, "output": expected})
    return inputs, expected


def context_attention(name: str, head_size: int) -> Any:
    """Return the context attention of ``flash`` or ``xformers``; without a GPU the reference replaces FlashAttention.

    Raises:
        Skip: it cannot run here.
    """
    try:
        if name == "xformers":
            from vllm_specplug.gpu.kernels.xformers_context import XformersContext

            return XformersContext(head_size)
        if device().type == "cpu":
            return ReferenceContext()
        from vllm_specplug.gpu.flash_context import FlashContext

        return FlashContext(head_size)
    except (ValueError, ImportError) as error:
        raise Skip(f"{name}: {error}") from error


def _option(name: str, inputs: Row, nodes: int, context: int, batch: int) -> functools.partial:
    arguments = device_arguments(**inputs, max_context_len=context, uniform=True)
    if name == "triton":
        return functools.partial(tree_attention, **arguments)
    of_context = context_attention(name, inputs["query"].shape[2])
    return functools.partial(merged_tree_attention, of_context, **arguments)


def _gathered(inputs: Row, context: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather key and value ``[batch, num_kv_heads, context + num_rows, head_size]`` of context and tree."""
    pages = inputs["kv_cache"][inputs["block_table"].long()]  # [batch, pages, heads, slots, 2 * head_size]
    both = pages.transpose(2, 3).flatten(1, 2)[:, :context]
    tree = torch.cat([inputs["tree_key"], inputs["tree_value"]], dim=-1).unflatten(0, (batch, -1))
    key, value = torch.cat([both, tree], dim=1).transpose(1, 2).chunk(2, dim=-1)
    return key, value


def _sdpa(inputs: Row, nodes: int, context: int, batch: int) -> Attend:
    """PyTorch's attention with a mask; the heads of a group are rows, so that nothing is repeated."""
    rows, num_heads, head_size = nodes + 1, *inputs["query"].shape[1:]
    kv_heads = inputs["tree_key"].shape[1]
    in_context = inputs["mask"].new_ones(batch, rows, context)
    mask = torch.cat([in_context, inputs["mask"]], dim=2).unsqueeze(1).repeat(1, 1, num_heads // kv_heads, 1)

    def call() -> None:
        key, value = _gathered(inputs, context, batch)
        # [batch * rows, kv_heads * group, d] -> [batch, kv_heads, group * rows, d]
        query = inputs["query"].view(batch, rows, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=inputs["scale"])
        found = found.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)
        inputs["output"].copy_(found.reshape(inputs["output"].shape))

    return call


def _flex(inputs: Row, nodes: int, context: int, batch: int) -> Attend:
    """PyTorch's flex attention, compiled; its block mask is made before, as once per step for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, tree = nodes + 1, inputs["mask"]

    def visible(b, _, q, kv):
        return (kv < context) | tree[b, q, (kv - context).clamp(min=0)]

    block_mask = create_block_mask(visible, batch, None, rows, context + rows, device=device())
    attend = torch.compile(flex_attention, dynamic=False) if device().type == "cuda" else flex_attention

    def call() -> None:
        key, value = _gathered(inputs, context, batch)
        query = inputs["query"].unflatten(0, (batch, rows)).transpose(1, 2)
        found = attend(query, key, value, block_mask=block_mask, scale=inputs["scale"], enable_gqa=True)
        inputs["output"].copy_(found.transpose(1, 2).flatten(0, 1))

    return call


def _chain(inputs: Row, nodes: int, context: int, batch: int) -> Attend:
    """vLLM's FlashAttention over as many rows as a chain, on pages that hold them."""
    if device().type == "cpu":
        raise Skip("chain: FlashAttention needs a GPU")
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError as error:
        raise Skip(f"chain: {error}") from error
    rows, (_, num_heads, head_size) = nodes + 1, inputs["query"].shape
    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        raise Skip("chain: vLLM has no FlashAttention for this device")
    place = {"dtype": torch.bfloat16, "device": device()}
    blocks = -(-(context + rows) // PAGE)
    cache = torch.randn(batch * blocks, PAGE, inputs["tree_key"].shape[1], 2 * head_size, **place)
    key, value = cache.split(head_size, dim=-1)
    table = torch.randperm(batch * blocks, device=device()).to(torch.int32).view(batch, blocks)
    query = torch.randn(batch * rows, num_heads, head_size, **place)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device())
    lens = torch.full((batch,), context + rows, dtype=torch.int32, device=device())
    return functools.partial(
        flash_attn_varlen_func, q=query, k=key, v=value, out=torch.empty_like(query), cu_seqlens_q=starts,
        max_seqlen_q=rows, seqused_k=lens, max_seqlen_k=context + rows, softmax_scale=inputs["scale"], causal=True,
        block_table=table, fa_version=version,
    )  # fmt: skip
