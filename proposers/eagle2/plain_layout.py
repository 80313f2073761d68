"""The plain layout of a head in the format of vllm-project/speculators: its config, and the names of its tensors.

The speculators format has the geometry of the drafter in `transformer_layer_config` and calls the first decoder layer
`layers.0`. The plain layout has the geometry at the top level. In both, d2t has offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from .kinds import SPECULATORS_KEY, CheckpointError, kind_of, refuse_others
from .layout import AUX_KEY

#: Keys that change the computation, with the speculators format's defaults; the plain config names each of them.
_VARIANTS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_LAYER, _PLAIN_LAYER = "layers.0.", "midlayer."
#: The target's tensors that some files have.
TARGETS = "verifier_"
#: By type of layer: the architecture of a plain config, for vLLM.
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}

Value = TypeVar("Value")


def plain_config(config: dict, path: Path) -> dict:
    """Convert a config to the plain layout.

    Raises:
        CheckpointError: it is not that of an EAGLE-3 head of Llama or Qwen3 layers.
    """
    if SPECULATORS_KEY not in config:
        raise CheckpointError(f"{path} is not in the speculators format, so there is nothing to convert: serve it.")
    if config[SPECULATORS_KEY] != "eagle3":
        refuse_others(path, kind_of(config, {}), config, {})
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{path / 'config.json'} lacks transformer_layer_config; download the checkpoint again.")
    kind = layer.get("model_type", "llama")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} is an EAGLE-3 head with a {kind!r} layer; heads with a Llama or Qwen3 layer are served: use such "
            "a head for this target."
        )
    kept = ("draft_vocab_size", "target_hidden_size", AUX_KEY)
    return {
        **layer,
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "num_hidden_layers": layer.get("num_hidden_layers", 1),
        "tie_word_embeddings": False,
        **{key: config[key] for key in kept if config.get(key) is not None},
        **{key: config.get(key, default) for key, default in _VARIANTS.items()},
        **({"specplug": {"target": name}} if (name := verifier_of(config)) else {}),
    }


def verifier_of(config: Mapping) -> str | None:
    """Return the name of the target that a head in the speculators format was trained for."""
    part = config.get("speculators_config")
    verifier = part.get("verifier") if isinstance(part, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def plain_names(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Rename tensors to the plain layout; those of the target are left out."""
    return {
        _PLAIN_LAYER + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(TARGETS)
    }
