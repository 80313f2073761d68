"""MTP layers on the V1 runner: fed level by level, as EAGLE heads are."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.cpu.drafters.levels import LevelDrafter
from vllm_specplug.utils.lazy import load

#: By type of config: the adapter of layers that vLLM runs in a way of their own; older versions of vLLM lack some.
_ADAPTERS = {
    "step3p5_mtp": "vllm_specplug.cpu.drafters.step_mtp:TreeStepMTPProposer",
    "gemma4_mtp": "vllm_specplug.cpu.drafters.gemma_mtp:TreeGemmaMTPProposer",
}


def make_drafter(vllm_config: Any, device: torch.device, runner: Any) -> LevelDrafter:
    """Make the adapter of the target's MTP layers."""
    config_type = vllm_config.speculative_config.draft_model_config.hf_config.model_type
    adapter = _ADAPTERS.get(config_type, "vllm_specplug.cpu.drafters.eagle:TreeEagleProposer")
    return load(adapter)(vllm_config, device, runner)
