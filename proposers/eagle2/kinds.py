"""Kinds of draft checkpoints, told apart by their tensors and configs, and the method that serves each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Only configs of the speculators format have this key; its value is the kind.
SPECULATORS_KEY = "speculators_model_type"
#: Names of the first decoder layer of a head.
LAYER_NAMES = ("midlayer", "layers.0")

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
_MEDUSA = re.compile(r"^(medusa_heads?\.)?\d{1,4}\.\d{1,4}\.(linear\.)?(weight|bias)$", re.ASCII)
_MTP = re.compile(r"(^|\.)(mtp|mtp_layers|eh_proj|enorm|hnorm)\.")
#: Of a P-EAGLE head: the keys of its mask token, and the tensor of the mask's hidden state.
PARALLEL_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
MASK_STATE = "mask_hidden"
#: By kind: keys of a config that only this kind has.
_KEYS = {
    "dspark": ("markov_rank", "dspark_target_layer_ids"),
    "dflash": ("dflash_config",),
    "peagle": PARALLEL_KEYS[:2],
}
#: By kind: a part of the names of its architectures, in small letters.
_ARCHITECTURES = {"xpress": "xpress", "dspark": "dspark", "dflash": "dflash", "peagle": "peagle", "mtp": "mtp"}
#: Kinds of the speculators format that have another name here.
_SAME_KINDS = {"dflash2": "dflash", "eagle": "eagle of the speculators format"}

_PARALLEL = "which drafts all positions in one forward"
#: By kind that an EAGLE drafter cannot serve: words for it, and what serves it.
_REFUSED = {
    "peagle": (f"a P-EAGLE head, {_PARALLEL}", "the method 'dflash_tree' drafts trees from it"),
    "dflash": (f"a DFlash drafter, {_PARALLEL}", "the method 'dflash_tree' drafts trees from it"),
    "dspark": (f"a DSpark drafter, {_PARALLEL}", "the method 'dflash_tree' drafts trees from it"),
    "xpress": (
        f"an XPress drafter, {_PARALLEL} and refines them in others",
        "no release of vLLM has a class for it: use a DFlash, DSpark or EAGLE-3 head for this target",
    ),
    "mtp": (
        "MTP layers, which belong to a target's own checkpoint",
        "the method 'mtp_tree', without 'model', drafts trees from those in the target's own; vLLM's own method 'mtp' "
        "drafts chains from those in another",
    ),
    "mlp_speculator": ("an MLP speculator", "use an EAGLE, HASS, EAGLE-3 or Medusa head for this target"),
    "medusa": ("a set of Medusa heads", "the method 'medusa' serves it"),
    "model": (
        "a whole language model and not a draft head",
        "is this the target's own folder? Give the head's folder; the method 'draft_tree' drafts trees with "
        "a small model",
    ),
}
#: By kind: the method that drafts trees from such a checkpoint.
METHOD_OF = {
    "eagle": "eagle2",
    "eagle3": "eagle2",
    "medusa": "medusa",
    "dflash": "dflash_tree",
    "dspark": "dflash_tree",
    "peagle": "dflash_tree",
    "model": "draft_tree",
}
_NAMES = {"eagle": "an EAGLE-1/2 or HASS head", "eagle3": "an EAGLE-3 head"}


class CheckpointError(ValueError):
    """A draft checkpoint cannot be used; the message has the cause and the remedy."""


def kind_of(config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the kind of a checkpoint.

    ``eagle`` (also EAGLE-2 and HASS), ``eagle3``, ``peagle``, ``dflash``, ``dspark``, ``mtp``, ``mlp_speculator``,
    ``medusa``, ``model`` (a whole language model), ``unknown``; of the speculators format also the name it gives.
    """
    if config.get(SPECULATORS_KEY, "eagle3") != "eagle3":
        given = str(config[SPECULATORS_KEY])
        return _SAME_KINDS.get(given, given)
    if "medusa_num_heads" in config or (shapes and all(_MEDUSA.match(name) for name in shapes)):
        return "medusa"
    if config.get("model_type") == "mlp_speculator":
        return "mlp_speculator"
    if any(_MTP.search(name) for name in shapes):
        return "mtp"
    eagle, parallel = _eagle_kind(config, shapes), _parallel_kind(config, shapes)
    if eagle is None and parallel in (None, "peagle"):  # some whole models draft in parallel too
        return "model" if num_layers(shapes) else "unknown"
    return parallel or eagle


