"""Causal convolution over trees: the window of a row has its ancestors, and before the root the request's last inputs.

``tests/doubles/tree_states.py`` has the reference in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.gpu.kernels.tree_states import StateTrees, is_above

#: Channels of a program.
_CHANNELS = 256


@triton.jit(do_not_specialize=("block_stride", "max_rows"))
def _conv_tree_kernel(
    blocks_ptr, block_stride, context_lens_ptr, start_ptr, lens_ptr, bits_ptr, bits_stride, NUM_WORDS: tl.constexpr,
    inputs_ptr, input_stride, window_ptr, window_stride, channel_stride, token_stride,
    weight_ptr, bias_ptr, output_ptr, output_stride, num_channels, max_rows,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // max_rows
    row = tl.program_id(0) % max_rows
    if row >= tl.load(lens_ptr + request):
        return
    first = tl.load(start_ptr + request).to(tl.int64)
    bits = bits_ptr + request * bits_stride + row * NUM_WORDS
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    total = tl.zeros([CHANNELS], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=inside, other=0).to(tl.float32)
    depth = tl.full([], 0, tl.int32)
    for other in range(0, row):
        depth += is_above(bits, row, other).to(tl.int32)
    # Inputs before the root: the request's window, whose last one is the root's predecessor.
    block = tl.load(blocks_ptr + request * block_stride).to(tl.int64)
    window = window_ptr + block * window_stride + channels * channel_stride
    num_kept = tl.where(tl.load(context_lens_ptr + request) > 0, num_channels, 0)
    for tap in tl.static_range(WIDTH - 1):
        before = channels < tl.where(tap + depth < WIDTH - 1, num_kept, 0)
        value = tl.load(window + (tap + depth) * token_stride, mask=before, other=0).to(tl.float32)
        total += value * tl.load(weight_ptr + channels * WIDTH + tap, mask=before, other=0).to(tl.float32)
    met = tl.full([], 0, tl.int32)
    for other in range(0, row + 1):
        if is_above(bits, row, other) | (other == row):
            near_tap = WIDTH - 1 - (depth - met)
            met += 1
            near = channels < tl.where(near_tap >= 0, num_channels, 0)
            value = tl.load(inputs_ptr + (first + other) * input_stride + channels, mask=near, other=0).to(tl.float32)
            total += value * tl.load(weight_ptr + channels * WIDTH + near_tap, mask=near, other=0).to(tl.float32)
    if SILU:
        total = total / (1 + tl.exp(-total))
    output = output_ptr + (first + row) * output_stride + channels
    tl.store(output, total.to(output_ptr.dtype.element_ty), mask=inside)


def conv_tree(
    trees: StateTrees,
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    *,
    silu: bool,
) -> None:
    """Convolve the rows of trees; windows stay as they are.

    Args:
        trees: of the forward.
        inputs: ``[num_tokens, num_channels]``, rows contiguous.
        windows: ``[num_blocks, num_channels, width - 1]``, any strides; each request's last inputs.
        weight: ``[num_channels, width]``, contiguous.
        bias: ``[num_channels]``.
        output: ``[num_tokens, num_channels]``, rows contiguous; tree rows are written.
        silu: whether it follows.
    """
    num_channels = inputs.shape[1]
    size = min(_CHANNELS, triton.next_power_of_2(num_channels))
    _conv_tree_kernel[len(trees.lens) * trees.max_rows, triton.cdiv(num_channels, size)](
        *trees.arguments(),
        inputs,
        inputs.stride(0),
        windows,
        *windows.stride(),
        weight,
        bias,
        output,
        output.stride(0),
        num_channels,
        trees.max_rows,
        WIDTH=weight.shape[1],
        SILU=silu,
        CHANNELS=size,
        num_warps=4,
    )


@triton.jit(do_not_specialize=("block_stride", "max_emitted"))
def _commit_window_kernel(
    blocks_ptr, block_stride, context_lens_ptr, start_ptr, lens_ptr, bits_ptr, bits_stride, NUM_WORDS: tl.constexpr,
    sources_ptr, max_emitted, inputs_ptr, input_stride, window_ptr, window_stride, channel_stride, token_stride,
    num_channels, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    if tl.load(lens_ptr + request) == 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    sources = sources_ptr + request * max_emitted
    emitted = tl.full([], 0, tl.int32)
    for depth in range(0, max_emitted):
        emitted += (tl.load(sources + depth) >= 0).to(tl.int32)
    block = tl.load(blocks_ptr + request * block_stride).to(tl.int64)
    window = window_ptr + block * window_stride + channels * channel_stride
    num_kept = tl.where(tl.load(context_lens_ptr + request) > 0, num_channels, 0)
    for tap in tl.static_range(WIDTH - 1):
        place = emitted + tap  # in the old window and the accepted inputs after it
        if place < WIDTH - 1:
            value = tl.load(window + place * token_stride, mask=channels < num_kept, other=0)
        else:
            row = tl.load(sources + place - (WIDTH - 1))
            value = tl.load(inputs_ptr + row * input_stride + channels, mask=inside, other=0)
            value = value.to(window_ptr.dtype.element_ty)
        tl.store(window + tap * token_stride, value, mask=inside)


def commit_windows(trees: StateTrees, source_rows: torch.Tensor, inputs: torch.Tensor, windows: torch.Tensor) -> None:
    """Move the windows of requests with trees to their accepted rows.

    Args:
        trees: of the forward.
        source_rows: int64 ``[num_reqs, max_emitted]``, contiguous; see ``StepPlan``; trees come first.
        inputs, windows: as for ``conv_tree``; windows are written.
    """
    num_channels, (_, max_emitted) = inputs.shape[1], source_rows.shape
    size = min(_CHANNELS, triton.next_power_of_2(num_channels))
    _commit_window_kernel[len(trees.lens), triton.cdiv(num_channels, size)](
        *trees.arguments(),
        source_rows,
        max_emitted,
        inputs,
        inputs.stride(0),
        windows,
        *windows.stride(),
        num_channels,
        WIDTH=windows.shape[2] + 1,
        CHANNELS=size,
        num_warps=4,
    )
