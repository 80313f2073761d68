"""Tree attention with a layer's traits, key by key from positions: slow, and made from nothing that the kernels use."""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.cpu.kernels.tree_attention import unpack_pages


def attention_by_position(inputs: dict[str, Any], traits: AttentionTraits = NO_TRAITS) -> torch.Tensor:
    """Return the output of ``tree_attention`` for verification inputs, float64; NaN in rows of no request.

    Args:
        inputs: of ``make_inputs``; each query row is the tree row of the same index.
        traits: of the layer.
    """
    query, result = inputs["query"].double(), torch.full(inputs["output"].shape, math.nan, dtype=torch.float64)
    group = query.shape[1] // inputs["kv_cache"].shape[1]
    block_size = inputs["kv_cache"].shape[2]
    names = ("context_lens", "query_start", "query_lens", "tree_start")
    for r, (context, q0, rows, t0) in enumerate(zip(*(inputs[name].tolist() for name in names), strict=True)):
        pages = inputs["kv_cache"][inputs["block_table"][r, : -(-context // block_size)].long()]
        contexts = [t[:, :context].double() for t in unpack_pages(pages, inputs["kv_layout"], result.shape[2])]
        trees = [inputs[name][t0 : t0 + rows].transpose(0, 1).double() for name in ("tree_key", "tree_value")]
        mask = inputs["mask"][r, :rows, :rows]
        tree_positions = context + mask.sum(1) - 1
        key_positions = torch.cat([torch.arange(context), tree_positions])
        for row in range(rows):
            position = tree_positions[row]
            seen = torch.cat([torch.ones(context, dtype=torch.bool), mask[row]])
            if traits.window:
                seen &= key_positions > position - traits.window
            if traits.local:
                seen &= key_positions // traits.local == position // traits.local
            for head in range(query.shape[1]):
                key, value = (torch.cat([c, t], dim=1)[head // group] for c, t in zip(contexts, trees, strict=True))
                scores = key[seen] @ query[q0 + row, head] * inputs["scale"]
                if traits.soft_cap:
                    scores = torch.tanh(scores / traits.soft_cap) * traits.soft_cap
                if traits.alibi_slopes is not None:
                    scores += traits.alibi_slopes[head].double() * (key_positions[seen] - position)
                weights = scores.exp()
                sink = 0.0 if traits.sinks is None else traits.sinks[head].double().exp()
                result[q0 + row, head] = weights @ value[seen] / (weights.sum() + sink)
    return result