def _parallel_kind(config: Mapping, shapes: Mapping) -> str | None:
    """Return the kind of a drafter of all positions in one forward, or None."""
    if MASK_STATE in shapes:
        return "peagle"
    names = architectures(config)
    for kind, part in _ARCHITECTURES.items():
        if part in " ".join(names).lower():
            return kind
    for kind, keys in _KEYS.items():
        if any(key in config for key in keys):
            return kind
    if "hidden_norm.weight" in shapes:
        return "dflash"
    return next((name for name in names if "DraftModel" in name), None)


def _eagle_kind(config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the kind of an EAGLE head: the layer of EAGLE-3 reads an embedding and a hidden state side by side."""
    for layer in LAYER_NAMES:
        query = shapes.get(f"{layer}.self_attn.q_proj.weight", ())
        reads_both = len(query) == 2 and query[1] == 2 * _width(config, shapes) > 0
        if reads_both or f"{layer}.hidden_norm.weight" in shapes:
            return "eagle3"
    # Without fc a head is incomplete; a whole model has a norm in front of its first layer.
    is_head = num_layers(shapes) == 1 and "layers.0.post_attention_layernorm.weight" in shapes
    if "fc.weight" in shapes or (is_head and "layers.0.input_layernorm.weight" not in shapes):
        return "eagle"
    return None


def _width(config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the hidden size of a head."""
    fused = shapes.get("fc.weight", ())
    given = config.get("hidden_size")
    return fused[0] if fused else given if isinstance(given, int) else 0


def num_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers that tensors belong to."""
    numbers = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    return len(numbers | ({0} if any(name.startswith("midlayer.") for name in names) else set()))


def name_of(kind: str) -> str:
    """Return words for a kind."""
    if kind in _NAMES:
        return _NAMES[kind]
    if kind == "unknown":
        return "a checkpoint of no known kind"
    return _REFUSED[kind][0] if kind in _REFUSED else f"a drafter of the kind {kind!r}"


def served_by(kind: str) -> str:
    """Return what serves a kind that no EAGLE drafter is."""
    if kind in _NAMES:
        return "the method 'eagle2' serves it"
    return _REFUSED.get(kind, ("", "use an EAGLE, HASS or EAGLE-3 head for this target"))[1]


def refuse_others(path: object, kind: str, config: Mapping, shapes: Mapping) -> None:
    """Refuse all but an EAGLE-3 head, and an EAGLE-1/2 or HASS head of one layer.

    Raises:
        CheckpointError: with the kind, and what serves it.
    """
    if kind not in _NAMES:
        fix = served_by(kind)
        if kind == "unknown":
            names = f"its tensors are {', '.join(sorted(shapes)[:3])}, ..." if shapes else "it has no tensors"
            raise CheckpointError(f"{path} is not a draft checkpoint of a known kind: {names}; {fix}.")
        raise CheckpointError(f"{path} is {name_of(kind)}: {fix}.")
    if kind == "eagle" and (layers := num_layers(shapes)) > 1:
        raise CheckpointError(
            f"{path} is {name_of(kind)} of {layers} layers; trees are drafted from such heads of one layer: vLLM's own "
            f"method {kind!r} drafts chains from it."
        )


def architectures(config: Mapping) -> list[str]:
    """Return the names of a config's architectures."""
    given = config.get("architectures")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def reads_last_state(config: Mapping) -> bool:
    """Return whether an EAGLE-3 head reads the target's last hidden state, and not that of aux layers."""
    return eagle_config(config).get("use_aux_hidden_state") is False


def eagle_config(config: Mapping) -> Mapping:
    """Return the part of a config that some exporters keep apart."""
    part = config.get("eagle_config")
    return part if isinstance(part, Mapping) else {}
