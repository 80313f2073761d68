"""`specplug convert`: convert an EAGLE-3 checkpoint of vllm-project/speculators to the plain EAGLE-3 layout.

The speculators format has the drafter's geometry in `transformer_layer_config` and calls the decoder layer `layers.0`.
The plain layout has the geometry at the top level and calls the layer `midlayer`. In both, d2t has offsets.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch

from ..eagle2.checkpoint import (
    SPECULATORS_KEY,
    CheckpointError,
    load_head,
    read_config,
    save_head,
    validate_checkpoint,
)

#: Keys that change the computation, with the speculators format's defaults; the plain config names each of them.
_VARIANTS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_LAYER, _PLAIN_LAYER = "layers.0.", "midlayer."
_OTHERS = ("fc.", "fc_norm.", "input_norm.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")


def plain_config(config: dict, path: Path) -> dict:
    """Convert a config to the plain layout.

    Raises:
        CheckpointError: it is not that of an EAGLE-3 head of one Llama layer.
    """
    if config.get(SPECULATORS_KEY) != "eagle3":
        raise CheckpointError(
            f"{path} is no EAGLE-3 head in the speculators format ({SPECULATORS_KEY} is "
            f"{config.get(SPECULATORS_KEY)!r}): give one that is"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{path / 'config.json'} lacks transformer_layer_config; download the checkpoint again.")
    kind, layers = layer.get("model_type", "llama"), layer.get("num_hidden_layers", 1)
    if kind != "llama" or layers != 1:
        raise CheckpointError(f"{path} has {layers} {kind!r} layer(s): only heads of one Llama layer are converted")
    kept = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **{key: config[key] for key in kept if config.get(key) is not None},
        **{key: config.get(key, default) for key, default in _VARIANTS.items()},
    }


def plain_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors to the plain layout; the target's tensors that some files have are left out."""
    renamed = {
        _PLAIN_LAYER + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name: tensor
        for name, tensor in state.items()
    }
    return {name: tensor for name, tensor in renamed.items() if name.startswith((_PLAIN_LAYER, *_OTHERS))}


def convert(path: str, out: str) -> None:
    """Write the plain form of the checkpoint at `path` to the folder `out`.

    Raises:
        CheckpointError: it is not such a checkpoint, or it is incomplete.
        OSError: the plain form could not be written.
    """
    if Path(out).exists() and Path(out).resolve() == Path(path).resolve():
        raise CheckpointError("--out is the checkpoint's own folder: give another one")
    config = plain_config(read_config(Path(path)), Path(path))
    state = plain_state(load_head(path)[1])
    if state.get("t2d") is not None:
        state["t2d"] = state["t2d"].bool()
    partial = Path(f"{out}.partial")
    try:
        save_head(partial, config, state)
        hidden_size = config.get("target_hidden_size") or config.get("hidden_size", 0)
        validate_checkpoint(partial, hidden_size, config.get("vocab_size", 0), "eagle3")
        Path(out).mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir(), reverse=True):  # weights before config, as in save_head
            os.replace(file, Path(out) / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug convert`."""
    parser.add_argument("checkpoint", help="folder of an EAGLE-3 checkpoint in the speculators format")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the converted checkpoint")


def run(args: argparse.Namespace) -> None:
    """`specplug convert`; prints the folder."""
    convert(args.checkpoint, args.out)
    print(args.out)
