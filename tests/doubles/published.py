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
#: Width of heads and targets that are made wider.
WIDER = tiny.HIDDEN * 3 // 2


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


def with_a_mask(config: dict, tensors: Tensors) -> Tensors:
    """P-EAGLE: further positions are predicted from a mask token and its hidden state, for which it is not trained."""
    config["ptd_token_id"] = 3
    generator = torch.Generator().manual_seed(5)
    return tensors | {"mask_hidden": torch.randn(1, 1, tensors["fc.weight"].shape[1], generator=generator)}


def with_shared_lm_head(config: dict, tensors: Tensors) -> Tensors:
    """No LM head of its own, and two of the three aux layers."""
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2]
    del tensors["lm_head.weight"]
    width = tiny.HIDDEN
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"][:, :width], tensors["fc.weight"][:, 2 * width :]], dim=1)
    return tensors


def as_speculators(config: dict, tensors: Tensors) -> Tensors:
    """The speculators format; its own default for `norm_before_residual` is another one."""
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "target_hidden_size")
    layer = {key: value for key, value in config.items() if key not in (*keys, "architectures")}
    given = {key: config[key] for key in keys if key in config}
    verifier = {"name_or_path": "org/Target", "architectures": ["LlamaForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config.clear()
    config |= given | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods, "verifier": verifier},
        "norm_before_residual": False,
        "transformer_layer_config": layer,
    }
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_two_qwen3_layers(config: dict, tensors: Tensors) -> Tensors:
    """Norms of queries and keys, and a second layer that adds little; in the speculators format."""
    config |= {"model_type": "qwen3", "num_hidden_layers": 2}
    tensors |= {f"midlayer.self_attn.{name}_norm.weight": torch.full((tiny.HEAD_DIM,), 1.5) for name in "qk"}
    for name, tensor in list(tensors.items()):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensor = tensor[:, tiny.HIDDEN :]
            little = 0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensors[name.replace("midlayer.", "layers.1.")] = little * tensor
    return as_speculators(config, tensors)


def of_the_last_state(config: dict, tensors: Tensors) -> Tensors:
    """It reads the target's last hidden state as it is: nothing combines layers, and no norm has weights for it."""
    del config["eagle_aux_hidden_state_layer_ids"], tensors["fc.weight"], tensors["midlayer.hidden_norm.weight"]
    config["eagle_config"] = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    for name, tensor in tensors.items():  # the head was trained on other states: it goes by the embedding
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor[:, tiny.HIDDEN :] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 50
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_more_norms(config: dict, tensors: Tensors) -> Tensors:
    """EAGLE-3.1: norms in front of `fc`, and outputs that are fed after the final norm; in the speculators format."""
    config |= {"fc_norm": True, "norm_output": True}
    tensors |= {f"fc_norm.{number}.weight": torch.ones(tiny.HIDDEN) for number in range(3)}
    return as_speculators(config, tensors)


def of_another_width(config: dict, tensors: Tensors) -> Tensors:
    """Wider than the target by numbers that are 0, with an embedding of its own."""
    config |= {"hidden_size": WIDER, "target_hidden_size": tiny.HIDDEN}
    return _wider(tensors)


def narrower_than_the_target(config: dict, tensors: Tensors) -> Tensors:
    """Narrower than the target of ``write_wide_target``, and for fewer positions than the prompts have."""
    config["target_hidden_size"] = WIDER
    layers = tensors["fc.weight"].split(tiny.HIDDEN, dim=1)
    tensors["fc.weight"] = torch.cat([pad(one, (0, WIDER - tiny.HIDDEN)) for one in layers], dim=1)
    return with_few_positions(config, tensors)


def write_wide_target(source: Path, path: Path) -> Path:
    """The same target, wider by numbers that are 0."""
    config = json.loads((source / "config.json").read_text()) | {"hidden_size": WIDER}
    return tiny._write(path, config, _wider(load_file(source / "model.safetensors")))


def _wider(tensors: Tensors) -> Tensors:
    """Return tensors for the width ``WIDER``: the further numbers are 0, and the norms divide by more of them."""
    more, old = WIDER - tiny.HIDDEN, tiny.HIDDEN
    wider = {}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor = pad(tensor * math.sqrt(old / (old + more)), (0, more))
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # of EAGLE-3 two states
            tensor = torch.cat([pad(half, (0, more)) for half in tensor.split(old, dim=1)], dim=1)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor = pad(tensor, (0, 0, 0, more))
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            tensor = pad(tensor, (0, more))
        wider[name] = tensor
    return wider
