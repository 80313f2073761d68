"""Initial weights of a draft head: a linear predictor of the next feature, and a layer that adds little to it.

The embedding's rows are small (rms 0.14 on SmolLM2) and the features are large (rms 1.9, with outlier dimensions), so
no single scale suits both halves of fc. A ridge regression of feature t+1 on [embed(token t+1); feature t] finds the
scale of each column. The decoder layer starts as a small correction of the linear predictor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..eagle2.head import EagleHead
from .features import FeatureSet

SAMPLE_ROWS = 60_000


@torch.no_grad()
def input_scale(data: FeatureSet, embedding: torch.Tensor) -> torch.Tensor:
    """1 / rms of each column of [embedding; feature], float32 [2h]: inputs of equal scale suit Adam's step size."""
    return torch.cat([column_scale(embedding[data.ids[:SAMPLE_ROWS]]), column_scale(data.features)])


def column_scale(rows: torch.Tensor) -> torch.Tensor:
    """1 / rms of each column over the first SAMPLE_ROWS rows: [N, h] -> float32 [h]."""
    return rows[:SAMPLE_ROWS].float().pow(2).mean(0).clamp(min=1e-12).rsqrt()


@torch.no_grad()
def initialise(head: EagleHead, data: FeatureSet, embedding: torch.Tensor, seed: int = 0, ridge: float = 0.01) -> None:
    """Set fc to the linear predictor of the next feature, and the layer as in `small_layer`."""
    torch.manual_seed(seed)
    weight = linear_predictor(data, embedding, seed, ridge)
    head.fc.weight.copy_(weight / head.input_scale)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    # The layer's input is fc's output, which has about the features' rms.
    small_layer(head.layers[0], data.features[: SAMPLE_ROWS // 10].float().pow(2).mean().sqrt().item())


@torch.no_grad()
def small_layer(layer: torch.nn.Module, input_rms: float) -> None:
    """Set projections with unit-variance outputs for inputs of this rms, and output projections of zero."""
    attention, mlp = layer.self_attn, layer.mlp
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.normal_(0, projection.in_features**-0.5 / input_rms)
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight.normal_(0, projection.in_features**-0.5)
    attention.o_proj.weight.zero_()
    mlp.down_proj.weight.zero_()
    layer.post_attention_layernorm.weight.fill_(1.0)


def linear_predictor(data: FeatureSet, embedding: torch.Tensor, seed: int, ridge: float) -> torch.Tensor:
    """Ridge solution W [h, 2h] of feature t+1 = W [embed(token t+1); feature t] over a sample of rows."""

    def inputs(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([embedding[data.ids[rows + 1]].float(), data.features[rows].float()], dim=-1)

    return ridge_solution(data, inputs, seed, ridge)


def ridge_solution(
    data: FeatureSet, inputs_of: Callable[[torch.Tensor], torch.Tensor], seed: int, ridge: float = 0.01
) -> torch.Tensor:
    """Ridge solution W [h, n] of feature t+1 = W inputs t over a sample; `inputs_of`: rows -> float32 [N, n]."""
    last = torch.zeros(data.ids.numel(), dtype=torch.bool)
    ends = data.starts + data.lengths
    last[ends - 1] = True
    last[torch.maximum(ends - 2, data.starts)] = True  # a recorded sequence may lack the feature of its last token
    rows = (~last).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    rows = rows[torch.randperm(rows.numel(), generator=generator)[:SAMPLE_ROWS]]
    gram, cross = 0.0, 0.0
    for part in rows.split(8192):
        inputs = inputs_of(part)
        gram = gram + inputs.T @ inputs
        cross = cross + inputs.T @ data.features[part + 1].float()
    # The penalty is relative to each input's power; else it would suppress small inputs, like the embedding.
    penalty = ridge * gram.diagonal().clone()
    return torch.linalg.solve(gram + penalty.diag(), cross).T
