"""What ``auto`` stands for: a configuration of the other methods, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from vllm_specplug.config import parse_options, resolve_drafter, shipped_drafters
from vllm_specplug.proposer import Choice, TargetInfo, find_method
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, read_config
from vllm_specplug.utils.published import is_published

from .options import AutoOptions

#: Methods of shipped drafters, the best first (docs/measurements.md).
METHODS = ("eagle2", "medusa")


def choose(options: AutoOptions, target: TargetInfo, name: str, on_cpu: bool) -> Choice:
    """Choose the configuration for a model.

    Args:
        options: the user's.
        target: the model.
        name: of the model, a folder or a Hugging Face repository.
        on_cpu: whether costs can be measured.

    Raises:
        ConfigError, CheckpointError: the drafter that was given cannot be used.
    """
    given = {
        field.name: value
        for field in fields(options)
        if field.name != "model"
        and field.default is not MISSING
        and (value := getattr(options, field.name)) != field.default
    }
    common = {"budget": "measured" if on_cpu else "fixed", **given}
    how = "with the measured budget" if common["budget"] == "measured" else "with a fixed budget"
    if options.model is not None:
        method, drafter, why = _method_of(options.model), options.model, f"the drafter {options.model}"
        if is_published(Path(drafter).expanduser()) and on_cpu:
            common.setdefault("reload", True)
            why += ", whose new versions are taken while serving"
    else:
        found = next(shipped_for(name, target), None)
        if found is None:
            why = f"lookup alone, {how}: no drafter is shipped for {Path(name).name}, and none was given as 'model'"
            return Choice({"method": "lookup", **common}, why)
        method, drafter = found
        why = f"the drafter {drafter} ({method}), which is shipped for this model"
    sources = [{"method": method, "model": drafter}, {"method": "lookup"}]
    return Choice({"method": "union", "sources": sources, **common}, f"lookup and {why}, {how}")


def _method_of(drafter: str) -> str:
    """Return the method of a drafter that was given."""
    config = read_config(resolve_drafter(drafter, AutoOptions.method))
    return "medusa" if "medusa_num_heads" in config else "eagle2"


def shipped_for(name: str, target: TargetInfo | None = None) -> Iterator[tuple[str, str]]:
    """Yield method and short name of the shipped drafters that were trained for a model, the best first.

    Args:
        name: of the model, a folder or a Hugging Face repository.
        target: the model, if its shape is to be checked too.
    """
    for method in METHODS:
        for drafter, folder in shipped_drafters(method).items():
            trained_for = read_config(folder).get("specplug", {}).get("target", "")
            if trained_for.lower() == Path(name).name.lower() and (target is None or _fits(method, drafter, target)):
                yield method, drafter


def _fits(method: str, drafter: str, target: TargetInfo) -> bool:
    try:
        find_method(method).model.configure(parse_options({"method": method, "model": drafter}), target)
    except CheckpointError:
        return False
    return True


def describe() -> str:
    """Say for people what ``auto`` chooses here."""
    known: dict[str, Any] = {}
    for method in METHODS:
        for drafter, folder in shipped_drafters(method).items():
            known.setdefault(read_config(folder).get("specplug", {}).get("target", drafter), f"{drafter} ({method})")
    chosen = [f"{target}: lookup and the drafter {drafter}" for target, drafter in known.items()]
    return "; ".join([*chosen, "other models: lookup, and the drafter that 'model' names"])
