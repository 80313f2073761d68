"""Checks of a DFlash or P-EAGLE head against its target, from its config and tensor headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specplug.config import MAX_DRAFT_DEPTH, ConfigError, resolve_drafter
from vllm_specplug.proposer import DrafterConfig, TargetInfo
from vllm_specplug.proposers.eagle2 import eagle3_entries
from vllm_specplug.proposers.eagle2.checkpoint import read_config, read_shapes, validate_parallel
from vllm_specplug.proposers.eagle2.kinds import (
    PARALLEL_KEYS,
    SPECULATORS_KEY,
    CheckpointError,
    architectures,
    kind_of,
    name_of,
    served_by,
)

if TYPE_CHECKING:
    from . import DFlashOptions

#: Positions of a head whose config does not say how many it was trained on.
DEFAULT_POSITIONS = 7
_WINDOWS = "sliding_attention"


def read_head(options: DFlashOptions, target: TargetInfo) -> DrafterConfig:
    """Check the head that the options name, and complete them by its config.

    Raises:
        CheckpointError, ConfigError: with the fix in the message.
    """
    path = resolve_drafter(options.model, options.method)
    config, shapes = read_config(path), read_shapes(path)
    kind = kind_of(config, shapes)
    if kind == "peagle":
        return _peagle(path, config, options, target)
    if kind != "dflash":
        raise CheckpointError(
            f"{path} is {name_of(kind)}, and the method 'dflash_tree' needs a DFlash or P-EAGLE head: {served_by(kind)}"
        )
    check_kind(path, config)
    given = config.get("dflash_config") or {}
    mask = given.get("mask_token_id", config.get("mask_token_id"))
    layers = given.get("target_layer_ids") or [one - 1 for one in config.get("aux_hidden_state_layer_ids") or []]
    _check_layers(path, layers, target.num_layers)
    _check_sizes(path, _geometry(config), shapes, len(layers), target)
    _check_mask(path, mask, target.vocab_size)
    trained = (config.get("block_size") or DEFAULT_POSITIONS + 1) - 1
    depth = options.draft_depth or min(trained, MAX_DRAFT_DEPTH)
    if depth > trained:
        raise ConfigError(
            f"draft_depth={depth}: {path} was trained to predict {trained} positions: use a lower draft_depth, or "
            "leave it out"
        )
    return DrafterConfig(replace(options, draft_depth=depth), "dflash", str(path))


def _peagle(path: Path, config: Mapping, options: DFlashOptions, target: TargetInfo) -> DrafterConfig:
    info = validate_parallel(path, target.hidden_size, target.vocab_size, target.num_layers)
    mask = next((config[key] for key in PARALLEL_KEYS if config.get(key) is not None), None)
    _check_mask(path, mask, target.vocab_size)
    entries = eagle3_entries(info, target) | {"ptd_token_id": mask}
    completed = replace(options, draft_depth=options.draft_depth or DEFAULT_POSITIONS)
    return DrafterConfig(completed, info.kind, str(path), config_entries=entries)


def _check_mask(path: Path, mask: Any, vocab: int) -> None:
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        raise CheckpointError(
            f"{path}/config.json has mask_token_id {mask!r}: add the id of the head's mask token, from 0 to {vocab - 1}"
        )


def _geometry(config: Mapping) -> Mapping:
    return config["transformer_layer_config"] if SPECULATORS_KEY in config else config


def check_kind(path: Path, config: Mapping) -> None:
    """Refuse heads that compute more than DFlash's layers."""
    names, given = " ".join(architectures(config)).lower(), config.get("dflash_config") or {}
    found = None
    if "dflash2" in names or config.get(SPECULATORS_KEY) == "dflash2":
        found = "a DFlash 2 head, whose convolution vLLM computes on CUDA only"
    elif "lilicorr" in names:
        found = "a LiLiCorr head, which vLLM serves on CUDA only"
    elif given.get("use_aux_hidden_state") is False:
        found = "a DFlash head that reads the target's last hidden state"
    elif _WINDOWS in (_geometry(config).get("layer_types") or []) or given.get("use_swa"):
        found = "a DFlash head with sliding windows"
    if found is not None:
        raise CheckpointError(
            f"{path} is {found}: trees are drafted by DFlash heads with full attention that read layers of the target; "
            "vLLM's own method 'dflash' drafts chains from it"
        )


def _check_layers(path: Path, layers: Any, num_layers: int) -> None:
    if (
        not isinstance(layers, list)
        or not layers
        or not all(isinstance(one, int) and 0 <= one < num_layers for one in layers)
    ):
        raise CheckpointError(
            f"{path}/config.json has target_layer_ids {layers}: the target has layers 0 to {num_layers - 1}; use a "
            "head that was trained for this target"
        )


def _check_sizes(path: Path, config: Mapping, shapes: Mapping, num_layers: int, target: TargetInfo) -> None:
    """Refuse heads of another target."""
    vocab = config.get("vocab_size")
    if vocab != target.vocab_size:
        raise CheckpointError(
            f"The head at {path} has a vocabulary of {vocab}, the target {target.vocab_size}: it was trained for "
            "another model; use a head trained for this target."
        )
    fused = shapes.get("fc.weight")
    if num_layers and fused is not None and fused[1] != num_layers * target.hidden_size:
        raise CheckpointError(
            f"The head at {path} combines {fused[1]} numbers, but {num_layers} layers of the target have "
            f"{num_layers * target.hidden_size}: it was trained for another model; use a head trained for this target."
        )
