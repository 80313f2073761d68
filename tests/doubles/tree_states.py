"""Recurrent states over trees in plain torch: each row runs the path from its root, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize, silu, softplus

from vllm_specplug.core.layout import ancestor_bits, ancestor_mask
from vllm_specplug.core.tree import depths_from_parents
from vllm_specplug.gpu.kernels.gated_delta_tree import GatedDeltaWeights
from vllm_specplug.gpu.kernels.mamba2_tree import Mamba2Weights
from vllm_specplug.gpu.kernels.tree_states import StateTrees
from vllm_specplug.types import PADDING, TokenTree

#: ``step(state, row)`` returns the state after a row and its output.
Step = Callable[[Any, int], tuple[Any, torch.Tensor]]


@dataclass(frozen=True)
class Forest:
    """Trees of a step.

    Attributes:
        parents: of each tree, in rows of the tree; the root's is -1.
        blocks: where the requests keep their states.
        contexts: their cached tokens.
        starts: flat rows of the roots.
    """

    parents: Sequence[Sequence[int]]
    blocks: Sequence[int]
    contexts: Sequence[int]
    starts: Sequence[int]

    def path(self, tree: int, row: int) -> list[int]:
        """Return the flat rows from the root to a row of a tree."""
        found = []
        while row >= 0:
            found.append(self.starts[tree] + row)
            row = self.parents[tree][row]
        return found[::-1]

    def on_device(self, device: str) -> StateTrees:
        """Return what kernels take; the blocks are a column of a table."""
        width = max(len(one) for one in self.parents)
        lens = torch.tensor([len(one) for one in self.parents])
        parents = torch.tensor([[*one, *[PADDING] * (width - len(one))] for one in self.parents])
        depths = depths_from_parents(parents)
        mask = ancestor_mask(TokenTree(parents, parents, depths, lens), int(depths.max()))
        ints = torch.int32
        return StateTrees(
            blocks=torch.tensor([[one, 77] for one in self.blocks], dtype=ints, device=device)[:, 0],
            context_lens=torch.tensor(self.contexts, dtype=ints, device=device),
            start=torch.tensor(self.starts, dtype=ints, device=device),
            lens=torch.where(lens > 1, lens, 0).to(device, ints),  # as steps are staged
            bits=ancestor_bits(mask).contiguous().to(device),
            max_rows=width,
        )


def run_paths(forest: Forest, states: torch.Tensor, step: Step, output: torch.Tensor) -> None:
    """Write the output of each row of the trees.

    Args:
        states: ``[num_blocks, ...]``.
        step: of the layer.
        output: ``[num_tokens, ...]``.
    """
    for tree, parents in enumerate(forest.parents):
        for row in range(len(parents) if len(parents) > 1 else 0):
            path = forest.path(tree, row)
            state = own_state(forest, states, tree)
            for flat in path:
                state, result = step(state, flat)
            output[path[-1]] = result


def run_accepted(forest: Forest, states: torch.Tensor, step: Step, accepted: Sequence[Sequence[int]]) -> None:
    """Bring states to the accepted rows: flat ones, by tree."""
    for tree, rows in enumerate(accepted):
        if len(forest.parents[tree]) > 1:
            state = own_state(forest, states, tree)
            for flat in rows:
                state, _ = step(state, flat)
            states[forest.blocks[tree]] = state


def own_state(forest: Forest, states: torch.Tensor, tree: int) -> torch.Tensor:
    state = states[forest.blocks[tree]]
    return state if forest.contexts[tree] else torch.zeros_like(state)


def conv_step(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, with_silu: bool) -> Step:
    """The state is the window: ``[num_channels, width - 1]``."""

    def step(window: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([window, inputs[row].unsqueeze(1)], dim=1)
        result = (window.double() * weight.double()).sum(1) + (0 if bias is None else bias.double())
        return window[:, 1:], silu(result) if with_silu else result

    return step


def mamba2_step(weights: Mamba2Weights, rows: torch.Tensor, dt: torch.Tensor, shape: Sequence[int]) -> Step:
    """Shape: heads, their size, size of the state."""
    heads, size, state_size = shape

    def step(state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows[row].double().split([heads * size, *[weights.num_groups * state_size] * 2])
        x = values[0].view(heads, size)
        b, c = (one.view(-1, state_size).repeat_interleave(heads // weights.num_groups, 0) for one in values[1:])
        delta = softplus(dt[row].double() + weights.dt_bias.double())
        decay = (delta * weights.A.double()).exp()
        new = state.double() * decay[:, None, None] + x[:, :, None] * (b * delta[:, None])[:, None]
        result = torch.einsum("hpn,hn->hp", new, c) + x * weights.D.double()[:, None]
        return new.to(state.dtype), result.flatten()

    return step


def gated_delta_step(
    weights: GatedDeltaWeights, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]
) -> Step:
    """Shape: heads, size of values, size of keys."""
    heads, value_size, key_size = shape
    keys = weights.num_key_heads * key_size

    def step(state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = rows[row].double().split([keys, keys, heads * value_size])
        query, key = (
            normalize(one.view(-1, key_size), dim=-1, eps=1e-6).repeat_interleave(heads // weights.num_key_heads, 0)
            for one in (query, key)
        )
        decay = (-weights.A_log.double().exp() * softplus(a[row].double() + weights.dt_bias.double())).exp()
        new = state.double() * decay[:, None, None]
        change = value.view(heads, value_size) - torch.einsum("hvk,hk->hv", new, key)
        change = change * b[row].double().sigmoid()[:, None]
        new = new + change[:, :, None] * key[:, None]
        result = torch.einsum("hvk,hk->hv", new, query) * key_size**-0.5
        return new.to(state.dtype), result.flatten()

    return step
