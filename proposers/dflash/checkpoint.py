"""Checks of heads that predict a block of positions against their target, from config and tensor headers."""

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
from vllm_specplug.proposers.eagle2.layout import AUX_KEY

if TYPE_CHECKING:
    from . import DFlashOptions

#: Positions of a head whose config does not say how many it was trained on.
DEFAULT_POSITIONS = 7
#: In the config of some P-EAGLE heads: positions of its training.
POSITIONS_KEY = "num_depths"
_WINDOWS = "sliding_attention"
#: Second name of vLLM's class of DFlash 2: by the first, vLLM refuses it on the V1 runner, whose
#: proposer has no pairwise term.
PAIRS_ARCHITECTURE = "SpecPlugDFlash2ForCausalLM"


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
    if kind not in ("dflash", "dspark"):
        raise CheckpointError(
            f"{path} is {name_of(kind)}, and the method 'dflash_tree' needs a DFlash, DSpark or P-EAGLE head: "
            f"{served_by(kind)}"
        )
    check_kind(path, config)
    layers, depth = [], options.draft_depth or min(_trained(config, kind), MAX_DRAFT_DEPTH)
    if _of(config, "use_aux_hidden_state") is not False:  # else it reads the target's last hidden state
        layers = _layers(config)
        _check_layers(path, layers, target.num_layers)
    _check_sizes(path, _geometry(config), shapes, len(layers), target)
    _check_mask(path, _of(config, "mask_token_id"), target.vocab_size)
    if depth > (trained := _trained(config, kind)):
        raise ConfigError(
            f"draft_depth={depth}: {path} was trained to predict {trained} positions: use a lower draft_depth, or "
            "leave it out"
        )
    # vLLM reads these ids of its config for DFlash; none say that the head reads the last hidden state.
    entries: dict[str, Any] = {AUX_KEY: [one + 1 for one in layers]} if kind == "dspark" or not layers else {}
    if _has_pairs(config):
        entries["architectures"] = [PAIRS_ARCHITECTURE]
    return DrafterConfig(replace(options, draft_depth=depth), kind, str(path), config_entries=entries)


def _has_pairs(config: Mapping) -> bool:
    """Return whether a head is one of DFlash 2."""
    return config.get(SPECULATORS_KEY) == "dflash2" or "DFlash2DraftModel" in architectures(config)


def _trained(config: Mapping, kind: str) -> int:
    """Return how many positions a head was trained to predict."""
    size = config.get("block_size") or DEFAULT_POSITIONS + 1
    # DSpark predicts the first position at the root, except in the speculators format.
    at_root = _of(config, "sample_from_anchor", kind == "dspark" and SPECULATORS_KEY not in config)
    return size if at_root else size - 1


def _of(config: Mapping, key: str, default: Any = None) -> Any:
    """Return an entry of a config, or of the part of it that DFlash heads have."""
    part = config.get("dflash_config")
    return (part if isinstance(part, Mapping) else {}).get(key, config.get(key, default))


def _layers(config: Mapping) -> Any:
    """Return the layers of the target whose outputs a head reads."""
    found = _of(config, "target_layer_ids") or config.get("dspark_target_layer_ids")
    return found or [one - 1 for one in config.get("aux_hidden_state_layer_ids") or []]


def _peagle(path: Path, config: Mapping, options: DFlashOptions, target: TargetInfo) -> DrafterConfig:
    info = validate_parallel(path, target.hidden_size, target.vocab_size, target.num_layers)
    mask = next((config[key] for key in PARALLEL_KEYS if config.get(key) is not None), None)
    _check_mask(path, mask, target.vocab_size)
    entries = eagle3_entries(info, target) | {"ptd_token_id": mask}
    trained = config.get(POSITIONS_KEY) or DEFAULT_POSITIONS
    completed = replace(options, draft_depth=options.draft_depth or min(trained, MAX_DRAFT_DEPTH))
    return DrafterConfig(completed, info.kind, str(path), config_entries=entries)


def _check_mask(path: Path, mask: Any, vocab: int) -> None:
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        raise CheckpointError(
            f"{path}/config.json has mask_token_id {mask!r}: add the id of the head's mask token, from 0 to {vocab - 1}"
        )


def _geometry(config: Mapping) -> Mapping:
    return config["transformer_layer_config"] if SPECULATORS_KEY in config else config


def check_kind(path: Path, config: Mapping) -> None:
    """Refuse heads that compute what is not computed here.

    Raises:
        CheckpointError: with the kind, and what serves it.
    """
    names, layers = " ".join(architectures(config)).lower(), set(_geometry(config).get("layer_types") or [])
    found, chains = None, "vLLM's own method 'dflash' drafts chains from it on CUDA"
    if "lilicorr" in names:
        found = "a LiLiCorr head"
    elif _WINDOWS in layers and len(layers) > 1:
        found = "a head with and without sliding windows in its layers"
    elif "dspark" in names and not ("qwen3" in names or _geometry(config).get("model_type") == "qwen3"):
        found, chains = (
            "a DSpark head with other layers than Qwen3's",
            "vLLM's own method 'dspark' drafts chains from it",
        )
    elif (markov := config.get("markov_head_type") or "vanilla") != "vanilla":
        found, chains = f"a DSpark head with markov_head_type {markov!r}", "use one with 'vanilla'"
    if found is not None:
        raise CheckpointError(
            f"{path} is {found}: trees are drafted by DFlash, DFlash 2 and DSpark heads with layers of one kind; "
            f"{chains}"
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
    if not num_layers and (width := config.get("hidden_size")) != target.hidden_size:
        raise CheckpointError(
            f"The head at {path} has hidden size {width}, the target {target.hidden_size}: it was trained for another "
            "model; use a head trained for this target."
        )
    fused = shapes.get("fc.weight")
    if num_layers and fused is not None and fused[1] != num_layers * target.hidden_size:
        raise CheckpointError(
            f"The head at {path} combines {fused[1]} numbers, but {num_layers} layers of the target have "
            f"{num_layers * target.hidden_size}: it was trained for another model; use a head trained for this target."
        )
