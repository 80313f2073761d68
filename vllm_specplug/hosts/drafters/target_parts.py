"""The target's input embedding and LM head, wherever its class keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import supports_multimodal

from vllm_specplug.config import ConfigError
from vllm_specplug.proposer import TargetInfo


class TargetParts:
    """What vLLM's loaders of EAGLE drafters read of a target: they look under these names.

    Args:
        target: vLLM's model, also a multi-modal one.
        info: of the target.

    Attributes:
        model: has ``embed_tokens``, the input embedding.
        lm_head: the module that the target's logits are computed with; of tied weights, the embedding.
    """

    def __init__(self, target: torch.nn.Module, info: TargetInfo):
        self.model = SimpleNamespace(embed_tokens=embedding_of(target))
        self.lm_head = lm_head_of(target, info)


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
            f"{type(target).__name__} embeds token ids without a module that a drafter could share: use a model-free "
            "method, such as lookup"
        )
    return getattr(found[0], "base_layer", found[0])


def lm_head_of(target: torch.nn.Module, info: TargetInfo) -> torch.nn.Module:
    """Find the module that the target's logits processor multiplies hidden states with.

    Raises:
        ConfigError: the target has none that can be found.
    """
    hidden = torch.zeros(1, info.hidden_size, dtype=info.dtype, device=_device(target))
    found = _first_call(lambda: target.compute_logits(hidden), _modules(target, (LogitsProcessor,)))
    if found is None:
        raise ConfigError(
            f"{type(target).__name__} computes logits without a module that a drafter could share: use a model-free "
            "method, such as lookup"
        )
    lm_head = found[1][0]
    return getattr(lm_head, "base_layer", lm_head)


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
    """Yield modules of these kinds, or around such a one (for LoRA)."""
    for module in target.modules():
        if isinstance(module, kinds) or isinstance(getattr(module, "base_layer", None), kinds):
            yield module


def _device(target: torch.nn.Module) -> torch.device:
    return next(target.parameters()).device
