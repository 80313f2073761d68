"""Lay out: the position and the attention mask of each tree row in one verification forward (EAGLE-2, section 4.2).

The rows take consecutive cache slots in the order of the tree.  Row ``i`` has the rotary position context + depth and
attends to the whole context, to its ancestors and to itself.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from vllm_specplug.core.tree import valid_rows
from vllm_specplug.types import TokenTree, TreeLayout

WORD_BITS = 64


def lay_out(tree: TokenTree, context_lens: torch.Tensor, max_depth: int | None = None) -> TreeLayout:
    """Compute positions and the tree mask.

    Args:
        tree: the draft trees.
        context_lens: int ``[num_reqs]``; committed tokens (the root excluded), i.e. the root's position.
        max_depth: a depth that no tree exceeds; a small one saves work; by default ``num_nodes``.
    """
    positions = context_lens.long().unsqueeze(1) + tree.depths
    return TreeLayout(positions=positions, mask=ancestor_mask(tree, max_depth))


def ancestor_mask(tree: TokenTree, max_depth: int | None = None) -> torch.Tensor:
    """Compute the mask bool ``[num_reqs, num_rows, num_rows]``: true from each valid row to its ancestors and itself.

    Pointer jumping: if the mask holds each row's ancestors at distances below 2^t, one look-up at the row's 2^t-th
    ancestor adds those below 2^(t+1).
    """
    num_reqs, width = tree.parents.shape
    device = tree.parents.device
    # Rows of all requests as one list, so that a look-up is one row-wise index_select.
    first_row = torch.arange(0, num_reqs * width, width, device=device).unsqueeze(1)
    ancestor = (tree.parents.clamp(min=0) + first_row).flatten()  # the root is its own ancestor
    mask = torch.eye(width, dtype=torch.bool, device=device).repeat(num_reqs, 1)
    for _ in range((width - 1 if max_depth is None else max_depth).bit_length()):
        mask = mask | mask.index_select(0, ancestor)
        ancestor = ancestor.index_select(0, ancestor)
    # Above, padding rows have the root as parent, which keeps the look-ups in range.
    return mask.view(num_reqs, width, width) & valid_rows(tree.num_rows, width).unsqueeze(2)


def ancestor_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack a tree mask into 64-bit words for kernels.

    Args:
        mask: bool ``[num_reqs, num_rows, num_rows]``.

    Returns:
        int64 ``[num_reqs, num_rows, num_words]``, ``num_words = ceil(num_rows / 64)``; bit ``j % 64`` of word
        ``j // 64`` of row ``i`` is set where row ``i`` attends to row ``j`` (bit 63 is the sign).
    """
    num_words = -(-mask.shape[2] // WORD_BITS)
    bits = pad(mask, (0, num_words * WORD_BITS - mask.shape[2])).unflatten(2, (num_words, WORD_BITS)).long()
    return (bits << torch.arange(WORD_BITS, device=mask.device)).sum(dim=3)
