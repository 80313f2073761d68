"""Whether another version of a checkpoint can take the place of the one that a server uses."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CheckpointError, load_head, read_head
from .layout import AUX_KEY

#: Entries of a config that the running drafter computes by; others are names and provenance, or follow from tensors.
_FIXED_ENTRIES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
    "medusa_num_heads",
    "medusa_num_layers",
    AUX_KEY,
    "eagle_config",
)
#: Entries that are false if they are left out.
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Tensors whose size follows from the draft vocabulary.
_VOCABULARY = ("d2t", "t2d")


class VersionCheck:
    """Properties that every version shares with the first one of the server.

    Args:
        folder: of the first version's checkpoint.
        served: name of the target that is served, a folder or a repository.
    """

    def __init__(self, folder: str | os.PathLike, served: str = ""):
        self._served = Path(served).name
        self._config, self._shapes = read_head(Path(folder))

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read and check a version's tensors.

        Raises:
            CheckpointError, OSError: it cannot take the place of the version in use.
        """
        config, shapes = read_head(folder)
        self._compare(folder, config, shapes)
        state = load_head(folder)[1]
        for name, tensor in state.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{folder}: {name} has values that are not finite: train it again.")
        return state

    def _compare(self, folder: Path, config: dict, shapes: dict[str, tuple[int, ...]]) -> None:
        for key in (*_FIXED_ENTRIES, *_FLAGS):
            default = False if key in _FLAGS else None
            given, needed = config.get(key, default), self._config.get(key, default)
            if None not in (given, needed) and not _equal(given, needed):
                raise CheckpointError(
                    f"{folder / 'config.json'} says {key} {given!r}, the drafter in use {needed!r}: restart "
                    "the server to serve another shape."
                )
        target, own = (_target_of(one) for one in (config, self._config))
        if target is not None and own is not None and target not in (own, self._served):
            raise CheckpointError(f"{folder} was trained for {target!r}, the drafter in use for {own!r}.")
        found, expected = ({**one} for one in (shapes, self._shapes))
        for name in _VOCABULARY:
            found.pop(name, None), expected.pop(name, None)
        if ("d2t" in shapes) != ("d2t" in self._shapes) or found.keys() != expected.keys():
            names = sorted(shapes.keys() ^ self._shapes.keys())
            raise CheckpointError(f"{folder} and the drafter in use do not have the same tensors: {', '.join(names)}.")
        if wrong := [name for name in sorted(found) if found[name] != expected[name]]:
            raise CheckpointError(
                f"{folder}: {wrong[0]} has the shape {list(found[wrong[0]])}, in the drafter in use "
                f"{list(expected[wrong[0]])}: restart the server to serve another shape."
            )


def _equal(given: Any, needed: Any) -> bool:
    if isinstance(given, float) and isinstance(needed, float):  # a number may have been stored in float32
        return math.isclose(given, needed, rel_tol=1e-4)
    return given == needed


def _target_of(config: dict) -> str | None:
    entry = config.get("specplug")
    target = entry.get("target") if isinstance(entry, dict) else None
    return Path(target).name if isinstance(target, str) else None  # a repository or a folder
