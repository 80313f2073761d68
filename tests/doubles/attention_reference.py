"""Verify: attention of a tree's rows to their context and to each other (readable reference for the kernels)."""

from __future__ import annotations

import torch

from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT, unpack_pages
from vllm_specplug.gpu.kernels.context_attention import ContextAttention


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

    return partial_attention(query, key, value, visible, scale)[0].to(query.dtype)


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of a row's keys, with what a merge with the others needs.

    Args:
        query: float ``[num_reqs, num_rows, num_heads, head_dim]``.
        key, value: float ``[num_reqs, num_keys, num_kv_heads, head_dim]``; NaN only in keys that no row sees.
        visible: bool ``[num_reqs, num_rows, num_keys]``.
        scale: factor of the scores.
        soft_cap: of the scores; 0: none.

    Returns:
        Outputs like ``query``, float32 or wider, and float ``[num_reqs, num_rows, num_heads]``: the log of the sum of
        the exponentials of the scores.  A row that sees nothing gets 0 and -inf.
    """
    group_size = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group_size, dim=2), value.repeat_interleave(group_size, dim=2)
    compute = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("rihd,rjhd->rhij", query.to(compute), key.to(compute)) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    # The softmax of a row that sees nothing is NaN.
    weights = scores.softmax(dim=3).where(visible.any(dim=2)[:, None, :, None], 0)
    return torch.einsum("rhij,rjhd->rihd", weights, value.to(compute)), scores.logsumexp(dim=3).transpose(1, 2)


class ReferenceContext(ContextAttention):
    """Context attention in plain torch, on any device."""

    caps_scores = True

    def __init__(self, soft_cap: float = 0.0):
        self.soft_cap = soft_cap

    def __call__(self, query, kv_cache, block_table, context_lens, scale, max_context_len):
        num_pages = -(-max_context_len // kv_cache.shape[2])
        pages = kv_cache[block_table[:, :num_pages].long().clamp(min=0)]
        key, value = (
            torch.stack(part).transpose(1, 2)
            for part in zip(*(unpack_pages(own, TOKEN_LAYOUT) for own in pages.unbind()), strict=True)
        )
        visible = torch.arange(key.shape[1], device=query.device) < context_lens.unsqueeze(1)
        value = value.where(visible[:, :, None, None], 0)  # never-written slots may hold NaN
        visible = visible.unsqueeze(1).expand(-1, query.shape[1], -1)
        return partial_attention(query, key, value, visible, scale, self.soft_cap)
