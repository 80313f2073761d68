"""Whether another version of a checkpoint can take the place of the one that a server uses."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .checkpoint import CheckpointError, load_head, read_config, read_shapes

#: Entries of a config that may change from version to version: provenance, what is recomputed, and names.
_FREE_ENTRIES = {"specplug", "torch_dtype", "dtype", "_name_or_path", "transformers_version", "draft_vocab_size"}
#: Tensors whose size follows from the draft vocabulary.
_VOCABULARY = ("d2t", "t2d")


class VersionCheck:
    """What every version must share with the one that the server started with.

    Args:
        folder: of that version's checkpoint.
    """

    def __init__(self, folder: str | os.PathLike):
        self._config, self._shapes = read_config(Path(folder)), read_shapes(Path(folder))

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read and check a version's tensors.

        Raises:
            CheckpointError, OSError: it cannot take the place of the version in use.
        """
        config, shapes = read_config(folder), read_shapes(folder)
        self._compare(folder, config, shapes)
        state = load_head(folder)[1]
        for name, tensor in state.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{folder}: {name} has values that are no numbers, or infinite: train it again.")
        return state

    def _compare(self, folder: Path, config: dict, shapes: dict[str, tuple[int, ...]]) -> None:
        keys = sorted((config.keys() | self._config.keys()) - _FREE_ENTRIES)
        if changed := [key for key in keys if config.get(key) != self._config.get(key)]:
            key = changed[0]
            raise CheckpointError(
                f"{folder / 'config.json'} says {key} {config.get(key)!r}, the drafter in use "
                f"{self._config.get(key)!r}: restart the server to serve another shape."
            )
        targets = [entry.get("specplug", {}).get("target") for entry in (config, self._config)]
        if None not in targets and targets[0] != targets[1]:
            raise CheckpointError(f"{folder} was trained for {targets[0]!r}, the drafter in use for {targets[1]!r}.")
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
