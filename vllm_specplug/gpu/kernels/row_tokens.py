"""Tokens and positions of the rows of a step that have logits, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=("num_rows",))
def _row_tokens_kernel(
    rows_ptr, slots_ptr, local_ptr, input_ids_ptr, positions_ptr, depths_ptr, prefill_len_ptr, token_ids_ptr, pos_ptr,
    num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_rows
    row = tl.load(rows_ptr + place, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + place, mask=inside, other=0).to(tl.int64)
    local = tl.load(local_ptr + place, mask=inside, other=0)
    pos = tl.load(positions_ptr + row, mask=inside, other=0)
    root_pos = pos - tl.load(depths_ptr + slot * WIDTH + local, mask=inside, other=0)
    prefill_len = tl.load(prefill_len_ptr + slot, mask=inside, other=0)
    token_id = tl.load(input_ids_ptr + row, mask=inside, other=0)
    placeholder = (local > 0) & (root_pos < prefill_len)
    tl.store(token_ids_ptr + place, tl.where(placeholder, -1, token_id), mask=inside)
    tl.store(pos_ptr + place, pos, mask=inside)


def row_tokens(
    rows: torch.Tensor,
    slots: torch.Tensor,
    local: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    depths: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions of the rows with logits; placeholder drafts of a request without tokens are -1.

    Args:
        rows: int ``[num_logits]``; their places in the forward.
        slots: int ``[num_logits]``; of their requests.
        local: int ``[num_logits]``; their places in their trees.
        input_ids: int32 ``[num_tokens]``.
        positions: int64 ``[num_tokens]``.
        depths: int64 ``[num_slots, width]``, contiguous; of the kept trees.
        prefill_len: int ``[num_slots]``; a request whose root lies before it has no drafts yet.

    Returns:
        Tokens like ``input_ids`` and positions like ``positions``, ``[num_logits]`` each.
    """
    token_ids, pos = input_ids.new_empty(len(rows)), positions.new_empty(len(rows))
    _row_tokens_kernel[(triton.cdiv(len(rows), _BLOCK),)](
        rows, slots, local, input_ids, positions, depths, prefill_len, token_ids, pos, len(rows),
        WIDTH=depths.shape[1], BLOCK=_BLOCK,
    )  # fmt: skip
    return token_ids, pos
