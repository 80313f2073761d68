"""Replaces ``auto`` by a configuration of the other methods, and says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_specplug.config import ConfigError, TreeOptions, parse_options, resolve_drafter, shipped_drafters
from vllm_specplug.proposer import Choice, TargetInfo, find_method
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, read_config, read_shapes
from vllm_specplug.proposers.eagle2.kinds import METHOD_OF, kind_of
from vllm_specplug.utils.published import is_published, publish, read_current

from .options import AutoOptions

#: Methods of shipped drafters, the best first (docs/measurements.md).
METHODS = ("eagle2", "medusa")
#: Folders of ``learn``: the records, and the published drafter.
RECORDED_NAME, HEAD_NAME = "recorded", "head"
#: Niceness of the trainer: steps come first.
TRAINER_NICE = "19"


def choose(options: AutoOptions, target: TargetInfo, name: str, on_cpu: bool) -> Choice:
    """Choose the configuration for a model.

    Args:
        options: the user's.
        target: the model.
        name: of the model, a folder or a Hugging Face repository.
        on_cpu: whether drafters can be reloaded, and can learn.

    Raises:
        ConfigError, CheckpointError: the drafter that was given cannot be used.
    """
    own = [field.name for field in fields(TreeOptions)]
    given = {key: value for key in own if (value := getattr(options, key)) != getattr(AutoOptions, key)}
    common = {"budget": "measured", **given}
    how = "with the measured budget" if common["budget"] == "measured" else "with a fixed budget"
    shipped = next(shipped_for(name, target), None)
    if options.model is not None:
        method, drafter, why = _method_of(options.model), options.model, f"the drafter {options.model}"
    elif shipped is not None:
        method, drafter, why = *shipped, f"the drafter {shipped[1]} ({shipped[0]}), which is shipped for this model"
    elif target.has_mtp_layers and options.learn is None:
        method, drafter, why = "mtp_tree", None, "the model's own MTP layers"
    else:
        method, drafter, why = "eagle2", None, "a new drafter"
    source, trainer, lookup = {"method": method}, (), {"method": "lookup"}
    if drafter is not None:
        source["model"] = drafter
    if options.traffic_tokens is not None:
        lookup["traffic_tokens"] = options.traffic_tokens
    if options.learn is not None:
        _check_learning(options.learn, method, name, on_cpu)
        folder = Path(options.learn).absolute()
        recorded, head = folder / RECORDED_NAME, folder / HEAD_NAME
        found = _begin(head, name, drafter)
        why = f"the drafter that learns in {folder} ({found or f'begun with {why}'})"
        source |= {"model": str(head), "record": str(recorded)}
        if options.record_mib is not None:
            source["record_mib"] = options.record_mib
        trainer = ("learn", str(recorded), "--target", name, "--out", str(head), "--nice", TRAINER_NICE)
    elif drafter is None and method != "mtp_tree":
        missing = "it has no MTP layers, and no drafter was given as 'model'"
        why = f"lookup alone, {how}: no drafter is shipped for {Path(name).name}, {missing}"
        return Choice({**lookup, **common}, why)
    published = "model" in source and is_published(Path(source["model"]).expanduser())
    if on_cpu and published and common.setdefault("reload", True):
        why += ", whose new versions are taken while serving"
    config = {"method": "union", "sources": [source, lookup], **common}
    return Choice(config, f"lookup and {why}, {how}", trainer)


def _check_learning(learn: str, method: str, name: str, on_cpu: bool) -> None:
    """Raise ``ConfigError`` where a drafter cannot learn while it serves."""
    problem = None
    if not on_cpu:
        problem = "answers are recorded on CPUs only: leave it out"
    elif method != "eagle2":
        problem = f"drafters of method {method!r} do not learn while they serve: give an EAGLE or HASS head as 'model'"
    elif not Path(name).is_dir():
        problem = f"the trainer reads the model from a local folder (found {name!r}): serve the downloaded folder"
    if problem is not None:
        raise ConfigError(f"learn={learn!r} cannot be used: {problem}")


def _begin(head: Path, target: str, drafter: str | None) -> str:
    """Publish the first version: a copy of the drafter, or a new one; describe a version that is there already.

    Raises:
        ConfigError: no new drafter can be made.
    """
    if is_published(head):
        return f"version {read_current(head).version}"
    head.parent.mkdir(mode=0o700, exist_ok=True)
    if drafter is not None:
        publish(head, lambda folder: _copy(resolve_drafter(drafter, METHODS[0]), folder), {})
        return ""
    command = [sys.executable, "-m", "vllm_specplug.cli.cli", "drafter", "new", target, "--out", str(head)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise ConfigError(f"no new drafter can be made for {target}: {reason}")
    return ""


def _copy(folder: Path, to: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            shutil.copyfile(file, to / file.name)


def _method_of(drafter: str) -> str:
    """Return the method of a drafter that was given."""
    folder = resolve_drafter(drafter, AutoOptions.method)
    return METHOD_OF.get(kind_of(read_config(folder), read_shapes(folder)), "eagle2")


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
    others = "other models: lookup, and the drafter that 'model' names or the model's own MTP layers"
    return "; ".join([*chosen, others])
