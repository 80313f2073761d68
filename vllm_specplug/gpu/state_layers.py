"""How vLLM's kinds of layers with recurrent states compute the rows of trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.kernels.conv_tree import commit_windows, conv_tree
from vllm_specplug.gpu.kernels.gated_delta_tree import GatedDeltaWeights, gated_delta_tree
from vllm_specplug.gpu.kernels.mamba2_tree import Mamba2Weights, mamba2_tree
from vllm_specplug.gpu.kernels.tree_states import StateTrees


class TreeLayer(ABC):
    """A layer of vLLM that computes trees.

    Args:
        name: of the layer.
        layer: vLLM's.

    Attributes:
        method: of vLLM's layer, which computes convolution and recurrence.
    """

    method: ClassVar[str]
    #: ``[max_rows, num_channels + num_gates]``; inputs of the tree rows of a step: of the convolution, then gates.
    _kept: torch.Tensor
    _num_channels: int
    _num_gates: int

    def __init__(self, name: str, layer: Any):
        self.name, self._layer = name, layer
        if layer.activation not in ("silu", "swish"):
            raise ConfigError(
                f"tree speculation does not support the activation {layer.activation!r} after the convolution of "
                f"{name}: serve this model without speculation"
            )

    def make_room(self, max_rows: int) -> int:
        """Allocate what so many tree rows leave for the commit; return its bytes."""
        self._kept = self._layer.conv1d.weight.new_empty(max_rows, self._num_channels + self._num_gates)
        return self._kept.nbytes

    @abstractmethod
    def compute(self, trees: StateTrees, num_rows: int | None, *tensors: torch.Tensor) -> None:
        """Compute the rows of trees, and keep their inputs.

        Args:
            trees: of the forward.
            num_rows: of all trees, which are the first rows; None: all rows of the tensors.
            tensors: the arguments of vLLM's method, its output last.
        """

    @abstractmethod
    def commit(self, trees: StateTrees, source_rows: torch.Tensor) -> None:
        """Bring the states to the accepted rows, see ``StateLayers.commit``."""

    @abstractmethod
    def empty_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return arguments of vLLM's method with one row."""

    @property
    def _windows(self) -> torch.Tensor:
        """``[num_blocks, num_channels, width - 1]``."""
        windows = self._layer.kv_cache[0]
        return windows if is_conv_state_dim_first() else windows.transpose(1, 2)

    @property
    def _states(self) -> torch.Tensor:
        """``[num_blocks, num_heads, ...]``."""
        return self._layer.kv_cache[1]

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split kept rows: inputs of the convolution, gates."""
        return rows[:, : self._num_channels], rows[:, self._num_channels :]

    def _kept_of(self, trees: StateTrees) -> torch.Tensor:
        return self._kept[: len(trees.lens) * trees.max_rows]

    def _convolve(self, trees: StateTrees, inputs: torch.Tensor) -> torch.Tensor:
        output, convolution = torch.empty_like(inputs, memory_format=torch.contiguous_format), self._layer.conv1d
        weight = convolution.weight.flatten(1)
        conv_tree(trees, inputs, self._windows, weight, convolution.bias, output, silu=True)
        return output


class Mamba2TreeLayer(TreeLayer):
    """``MambaMixer2``: gate, inputs of the convolution and dt are the parts of one projection."""

    method = "conv_ssm_forward"

    def __init__(self, name: str, layer: Any):
        super().__init__(name, layer)
        self._num_channels, self._num_gates = layer.tped_conv_size, layer.tped_dt_size

    @property
    def _weights(self) -> Mamba2Weights:
        layer = self._layer
        return Mamba2Weights(layer.A, layer.D, layer.dt_bias, layer.n_groups // layer.tp_size)

    def compute(self, trees: StateTrees, num_rows: int | None, *tensors: torch.Tensor) -> None:
        projected, output = tensors
        rows = projected[:num_rows, self._layer.tped_intermediate_size :]
        self._kept[: len(rows)].copy_(rows)
        inputs, dt = self._parts(rows)
        mamba2_tree(trees, self._weights, self._convolve(trees, inputs), dt, self._states, output)

    def commit(self, trees: StateTrees, source_rows: torch.Tensor) -> None:
        inputs, dt = self._parts(self._kept_of(trees))
        rows = self._convolve(trees, inputs)
        mamba2_tree(trees, self._weights, rows, dt, self._states, source_rows=source_rows)
        commit_windows(trees, source_rows, inputs, self._windows)

    def empty_inputs(self) -> tuple[torch.Tensor, ...]:
        gate = self._kept.new_zeros(1, self._layer.tped_intermediate_size)
        return torch.cat([gate, torch.zeros_like(self._kept[:1])], dim=1), gate


class GatedDeltaTreeLayer(TreeLayer):
    """``QwenGatedDeltaNetAttention`` on CUDA: inputs of the convolution, and the gates b and a."""

    method = "_forward_core"

    def __init__(self, name: str, layer: Any):
        super().__init__(name, layer)
        self._num_channels, self._num_gates = layer.conv_dim // layer.tp_size, 2 * layer.num_v_heads // layer.tp_size
        layer.enable_fused_gdn_spec_decode = False  # vLLM's kernel for drafts, which are chains

    @property
    def _weights(self) -> GatedDeltaWeights:
        layer = self._layer
        return GatedDeltaWeights(layer.A_log, layer.dt_bias, layer.num_k_heads // layer.tp_size)

    def compute(self, trees: StateTrees, num_rows: int | None, *tensors: torch.Tensor) -> None:
        inputs, b, a, output = (one[:num_rows] for one in tensors)
        torch.cat([inputs, b, a], dim=1, out=self._kept[: len(inputs)])
        rows = self._convolve(trees, inputs)
        gated_delta_tree(trees, self._weights, rows, a, b, self._states, output.flatten(1))

    def commit(self, trees: StateTrees, source_rows: torch.Tensor) -> None:
        inputs, gates = self._parts(self._kept_of(trees))
        b, a = gates.chunk(2, dim=1)
        rows = self._convolve(trees, inputs)
        gated_delta_tree(trees, self._weights, rows, a, b, self._states, source_rows=source_rows)
        commit_windows(trees, source_rows, inputs, self._windows)

    def empty_inputs(self) -> tuple[torch.Tensor, ...]:
        inputs, gates = self._parts(torch.zeros_like(self._kept[:1]))
        b, a = (one.contiguous() for one in gates.chunk(2, dim=1))
        return inputs.contiguous(), b, a, self._kept.new_zeros(1, a.shape[1], self._layer.head_v_dim)


class ShortConvTreeLayer(TreeLayer):
    """``ShortConv``: a convolution between two gates, with a window and no other state."""

    method = "forward_native" if current_platform.is_cpu() else "forward_cuda"
    _num_gates = 0

    def __init__(self, name: str, layer: Any):
        self.name, self._layer, self._num_channels = name, layer, len(layer.conv.weight)

    def make_room(self, max_rows: int) -> int:
        self._kept = self._layer.conv.weight.new_empty(max_rows, self._num_channels)
        return self._kept.nbytes

    def compute(self, trees: StateTrees, num_rows: int | None, *tensors: torch.Tensor) -> None:
        hidden_states, output = (one[:num_rows] for one in tensors)
        before, after, values = self._layer.in_proj(hidden_states)[0].chunk(3, dim=-1)
        inputs = torch.mul(before, values, out=self._kept[: len(values)])
        weight, convolved = self._layer.conv.weight.flatten(1), torch.zeros_like(inputs)
        conv_tree(trees, inputs, self._windows, weight, self._layer.conv.bias, convolved, silu=False)
        output.copy_(self._layer.out_proj(after * convolved)[0])

    def commit(self, trees: StateTrees, source_rows: torch.Tensor) -> None:
        commit_windows(trees, source_rows, self._kept_of(trees), self._windows)

    def empty_inputs(self) -> tuple[torch.Tensor, ...]:
        hidden_states = self._kept.new_zeros(1, self._layer.in_proj.input_size)
        return hidden_states, torch.zeros_like(hidden_states)


_MAMBA = "vllm.model_executor.layers.mamba"
#: By class of vLLM.
LAYERS: dict[str, type[TreeLayer]] = {
    f"{_MAMBA}.mamba_mixer2.MambaMixer2": Mamba2TreeLayer,
    f"{_MAMBA}.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention": GatedDeltaTreeLayer,
    f"{_MAMBA}.short_conv.ShortConv": ShortConvTreeLayer,
}
