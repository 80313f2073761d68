"""``specplug inspect``: show a draft checkpoint's layout, target, size, training and acceptance."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_specplug.config import resolve_drafter
from vllm_specplug.proposer import TargetInfo, find_method
from vllm_specplug.proposers.dflash.checkpoint import check_kind
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, read_config, read_shapes, validate_checkpoint
from vllm_specplug.proposers.eagle2.kinds import METHOD_OF, SPECULATORS_KEY, kind_of, name_of
from vllm_specplug.proposers.eagle2.layout import DEFAULT_AUX_LAYERS, target_width
from vllm_specplug.proposers.eagle2.plain_layout import verifier_of
from vllm_specplug.proposers.medusa.checkpoint import validate_medusa

_EAGLE = ("eagle", "eagle3")
#: By kind that is no EAGLE head: its inputs from the target.
_OTHERS = {
    "medusa": "the target's last hidden state",
    "dflash": "hidden states of the layers that its config names",
    "dspark": "hidden states of the layers that its config names",
    "peagle": "hidden states of the layers that its config names",
    "model": "tokens only",
    "mtp": "the target's last hidden state",
}
#: Names of a tensor of the first layer of a whole model.
_FIRST_LAYER = re.compile(r"^((model|language_model|backbone)\.)*layers\.0\.")


@dataclass(frozen=True)
class Inspection:
    """Facts from a checkpoint's config and tensor headers; None means not recorded.

    Attributes:
        layout: the format of the files.
        kind: see ``kind_of``.
        reads: the drafter's inputs from the target.
        problem: why it cannot be served as it is, whatever the target; None: it can.
        trained_as: the training method.
        draft_vocab_size: number of target ids that the head can propose.
        alpha: acceptance rate at draft levels 0, 1, ..., each if all levels before were accepted.
        tau: tokens per step of greedy chains, the bonus token included.
    """

    path: str
    layout: str
    kind: str
    reads: str | None
    target: str | None
    hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    num_tensors: int
    num_parameters: int
    trained_as: str | None
    alpha: list[float] | None
    tau: float | None
    provenance: dict
    problem: str | None


def inspect(path: str) -> Inspection:
    """Inspect the checkpoint in the folder ``path``.

    Raises:
        CheckpointError: the checkpoint is unreadable, or not a draft checkpoint.
    """
    folder = Path(path)
    config, shapes = read_config(folder), read_shapes(folder)
    kind, layout = _kind(folder, config, shapes)
    geometry = config.get("transformer_layer_config") if SPECULATORS_KEY in config else config
    geometry = geometry if isinstance(geometry, dict) else {}
    vocab_size = geometry.get("vocab_size")
    if kind == "medusa":
        draft_vocab_size = vocab_size
    else:
        draft_vocab_size = shapes["d2t"][0] if shapes.get("d2t") else config.get("draft_vocab_size") or vocab_size
    source = config["specplug"] if isinstance(config.get("specplug"), dict) else {}
    width = config.get("target_hidden_size") or target_width(geometry, shapes)
    is_other = kind in _OTHERS and (kind != "mtp" or any(map(_FIRST_LAYER.match, shapes)))
    reads, problem = _other(folder, kind, config) if is_other else _check(folder, width, vocab_size)
    return Inspection(
        path=str(folder),
        layout=layout,
        kind=kind,
        reads=reads,
        target=source.get("target") or verifier_of(config) or config.get("base_model_name_or_path"),
        hidden_size=width,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_tensors=len(shapes),
        num_parameters=sum(math.prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")),
        trained_as=_trained_as(kind, source.get("options") or {}),
        alpha=source.get("dev_alpha"),
        tau=source.get("dev_chain_tau"),
        provenance=source,
        problem=problem,
    )


def render(found: Inspection) -> str:
    """Return the inspection as text, one fact per line."""
    hidden = found.hidden_size or "not recorded"
    vocab = found.vocab_size or "not recorded"
    lines = {
        "layout": found.layout,
        "served": found.problem or f"--speculative-config '{json.dumps(command_of(found))}'",
        "reads": found.reads or "not known",
        "trained as": found.trained_as or "not recorded",
        "target": f"{found.target or 'not recorded'} (hidden size {hidden}, vocabulary {vocab})",
        "drafts": _drafts(found),
        "weights": f"{found.num_tensors} tensors, {found.num_parameters / 1e6:.1f} M parameters",
        "tau": "not recorded" if found.tau is None else f"{found.tau:.2f} (greedy chains on dev answers)",
        "alpha": "not recorded" if found.alpha is None else _levels(found.alpha),
        "trained on": _data(found.provenance),
        "made by": _made_by(found.provenance),
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def _kind(path: Path, config: dict, shapes: dict) -> tuple[str, str]:
    kind = kind_of(config, shapes)
    if kind in _EAGLE and SPECULATORS_KEY in config:
        return kind, "EAGLE-3, speculators format"
    if kind == "medusa":
        heads = config.get("medusa_num_heads", "some")
        return kind, f"Medusa, {heads} heads of {config.get('medusa_num_layers', 1)} block(s)"
    if kind == "model":
        return kind, "a whole language model"
    if kind != "unknown":
        return kind, {"eagle3": "EAGLE-3", "eagle": "EAGLE-1/2 (HASS's too)"}.get(kind) or name_of(kind)
    raise CheckpointError(
        f"{path} is not a draft checkpoint of a known layout (EAGLE-1/2, HASS, EAGLE-3, speculators, Medusa, "
        f"DFlash) and no language model: its tensors are {', '.join(sorted(shapes)[:3])}, ..."
    )


def command_of(found: Inspection) -> dict[str, str]:
    """Return the speculative config that serves a drafter."""
    if found.kind == "mtp":  # in a whole model, which is the target
        return {"method": "mtp_tree"}
    return {"method": METHOD_OF.get(found.kind, "eagle2"), "model": found.path}


def _other(path: Path, kind: str, config: dict) -> tuple[str, str | None]:
    """Return the inputs of a drafter that is no EAGLE head, and why no target could be served with it, or None."""
    try:
        if kind in ("dflash", "dspark"):
            check_kind(path, config)
    except CheckpointError as error:
        return _OTHERS[kind], f"no: {error}"
    return _OTHERS[kind], None


def _check(path: Path, width: int | None, vocab_size: int | None) -> tuple[str | None, str | None]:
    """Return an EAGLE head's inputs from its target, and why no target could be served with it, or None."""
    try:
        info = validate_checkpoint(path, width or 0, vocab_size or 0)
    except CheckpointError as error:
        return None, f"no: {error}"
    if info.aux_layers is None:
        return f"{DEFAULT_AUX_LAYERS} layers of the target (vLLM's default)", None
    if info.aux_layers:
        return f"layers {list(info.aux_layers)} of the target", None
    return "the target's last hidden state", None


