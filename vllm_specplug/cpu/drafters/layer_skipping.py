"""Runs vLLM's target model with some sub-layers left out, through vLLM's own forward.

A decoder layer adds the outputs of its attention and its MLP to the residual stream, so that an output of zeros leaves
the sub-layer out.  During a drafting forward, which always runs eagerly, the ``forward`` of those modules is replaced.
vLLM's compiled model is not touched, so that nothing is compiled for a set of layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_specplug.config import ConfigError
from vllm_specplug.proposers.swift.layer_set import LayerSet

#: Targets whose decoder layers are ``residual += self_attn(norm(residual)); residual += mlp(norm(residual))``, with the
#: signature ``(positions, hidden_states, residual) -> (hidden_states, residual)``.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _nothing_to_add(*args: Any, hidden_states: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    return torch.zeros_like(args[0] if hidden_states is None else hidden_states)


def _passed_on(_positions: Any, hidden_states: Any, residual: Any, *_: Any, **__: Any) -> Any:
    return hidden_states, residual


class LayerSkipping:
    """The target model whose sub-layers can be left out.

    Args:
        target_model: vLLM's.

    Raises:
        ConfigError: its architecture is not one of ``ARCHITECTURES``, or not all of its layers are in this process.
    """

    def __init__(self, target_model: torch.nn.Module):
        name = type(target_model).__name__
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"method 'swift' cannot leave out layers of {name}: use a target of {', '.join(ARCHITECTURES)}, or "
                "another method"
            )
        self._layers = list(target_model.model.layers)
        missing = [i for i, layer in enumerate(self._layers) if not hasattr(layer, "self_attn")]
        if missing:
            raise ConfigError(
                f"method 'swift' needs all layers of the target in one process, layer {missing[0]} is elsewhere: use "
                "--pipeline-parallel-size 1"
            )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def attention_names(self) -> list[str]:
        """Return vLLM's name of the attention of each layer."""
        return [layer.self_attn.attn.layer_name for layer in self._layers]

    @contextlib.contextmanager
    def left_out(self, layer_set: LayerSet) -> Iterator[None]:
        """Run forwards inside without these sub-layers; vLLM's forward context must skip the compiled model."""
        whole = set(layer_set.attention) & set(layer_set.mlp)
        changed = [(self._layers[i], _passed_on) for i in whole]
        changed += [(self._layers[i].self_attn, _nothing_to_add) for i in layer_set.attention if i not in whole]
        changed += [(self._layers[i].mlp, _nothing_to_add) for i in layer_set.mlp if i not in whole]
        try:
            for module, forward in changed:
                module.forward = forward
            yield
        finally:
            for module, _ in changed:
                module.__dict__.pop("forward", None)
