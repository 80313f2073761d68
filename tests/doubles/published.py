"""Heads of a tiny target, written as others publish theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from tests.doubles import tiny

Tensors = dict[str, torch.Tensor]


def rewrite(source: Path, path: Path, change: Callable[[dict, Tensors], Tensors], target: Path) -> Path:
    """Write a head, changed and with the target's embedding, in two shards of pickled tensors."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = change(config, tensors)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for number, names in enumerate((sorted(tensors)[:5], sorted(tensors)[5:]), start=1):
        shard = {name: tensors[name].contiguous() for name in names}
        torch.save(shard, path / f"pytorch_model-0000{number}-of-00002.bin")
    return path


def with_few_positions(config: dict, tensors: Tensors) -> Tensors:
    """Fewer positions than the prompts have."""
    config["max_position_embeddings"] = 16
    return tensors


def as_modelopt(config: dict, tensors: Tensors) -> Tensors:
    """The layer is called `layers.0`, the ids are in `eagle_config`, and there are few positions."""
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    tensors = with_few_positions(config, tensors)
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_shared_lm_head(config: dict, tensors: Tensors) -> Tensors:
    """No LM head of its own, and two of the three aux layers."""
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2]
    del tensors["lm_head.weight"]
    width = tiny.HIDDEN
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"][:, :width], tensors["fc.weight"][:, 2 * width :]], dim=1)
    return tensors


def of_another_width(config: dict, tensors: Tensors) -> Tensors:
    """Wider than the target by numbers that are 0, with an embedding of its own; the norms divide by fewer of them."""
    more, old = tiny.HIDDEN // 2, tiny.HIDDEN
    config |= {"hidden_size": old + more, "target_hidden_size": old}
    wider = {}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor = pad(tensor * math.sqrt(old / (old + more)), (0, more))
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = torch.cat([pad(half, (0, more)) for half in tensor.split(old, dim=1)], dim=1)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor = pad(tensor, (0, 0, 0, more))
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            tensor = pad(tensor, (0, more))
        wider[name] = tensor
    return wider
