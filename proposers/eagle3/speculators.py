"""`specplug convert`: convert an EAGLE-3 checkpoint of vllm-project/speculators to the plain EAGLE-3 layout."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from ..eagle2.checkpoint import CONFIG_NAME, CheckpointError, load_head, read_config, save_head, validate_checkpoint
from ..eagle2.plain_layout import plain_config, verifier_of


def convert(path: str, out: str) -> None:
    """Write the plain form of the checkpoint at `path` to the folder `out`.

    Raises:
        CheckpointError: it is not such a checkpoint, or it is incomplete.
        OSError: the plain form could not be written.
    """
    if Path(out).exists() and Path(out).resolve() == Path(path).resolve():
        raise CheckpointError("--out is the checkpoint's own folder: give another one")
    given = read_config(Path(path))
    config = plain_config(given, Path(path))
    state = load_head(path)[1]
    if state.get("t2d") is not None:
        state["t2d"] = state["t2d"].bool()
    partial = Path(f"{out}.partial")
    try:
        save_head(partial, config, state)
        hidden_size = config.get("target_hidden_size") or config.get("hidden_size", 0)
        layers = _layers_of(verifier_of(given))
        validate_checkpoint(partial, hidden_size, config.get("vocab_size", 0), "eagle3", layers)
        Path(out).mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir(), reverse=True):  # weights before config, as in save_head
            os.replace(file, Path(out) / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _layers_of(target: str | None) -> int | None:
    """Return the number of layers of a target in a folder of this machine; None: not known."""
    if target is None or not (Path(target) / CONFIG_NAME).is_file():
        return None
    config = read_config(Path(target))
    layers = config.get("text_config", config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug convert`."""
    parser.add_argument("checkpoint", help="folder of an EAGLE-3 checkpoint in the speculators format")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the converted checkpoint")


def run(args: argparse.Namespace) -> None:
    """`specplug convert`; prints the folder."""
    convert(args.checkpoint, args.out)
    print(args.out)
