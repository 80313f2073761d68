"""EAGLE-2: a feature-level drafter whose draft tree follows its own confidence (EAGLE-2, section 4)."""

from __future__ import annotations

import logging
from pathlib import Path
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

    path = resolve_drafter(options.model, options.method)
    info = validate_checkpoint(path, target.hidden_size, target.vocab_size, num_layers=target.num_layers)
    if info.kind != "eagle3":
        # vLLM leaves out a bias that the config does not name.
        entries = {"bias": info.has_bias}
        return DrafterConfig(options, info.kind, str(path), supports_int8=True, config_entries=entries)
    _say_layers(path, info, target.num_layers)
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


def _say_layers(path: Path, info: CheckpointInfo, num_layers: int) -> None:
    """Log which layers of the target a head reads, and warn where its training may have read others.

    vLLM's id n is the input of layer n.  Some trainers write the id of the layer whose output it is, which is one less.
    Their first id is 1 (SGLang adds 1 to such ids: sgl-project/sglang#25454).
    """
    from vllm_specplug.proposers.eagle2.layout import AUX_KEY

    layers = info.aux_layers
    if not layers:
        logger.info("%s reads the target's last hidden state", path)
        return
    reads = f"{path} reads the target's layers {layers} (of {num_layers})"
    if AUX_KEY not in str(info.config):
        logger.warning(
            "%s: vLLM's default, because its config names none. If it was trained on others, few of its drafts are "
            "accepted: add %s to its config",
            *(reads, AUX_KEY),
        )
    elif layers[0] == 1:
        logger.warning(
            "%s, as vLLM counts them: id n is the input of layer n. Some trainers count outputs: their ids begin with "
            "1 too, and stand for %s. If few of its drafts are accepted, write those as %s in its config",
            *(reads, [one + 1 for one in layers], AUX_KEY),
        )
    else:
        logger.info("%s", reads)


EAGLE = ModelDrafter(
    configure,
    v1="vllm_specplug.cpu.drafters.eagle:TreeEagleProposer",
    v2="vllm_specplug.gpu.drafters.eagle:TreeEagleSpeculator",
    is_vllm_model=True,
)
METHOD = Method("eagle2", Eagle2Options, model=EAGLE)
