"""The target's input embedding and LM head: wherever its class keeps them, of any weight format, without LoRA adapters.

Drafts come from the base model: an adapter's rows are mapped to the rows of the target's forward, which a drafter's
forward does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import method_has_implemented_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_multimodal

from vllm_specplug.config import ConfigError
from vllm_specplug.proposer import TargetInfo

#: Rows of the identity matrix that are multiplied at once by a head that returns no single rows of its weights.
IDENTITY_ROWS = 64


class TargetParts:
    """Parts of a target that vLLM's loaders of EAGLE drafters read, under the names that they look for.

    Args:
        target: vLLM's model, also a multi-modal one.
        info: of the target.

    Attributes:
        model: has ``embed_tokens``, the input embedding.
        lm_head: the module that the target's logits are computed with; of tied weights, the embedding.
    """

    def __init__(self, target: torch.nn.Module, info: TargetInfo):
        self.model = SimpleNamespace(embed_tokens=embedding_of(target))
        self.lm_head = find_head(target, info.hidden_size, info.dtype)[1]


class TargetHead:
    """The LM head of a loaded target.

    Args:
        target: vLLM's model, also a multi-modal one.
        hidden_size, dtype: of the inputs.

    Attributes:
        device: of the weights.
        gathers: whether ``rows`` reads only the rows that are asked for.  Otherwise it takes a forward of the head over
            ``hidden_size`` rows.
    """

    def __init__(self, target: torch.nn.Module, hidden_size: int, dtype: torch.dtype):
        self._processor, self._layer = find_head(target, hidden_size, dtype)
        self._model, self._hidden_size, self._dtype = target, hidden_size, dtype
        self.device = next(self._layer.parameters()).device
        self.gathers = method_has_implemented_embedding(type(self._layer.quant_method))

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of these tokens, dequantised: int64 ``[n]`` -> ``[n, hidden_size]``."""
        method = self._layer.quant_method
        if self.gathers:
            return method.embedding(self._layer, token_ids).to(self._dtype)
        identity = torch.eye(self._hidden_size, dtype=self._dtype, device=self.device)
        columns = [method.apply(self._layer, some)[:, token_ids] for some in identity.split(IDENTITY_ROWS)]
        return torch.cat(columns).T.contiguous()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the base model's logits: ``[num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``."""
        if isinstance(self._processor, BaseLayerWithLoRA):
            return self._processor.base_layer(self._layer, hidden)
        return self._model.compute_logits(hidden)


def base_layer(layer: Any) -> Any:
    """Return the layer without the wrapper that adds adapters."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


def embedding_of(target: torch.nn.Module) -> torch.nn.Module:
    """Find the module that looks the embeddings of token ids up.

    Raises:
        ConfigError: the target has none that can be found.
    """
    language_model = target.get_language_model() if supports_multimodal(target) else target
    token_ids = torch.zeros(1, dtype=torch.int64, device=_device(target))
    found = _first_call(
        lambda: language_model.embed_input_ids(token_ids),
        _modules(target, (VocabParallelEmbedding, torch.nn.Embedding)),
    )
    if found is None:
        raise ConfigError(
            f"{type(target).__name__} has no embedding module that a drafter could share: use a method that needs "
            "no drafter, such as lookup"
        )
    return base_layer(found[0])


def find_head(target: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Find the target's logits processor, and the module that it multiplies hidden states with.

    Raises:
        ConfigError: the target has none that can be found.
    """
    hidden = torch.zeros(1, hidden_size, dtype=dtype, device=_device(target))
    found = _first_call(lambda: target.compute_logits(hidden), _modules(target, (LogitsProcessor,)))
    if found is None:
        raise ConfigError(
            f"{type(target).__name__} has no LM head module that a drafter could share: use a method that needs no "
            "drafter, such as lookup"
        )
    processor, arguments = found
    return processor, base_layer(arguments[0])


class _Found(Exception):
    """Ends a call at the first module of interest."""


def _first_call(call: Callable[[], Any], modules: Iterator[torch.nn.Module]) -> tuple[torch.nn.Module, tuple] | None:
    """Return the first of ``modules`` that ``call`` calls, and its arguments; it does not run."""
    calls: list[tuple[torch.nn.Module, tuple]] = []

    def stop(module: torch.nn.Module, args: tuple) -> None:
        calls.append((module, args))
        raise _Found

    hooks = [module.register_forward_pre_hook(stop) for module in modules]
    try:
        call()
    except _Found:
        return calls[0]
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _modules(target: torch.nn.Module, kinds: tuple[type, ...]) -> Iterator[torch.nn.Module]:
    """Yield modules of these kinds, and LoRA layers that wrap one."""
    for module in target.modules():
        if isinstance(module, kinds) or isinstance(base_layer(module), kinds):
            yield module


def _device(target: torch.nn.Module) -> torch.device:
    return next(target.parameters()).device
