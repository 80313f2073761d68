"""EAGLE-2: a feature-level drafter whose draft tree follows its own confidence (EAGLE-2, section 4)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_specplug.config import Eagle2Options
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo

if TYPE_CHECKING:
    from vllm_specplug.proposers.eagle2.checkpoint import CheckpointInfo

logger = logging.getLogger("vllm_specplug")

#: vLLM's models of EAGLE-3 heads with Llama and with Qwen3 layers, whatever their configs call them.
EAGLE3_ARCHITECTURES = ("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")


def configure(options: Eagle2Options, target: TargetInfo) -> DrafterConfig:
    """Check a drafter's checkpoint against the target; vLLM loads it as one of its own EAGLE models."""
    from vllm_specplug.config import resolve_drafter
    from vllm_specplug.proposers.eagle2.checkpoint import validate_checkpoint
    from vllm_specplug.proposers.eagle2.layout import AUX_KEY

    path = resolve_drafter(options.model, options.method)
    info = validate_checkpoint(path, target.hidden_size, target.vocab_size, num_layers=target.num_layers)
    if info.kind != "eagle3":
        # vLLM leaves out a bias that the config does not name.
        entries = {"bias": info.has_bias}
        return DrafterConfig(options, info.kind, str(path), supports_int8=True, config_entries=entries)
    if not info.aux_layers:
        logger.info("%s reads the target's last hidden state", path)
    elif AUX_KEY in str(info.config):
        logger.info("%s reads the target's layers %s (of %d)", path, info.aux_layers, target.num_layers)
    else:
        logger.warning(
            "%s reads the target's layers %s (of %d): vLLM's default, because its config names none. If it was trained "
            "on others, few of its drafts are accepted: add %s to its config",
            *(path, info.aux_layers, target.num_layers, AUX_KEY),
        )
    return DrafterConfig(options, info.kind, str(path), config_entries=eagle3_entries(info, target))


def eagle3_entries(info: CheckpointInfo, target: TargetInfo) -> dict[str, Any]:
    """Return what vLLM must read in an EAGLE-3 head's config, whatever its file says."""
    from vllm_specplug.proposers.eagle2.layout import AUX_KEY, head_dim_of

    return {
        "architectures": [EAGLE3_ARCHITECTURES[info.has_qwen3_layers]],
        AUX_KEY: list(info.aux_layers or ()),
        "num_aux_hidden_states": len(info.aux_layers or ()),
        "target_hidden_size": target.hidden_size,
        "num_hidden_layers": info.num_layers,
        "head_dim": head_dim_of(info.config),
    }


EAGLE = ModelDrafter(
    configure,
    v1="vllm_specplug.cpu.drafters.eagle:TreeEagleProposer",
    v2="vllm_specplug.gpu.drafters.eagle:TreeEagleSpeculator",
    is_vllm_model=True,
)
METHOD = Method("eagle2", Eagle2Options, model=EAGLE)
