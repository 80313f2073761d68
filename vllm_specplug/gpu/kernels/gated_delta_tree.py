"""The gated delta rule over trees: a row continues its parent's state.

``tests/doubles/tree_states.py`` has the reference in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_specplug.gpu.kernels.tree_states import StateTrees, row_of_path

#: Elements of a state in the registers of a program.
_ELEMENTS = 4096


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Weights of a layer.

    Attributes:
        A_log, dt_bias: ``[num_heads]``.
        num_key_heads: each serves as many heads.
    """

    A_log: torch.Tensor
    dt_bias: torch.Tensor
    num_key_heads: int


@triton.jit
def _normalised(row_ptr, places, inside):
    values = tl.load(row_ptr + places, mask=inside, other=0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values) + 1e-6)


@triton.jit
def _step(state, row_ptr, a_ptr, b_ptr, rate_of_decay, dt_bias, k_places, v_places, in_k, in_v):
    """Return the state after a token, not rounded."""
    key = _normalised(row_ptr, k_places, in_k)
    value = tl.load(row_ptr + v_places, mask=in_v, other=0).to(tl.float32)
    gate = tl.load(a_ptr).to(tl.float32) + dt_bias
    gate = tl.where(gate <= 20.0, tl.log(1 + tl.exp(gate)), gate)
    state = state * tl.exp(rate_of_decay * gate)
    change = value - tl.sum(state * key[None, :], axis=1)
    change *= 1 / (1 + tl.exp(-tl.load(b_ptr).to(tl.float32)))
    return state + change[:, None] * key[None, :]


@triton.jit(do_not_specialize=("block_stride", "max_rows"))
def _gated_delta_tree_kernel(
    blocks_ptr, block_stride, context_lens_ptr, start_ptr, lens_ptr, bits_ptr, bits_stride, NUM_WORDS: tl.constexpr,
    sources_ptr, rows_ptr, row_stride, a_ptr, a_stride, b_ptr, b_stride, states_ptr, state_stride,
    A_log_ptr, dt_bias_ptr, output_ptr, output_stride, max_rows, scale, heads_per_key, num_key_heads,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    COMMITS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) if COMMITS else tl.program_id(0) // max_rows
    row = 0 if COMMITS else tl.program_id(0) % max_rows
    if row >= tl.load(lens_ptr + request):
        return
    head = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    in_v, in_k = v < VALUE_SIZE, k < KEY_SIZE
    q_places = (head // heads_per_key) * KEY_SIZE + k
    k_places = num_key_heads * KEY_SIZE + q_places
    v_places = 2 * num_key_heads * KEY_SIZE + head * VALUE_SIZE + v
    block = tl.load(blocks_ptr + request * block_stride).to(tl.int64)
    own = states_ptr + block * state_stride + (head * VALUE_SIZE + v)[:, None] * KEY_SIZE + k[None, :]
    inside = in_v[:, None] & in_k[None, :]
    num_kept = tl.where(tl.load(context_lens_ptr + request) > 0, KEY_SIZE, 0)
    state = tl.load(own, mask=inside & (k < num_kept)[None, :], other=0).to(tl.float32)
    rate_of_decay = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    first = tl.load(start_ptr + request).to(tl.int64)
    bits = bits_ptr + request * bits_stride + row * NUM_WORDS
    steps = max_rows if COMMITS else row
    for other in range(0, steps):
        flat, is_on = row_of_path(sources_ptr + request * max_rows, bits, first, row, other, COMMITS)
        if is_on:
            a, b = a_ptr + flat * a_stride + head, b_ptr + flat * b_stride + head
            values = rows_ptr + flat * row_stride
            state = _step(state, values, a, b, rate_of_decay, dt_bias, k_places, v_places, in_k, in_v)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)  # as plain decoding stores it
    if COMMITS:
        tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)
    else:
        flat = first + row
        a, b = a_ptr + flat * a_stride + head, b_ptr + flat * b_stride + head
        values = rows_ptr + flat * row_stride
        state = _step(state, values, a, b, rate_of_decay, dt_bias, k_places, v_places, in_k, in_v)
        query = _normalised(values, q_places, in_k) * scale
        result = tl.sum(state * query[None, :], axis=1)
        output = output_ptr + flat * output_stride + head * VALUE_SIZE + v
        tl.store(output, result.to(output_ptr.dtype.element_ty), mask=in_v)


def gated_delta_tree(
    trees: StateTrees,
    weights: GatedDeltaWeights,
    rows: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    output: torch.Tensor | None = None,
    source_rows: torch.Tensor | None = None,
) -> None:
    """Compute the rows of trees; or bring the states of their requests to the accepted rows.

    Args:
        trees: of the forward.
        weights: of the layer.
        rows: ``[num_tokens, 2 * num_key_heads * key_size + num_heads * value_size]``, rows contiguous; query, key and
            value of each row, after the convolution; queries and keys are normalised here.
        a, b: ``[num_tokens, num_heads]``, rows contiguous; before softplus and sigmoid.
        states: ``[num_blocks, num_heads, value_size, key_size]``; each block contiguous.
        output: ``[num_tokens, num_heads * value_size]``, rows contiguous; tree rows are written, and states stay.
        source_rows: accepted rows, see ``StateTrees.paths``; states are written, and there is no output.
    """
    _, num_heads, value_size, key_size = states.shape
    block_k = triton.next_power_of_2(key_size)
    block_v = min(triton.next_power_of_2(value_size), max(1, _ELEMENTS // block_k))
    sources, max_rows, programs = trees.paths(source_rows)
    output = rows if output is None else output
    _gated_delta_tree_kernel[programs, num_heads, triton.cdiv(value_size, block_v)](
        *(*trees.arguments(), sources, rows, rows.stride(0), a, a.stride(0), b, b.stride(0)),
        *(states, states.stride(0), weights.A_log, weights.dt_bias, output, output.stride(0)),
        max_rows,
        key_size**-0.5,
        num_heads // weights.num_key_heads,
        weights.num_key_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        COMMITS=source_rows is not None,
        num_warps=4,
    )
