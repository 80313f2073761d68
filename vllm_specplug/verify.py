"""Verify: attention of a tree's rows to their context and to each other (readable reference for the kernels)."""

from __future__ import annotations

import torch


def tree_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    context_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every tree row to the whole context and to the row's ancestors and itself.

    Args:
        query: float ``[num_reqs, num_rows, num_heads, head_dim]``.
        context_key: float ``[num_reqs, context_width, num_kv_heads, head_dim]``; ``num_heads`` is a multiple of
            ``num_kv_heads``, consecutive query heads share one (grouped-query attention).
        context_value: float, like ``context_key``.
        tree_key: float ``[num_reqs, num_rows, num_kv_heads, head_dim]``.
        tree_value: float, like ``tree_key``.
        mask: bool ``[num_reqs, num_rows, num_rows]``; ``TreeLayout.mask``.
        scale: factor of the scores, usually ``head_dim ** -0.5``.
        context_lens: int ``[num_reqs]``; valid columns of the context, by default all.  What stands behind them may be
            anything, NaN included.

    Returns:
        Like ``query``; zero for padding rows.
    """
    num_reqs, num_rows, num_heads, _ = query.shape
    width = context_key.shape[1]
    if context_lens is None:
        context_lens = torch.full((num_reqs,), width, device=query.device)
    in_context = torch.arange(width, device=query.device) < context_lens.unsqueeze(1)
    row_is_valid = mask.diagonal(dim1=1, dim2=2)
    visible = torch.cat([in_context.unsqueeze(1) & row_is_valid.unsqueeze(2), mask], dim=2)
    key, value = torch.cat([context_key, tree_key], dim=1), torch.cat([context_value, tree_value], dim=1)
    # 0 * NaN is NaN: values never written must be cleared, for the mask only makes their weights 0.
    value = value.where(torch.cat([in_context, row_is_valid], dim=1)[:, :, None, None], 0)

    group_size = num_heads // key.shape[2]
    key, value = key.repeat_interleave(group_size, dim=2), value.repeat_interleave(group_size, dim=2)
    compute = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("rihd,rjhd->rhij", query.to(compute), key.to(compute)) * scale
    weights = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(dim=3)
    weights = weights.where(row_is_valid[:, None, :, None], 0)  # A padding row sees nothing: its softmax is NaN.
    return torch.einsum("rhij,rjhd->rihd", weights, value.to(compute)).to(query.dtype)
