"""Kernels that need a GPU, in plain torch, behind the Python that calls them.

FlashAttention's Python is the installed host's own, read from its file; only the compiled operators are replaced.  Of
xformers, what 0.0.35 has under the names we use.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.doubles.attention_reference import partial_attention


def attend_pages(query, key, value, block_table, lens, num_rows, scale, nothing, soft_cap=0.0):
    """Attention of ``num_rows`` rows of each request to its pages; no value is looked at.

    Args:
        query: ``[num_reqs * num_rows, num_heads, head_size]``.
        key, value: ``[num_blocks, page, num_kv_heads, head_size]``.
        block_table, lens: int32.
        nothing: the sum where nothing is seen.

    Returns:
        Output like ``query``, and float32 ``[num_heads, num_reqs * num_rows]``.
    """
    assert block_table.dtype == lens.dtype == torch.int32 and query.stride(-1) == key.stride(-1) == 1
    num_reqs = lens.shape[0]
    assert block_table.shape[0] == num_reqs and query.shape[0] == num_reqs * num_rows
    keys, values = (part[block_table.long().clamp(min=0)].flatten(1, 2) for part in (key, value))
    visible = torch.arange(keys.shape[1]) < lens.unsqueeze(1)
    values = values.where(visible[:, :, None, None], 0)
    rows = query.unflatten(0, (num_reqs, num_rows))
    visible = visible.unsqueeze(1).expand(-1, num_rows, -1)
    output, sums = partial_attention(rows, keys, values, visible, scale, soft_cap)
    sums = sums.where(sums > float("-inf"), nothing).float()
    return output.flatten(0, 1).to(query.dtype), sums.flatten(0, 1).T.contiguous()


def install_flash(patch: Any, version: int) -> None:
    """The host's FlashAttention of that version on this CPU."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "vllm_flash_attn"
    name = "vllm.vllm_flash_attn.flash_attn_interface"
    spec = importlib.util.spec_from_file_location(name, folder / "flash_attn_interface.py")
    interface = importlib.util.module_from_spec(spec)
    package = ModuleType("vllm.vllm_flash_attn")
    package.__path__ = []
    patch.setitem(sys.modules, package.__name__, package)
    spec.loader.exec_module(interface)
    patch.setitem(sys.modules, name, interface)

    def attend(q, k, v, starts, lens, max_q, max_k, table, scale, causal, softcap, nothing):
        num_rows = q.shape[0] // lens.shape[0]
        assert torch.equal(starts, torch.arange(0, q.shape[0] + 1, num_rows, dtype=torch.int32))
        assert not causal and max_q == num_rows and max_k <= table.shape[1] * k.shape[1]
        assert torch.equal(lens.clamp(max=max_k), lens)
        return attend_pages(q, k, v, table, lens, num_rows, scale, nothing, softcap)

    def version_2(q, k, v, out, starts, _k_starts, lens, _leftpad, table, _alibi, max_q, max_k, dropout, scale,
                  _zero, causal, left, right, softcap, _probs, _splits, _generator):  # fmt: skip
        assert (out, dropout, left, right) == (None, 0.0, -1, -1)
        return attend(q, k, v, starts, lens, max_q, max_k, table, scale, causal, softcap, float("inf"))

    def version_3(q, k, v, _k_new, _v_new, _q_v, out, starts, k_starts, _k_new_starts, _used_q, lens, max_q, max_k,
                  table, _index, _leftpad, _cos, _sin, _rotary, _q_scale, _k_scale, _v_scale, scale, causal, left,
                  right, softcap, *_):  # fmt: skip
        assert (out, k_starts, left, right) == (None, None, -1, -1)
        return *attend(q, k, v, starts, lens, max_q, max_k, table, scale, causal, softcap, float("-inf")), None, None

    def version_4(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale, causal,
                  return_lse, cu_seqlens_k, window_size_left, softcap, **_):  # fmt: skip
        assert return_lse and cu_seqlens_k is None and window_size_left is None
        lens = (cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale, causal, softcap)
        return *attend(q, k, v, *lens, float("-inf")), None, None

    cute = ModuleType("vllm.vllm_flash_attn.cute.interface")
    cute._flash_attn_fwd = version_4
    patch.setitem(sys.modules, "vllm.vllm_flash_attn.cute", ModuleType("vllm.vllm_flash_attn.cute"))
    patch.setitem(sys.modules, cute.__name__, cute)
    patch.setattr(torch.ops, "_vllm_fa2_C", SimpleNamespace(varlen_fwd=version_2), raising=False)
    patch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=version_3), raising=False)

    from vllm_specplug.gpu import flash_context

    patch.setattr(flash_context, "get_flash_attn_version", lambda **_: version)


def install_xformers(patch: Any) -> None:
    """What we use of xformers, on this CPU."""

    @dataclass
    class SeqLenInfo:
        seqstart: torch.Tensor
        max_seqlen: int
        min_seqlen: int
        seqstart_py: list[int]

    @dataclass
    class PaddedSeqLenInfo(SeqLenInfo):
        seqlen: torch.Tensor
        seqlen_py: list[int]
        padding: int

    @dataclass
    class Mask:
        q_seqinfo: SeqLenInfo
        k_seqinfo: PaddedSeqLenInfo
        block_tables: torch.Tensor
        page_size: int

    class FwOp:
        BLOCK_N = 64

    def memory_efficient_attention_partial(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        (one, num_tokens, num_kv_heads, group, head_size), page = query.shape, attn_bias.page_size
        assert one == 1 and issubclass(op, FwOp) and page % op.BLOCK_N == 0 and attn_bias.q_seqinfo.max_seqlen > 1
        assert key.shape == (1, key.shape[1], num_kv_heads, group, head_size) and key.shape[1] % page == 0
        assert group == 1 or key.stride(3) == value.stride(3) == 0
        assert attn_bias.q_seqinfo.seqstart_py[-1] == num_tokens
        lens = attn_bias.k_seqinfo.seqlen
        num_rows = num_tokens // lens.shape[0]
        starts = torch.arange(0, num_tokens + 1, num_rows, dtype=torch.int32)
        assert torch.equal(attn_bias.q_seqinfo.seqstart, starts)
        pages = [part[0, :, :, 0].unflatten(0, (-1, page)) for part in (key, value)]
        output, sums = attend_pages(
            query[0].flatten(1, 2), *pages, attn_bias.block_tables, lens, num_rows, scale, float("-inf")
        )
        return output.unflatten(1, (num_kv_heads, group))[None].float(), sums.unflatten(0, (num_kv_heads, group))[
            None
        ].double()

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(contents, __path__=[], __spec__=ModuleSpec(name, None))
        patch.setitem(sys.modules, name, made)
        return made

    bias = module(
        "xformers.ops.fmha.attn_bias",
        _SeqLenInfo=SeqLenInfo,
        _PaddedSeqLenInfo=PaddedSeqLenInfo,
        PagedBlockDiagonalPaddedKeysMask=Mask,
    )
    splitk = module("xformers.ops.fmha.triton_splitk", FwOp=FwOp)
    module("xformers")
    module("xformers.ops")
    module(
        "xformers.ops.fmha",
        attn_bias=bias,
        triton_splitk=splitk,
        memory_efficient_attention_partial=memory_efficient_attention_partial,
    )
