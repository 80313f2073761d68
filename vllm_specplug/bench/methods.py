"""Methods to compare: vLLM's speculative configuration for each name of ``--methods``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.config import is_our_method, parse_options, resolve_drafter

_DRAFTER = "smollm2-135m-instruct"
_STOCK_EAGLE = "eagle-chain"
BASELINE = "plain"
NO_DRAFTS = "no-drafts"

#: The traffic index is off, because it would hold the exact answers of the warm-up and of earlier repeats.
_LOOKUP = {"method": "lookup", "traffic_tokens": 0}

#: Speculative configurations by method name; ``None`` is plain decoding.
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    NO_DRAFTS: _LOOKUP,  # the plugin, but its requests turn drafts off
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    _STOCK_EAGLE: {"method": "eagle", "model": _DRAFTER, "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},  # needs the package arctic-inference
    "eagle2": {"method": "eagle2", "model": _DRAFTER},
    "hass": {"method": "hass", "model": _DRAFTER},
    "medusa-chain": {"method": "medusa", "model": _DRAFTER, "tree": [[0], [0, 0], [0, 0, 0]]},  # top-1 of each head
    "medusa": {"method": "medusa", "model": _DRAFTER},
    "lookup": _LOOKUP,
    "swift": {"method": "swift"},
    "union": {"method": "union", "sources": [{"method": "eagle2", "model": _DRAFTER}, _LOOKUP]},
}
_STOCK = ("plain", "ngram", "suffix", _STOCK_EAGLE)  # these run without this plugin


@dataclass(frozen=True)
class Method:
    """One compared method: its label, ``name`` or ``name:variant``, and vLLM's speculative configuration."""

    label: str
    config: dict[str, Any] | None

    @property
    def stock(self) -> bool:
        """Whether it runs without this plugin."""
        return self.label.partition(":")[0] in _STOCK

    @property
    def drafts(self) -> bool:
        """Whether its requests let it draft."""
        return self.label.partition(":")[0] != NO_DRAFTS


def parse_methods(names: str, overrides: Iterable[str] = ()) -> list[Method]:
    """Parse ``a,b:variant`` and ``NAME=JSON`` overrides to methods; a null value removes a key.

    Raises:
        ValueError: a method is unknown and has no override, an override is malformed, the options of one of our methods
            are not valid, or the plain baseline is missing.
    """
    labels = [name.strip() for name in names.split(",") if name.strip()]
    changes: dict[str, dict] = {}
    for override in overrides:
        label, separator, text = override.partition("=")
        try:
            changes[label] = json.loads(text)
        except json.JSONDecodeError:
            separator = ""
        if not separator or not isinstance(changes[label], dict):
            raise ValueError(f"--method-config {override!r}: expected NAME='{{\"key\": value}}'")
        if label not in labels:
            raise ValueError(f"--method-config {label}: not one of --methods {','.join(labels)}")
    if BASELINE not in labels or len(set(labels)) != len(labels):
        raise ValueError("--methods must contain 'plain', the baseline, and each method once (variants: NAME:LABEL)")
    methods = []
    for label in labels:
        name = label.partition(":")[0]
        if name not in METHODS and label not in changes:
            raise ValueError(
                f"unknown method {name!r}: known methods are {', '.join(METHODS)}; others need --method-config"
            )
        base = METHODS.get(name, {"method": name})
        config = None if base is None else {k: v for k, v in (base | changes.get(label, {})).items() if v is not None}
        method = Method(label, config)
        if config is not None and not method.stock and is_our_method(config.get("method")):
            parse_options(config)  # now, not when its engine starts, which is minutes later
        methods.append(method)
    return methods


def full_vocabulary_copy(drafter: Path, out: Path) -> Path:
    """Copy an EAGLE checkpoint without its draft vocabulary, so that stock vLLM uses the target's whole LM head."""
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((drafter / "config.json").read_text())
    config.pop("draft_vocab_size", None)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: t for file in drafter.glob("*.safetensors") for name, t in load_file(file).items()}
    kept = {name: t for name, t in tensors.items() if name.split(".")[-1] not in ("d2t", "t2d")}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def for_stock_vllm(method: Method, scratch: Path) -> Method:
    """Return the method in a form that stock vLLM can load; converted checkpoints go to ``scratch``."""
    if method.config is None or method.config.get("method") != "eagle":
        return method
    drafter = full_vocabulary_copy(resolve_drafter(method.config["model"]), scratch / method.label.replace(":", "-"))
    return Method(method.label, method.config | {"model": str(drafter)})
