"""Prompt lookup in Triton: the search for earlier matches; its reference is ``proposers.lookup.device.match_keys``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _match_keys_kernel(
    tokens_ptr,
    slots_ptr,
    lens_ptr,
    keys_ptr,
    max_len,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    end = tl.load(lens_ptr + slot) - 1
    own = tokens_ptr + slot * max_len
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    matches = positions < end
    lengths = tl.zeros([BLOCK], tl.int32)
    back = 0
    # Few positions match: most programs read their tokens only once.
    while (back < MAX_MATCH) & (tl.max(matches.to(tl.int32), axis=0) > 0):
        here = tl.load(own + positions - back, mask=matches & (positions >= back), other=-1)
        # ``end - back`` is not negative: a matching position is at least ``back - 1`` and below ``end``.
        matches = matches & (here == tl.load(own + end - back))
        lengths += matches.to(tl.int32)
        back += 1
    keys = tl.where(lengths >= MIN_MATCH, lengths * max_len + positions, 0)
    tl.store(keys_ptr + request * max_len + positions, keys, mask=positions < max_len)


def match_keys(
    token_ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, min_match: int, max_match: int
) -> torch.Tensor:
    """Find earlier matches; arguments and result as in the reference, all contiguous."""
    num_reqs, max_len = slots.shape[0], token_ids.shape[1]
    keys = torch.empty(num_reqs, max_len, dtype=torch.int32, device=token_ids.device)
    _match_keys_kernel[(num_reqs, triton.cdiv(max_len, _BLOCK))](
        token_ids, slots, lens, keys, max_len, MIN_MATCH=min_match, MAX_MATCH=max_match, BLOCK=_BLOCK
    )
    return keys
