"""Mamba-2 over trees: a row continues its parent's state.

``tests/doubles/tree_states.py`` has the reference in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_specplug.gpu.kernels.tree_states import StateTrees, row_of_path

#: Elements of a state in the registers of a program.
_ELEMENTS = 2048


@dataclass(frozen=True)
class Mamba2Weights:
    """Weights of a layer.

    Attributes:
        A: ``[num_heads]``; negative.
        D, dt_bias: ``[num_heads]``.
        num_groups: of heads that share B and C.
    """

    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    num_groups: int


@triton.jit
def _step(state, rows_ptr, dt_ptr, A, dt_bias, x_places, b_places, in_x, in_b):
    """Return the state after a token, not rounded, and the token's x."""
    dt = tl.load(dt_ptr).to(tl.float32) + dt_bias
    dt = tl.where(dt <= 20.0, tl.log(tl.exp(dt) + 1), dt)
    x = tl.load(rows_ptr + x_places, mask=in_x, other=0).to(tl.float32)
    b = tl.load(rows_ptr + b_places, mask=in_b, other=0).to(tl.float32)
    return state * tl.exp(A * dt) + (b * dt)[None, :] * x[:, None], x


@triton.jit(do_not_specialize=("block_stride", "max_rows"))
def _mamba2_tree_kernel(
    blocks_ptr, block_stride, context_lens_ptr, start_ptr, lens_ptr, bits_ptr, bits_stride, NUM_WORDS: tl.constexpr,
    sources_ptr, rows_ptr, row_stride, dt_ptr, dt_stride, states_ptr, state_stride,
    A_ptr, D_ptr, dt_bias_ptr, output_ptr, output_stride, max_rows, heads_per_group, num_heads, num_groups,
    HEAD_SIZE: tl.constexpr, STATE_SIZE: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_B: tl.constexpr,
    COMMITS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) if COMMITS else tl.program_id(0) // max_rows
    row = 0 if COMMITS else tl.program_id(0) % max_rows
    if row >= tl.load(lens_ptr + request):
        return
    head = tl.program_id(1)
    x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
    b = tl.arange(0, BLOCK_B)
    in_x, in_b = x < HEAD_SIZE, b < STATE_SIZE
    x_places = head * HEAD_SIZE + x
    b_places = num_heads * HEAD_SIZE + (head // heads_per_group) * STATE_SIZE + b
    block = tl.load(blocks_ptr + request * block_stride).to(tl.int64)
    own = states_ptr + block * state_stride + x_places[:, None] * STATE_SIZE + b[None, :]
    inside = in_x[:, None] & in_b[None, :]
    num_kept = tl.where(tl.load(context_lens_ptr + request) > 0, STATE_SIZE, 0)
    state = tl.load(own, mask=inside & (b < num_kept)[None, :], other=0).to(tl.float32)
    A = tl.load(A_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    first = tl.load(start_ptr + request).to(tl.int64)
    bits = bits_ptr + request * bits_stride + row * NUM_WORDS
    steps = max_rows if COMMITS else row
    for other in range(0, steps):
        flat, is_on = row_of_path(sources_ptr + request * max_rows, bits, first, row, other, COMMITS)
        if is_on:
            values = rows_ptr + flat * row_stride
            dt = dt_ptr + flat * dt_stride + head
            state, _ = _step(state, values, dt, A, dt_bias, x_places, b_places, in_x, in_b)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)  # as plain decoding stores it
    if COMMITS:
        tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)
    else:
        values = rows_ptr + (first + row) * row_stride
        dt = dt_ptr + (first + row) * dt_stride + head
        state, value = _step(state, values, dt, A, dt_bias, x_places, b_places, in_x, in_b)
        c = tl.load(values + num_groups * STATE_SIZE + b_places, mask=in_b, other=0).to(tl.float32)
        result = tl.sum(state * c[None, :], axis=1) + value * tl.load(D_ptr + head).to(tl.float32)
        output = output_ptr + (first + row) * output_stride + x_places
        tl.store(output, result.to(output_ptr.dtype.element_ty), mask=in_x)


def mamba2_tree(
    trees: StateTrees,
    weights: Mamba2Weights,
    rows: torch.Tensor,
    dt: torch.Tensor,
    states: torch.Tensor,
    output: torch.Tensor | None = None,
    source_rows: torch.Tensor | None = None,
) -> None:
    """Compute the rows of trees; or bring the states of their requests to the accepted rows.

    Args:
        trees: of the forward.
        weights: of the layer.
        rows: ``[num_tokens, num_heads * head_size + 2 * num_groups * state_size]``, rows contiguous; x, B and C of each
            row, after the convolution.
        dt: ``[num_tokens, num_heads]``, rows contiguous.
        states: ``[num_blocks, num_heads, head_size, state_size]``; each block contiguous.
        output: ``[num_tokens, num_heads * head_size]``, rows contiguous; tree rows are written, and states stay.
        source_rows: accepted rows, see ``StateTrees.paths``; states are written, and there is no output.
    """
    _, num_heads, head_size, state_size = states.shape
    block_b = triton.next_power_of_2(state_size)
    block_x = min(triton.next_power_of_2(head_size), max(1, _ELEMENTS // block_b))
    sources, max_rows, programs = trees.paths(source_rows)
    output = rows if output is None else output
    _mamba2_tree_kernel[programs, num_heads, triton.cdiv(head_size, block_x)](
        *(*trees.arguments(), sources, rows, rows.stride(0), dt, dt.stride(0), states, states.stride(0)),
        *(weights.A, weights.D, weights.dt_bias, output, output.stride(0)),
        max_rows,
        num_heads // weights.num_groups,
        num_heads,
        weights.num_groups,
        HEAD_SIZE=head_size,
        STATE_SIZE=state_size,
        BLOCK_X=block_x,
        BLOCK_B=block_b,
        COMMITS=source_rows is not None,
        num_warps=4,
    )
