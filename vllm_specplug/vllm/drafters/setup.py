"""A configured drafter: the facts of its target, and its heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specplug.config import model_drafter
from vllm_specplug.proposer import Heads, TargetInfo, find_method
from vllm_specplug.utils.lazy import load


def target_info(model_config: Any) -> TargetInfo:
    """Read a method's facts about the target from vLLM's model config."""
    num_layers = model_config.hf_text_config.num_hidden_layers
    return TargetInfo(model_config.get_hidden_size(), model_config.get_vocab_size(), num_layers, model_config.dtype)


def make_heads(vllm_config: Any, folder: Path | None = None) -> Heads:
    """Make the heads of the configured method, without weights; ``folder``: another checkpoint than its."""
    options = model_drafter(vllm_config.speculative_config.specplug)
    if folder is not None:
        options = replace(options, model=str(folder))
    return load(find_method(options.method).model.heads)(options, target_info(vllm_config.model_config))