def _check_target(found: Inspection, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Raise ``CheckpointError`` unless a drafter fits a target of these sizes."""
    if found.kind == "medusa":
        validate_medusa(found.path, hidden_size, vocab_size)
    elif found.kind == "mtp" and found.problem is None:
        raise CheckpointError(f"the MTP layers in {found.path} draft for that model only: serve it, without --target")
    elif found.kind in _OTHERS:
        target = TargetInfo(hidden_size, vocab_size, num_layers, torch.float32)
        method = find_method(METHOD_OF[found.kind])
        assert method.model is not None
        method.model.configure(method.options(model=found.path), target)
    else:
        validate_checkpoint(found.path, hidden_size, vocab_size, num_layers=num_layers or None)


def _trained_as(kind: str, options: dict) -> str | None:
    if not options:
        return None
    steps = options.get("align_steps", 1)
    if kind == "eagle3":
        return f"EAGLE-3, {steps} passes of the training-time test"
    if kind == "peagle":
        return f"P-EAGLE, {steps} positions"
    weight = options.get("distill_weight")
    loss = f", {weight} x {options.get('distill_loss', 'topk')} loss" if weight else ""
    return f"{'HASS' if steps > 1 or loss else 'EAGLE'}, align-{steps}{loss}"


def _drafts(found: Inspection) -> str:
    if not found.draft_vocab_size or not found.vocab_size:
        return "not recorded"
    if found.draft_vocab_size == found.vocab_size:
        return "the whole vocabulary"
    share = found.draft_vocab_size / found.vocab_size
    return f"{found.draft_vocab_size} of {found.vocab_size} ids ({share:.0%})"


def _levels(alpha: list[float]) -> str:
    return ", ".join(f"{level}-alpha {value:.2f}" for level, value in enumerate(alpha))


def _data(source: dict) -> str:
    if "answer_tokens" not in source:
        return "not recorded"
    steps = f" in {source['steps']} steps" if "steps" in source else ""
    return f"{source['answer_tokens']} answer tokens of {source.get('prompts', '?')} prompts{steps}"


def _made_by(source: dict) -> str:
    if "command" not in source:
        return "not recorded"
    return f"{source['command']} (commit {(source.get('commit') or 'unknown')[:12]})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug inspect``."""
    parser.add_argument("checkpoint", help="folder, Hugging Face repository, or short name of a shipped drafter")
    parser.add_argument("--target", metavar="DIR", help="also check that the checkpoint fits this target")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Run ``specplug inspect``: print the inspection.

    Raises:
        CheckpointError: the folder holds no draft checkpoint, or one for another target.
    """
    found = inspect(str(resolve_drafter(args.checkpoint, "hass")))
    print(json.dumps(asdict(found), indent=2) if args.json else render(found))
    if args.target:
        from vllm_specplug.proposers.training.features import read_target_config

        config = read_target_config(args.target)
        config = config.get("text_config", config)
        if missing := [key for key in ("hidden_size", "vocab_size") if key not in config]:
            raise CheckpointError(f"{args.target}/config.json lacks {', '.join(missing)}: give a target's folder")
        sizes = config["hidden_size"], config["vocab_size"]
        _check_target(found, *sizes, config.get("num_hidden_layers", 0))
        if not args.json and found.kind == "model":
            print(
                f"{'vocabulary':<12}{found.vocab_size} ids, the target has {sizes[1]}: the server compares the tokens"
            )
        elif not args.json:
            print(f"{'fits':<12}{args.target}")
