"""Arguments and data preparation that the `specplug train ...` commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from vllm_specplug.config import ConfigError, resolve_drafter
from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.lazy import load

from ..eagle2.alignment import ATTENTIONS
from ..eagle2.checkpoint import CheckpointError, load_head, target_ids
from .answers import (
    Answer,
    adapted_vocabulary,
    content_hash,
    read_answers,
    read_prompts,
    select_draft_vocabulary,
)
from .data import ANSWER_PROMPTS, ANSWERS_NAME, FACTS_NAME, FEATURES_NAME, record_facts
from .features import FeatureSet, end_ids_of, extract, has_layer_features, load_features, read_target_config
from .options import flag_of
from .recorded import answers_of, is_recorded, read_recorded
from .team import Team, join
from .trainer import LoopOptions, RunSettings, Task, train

Options = TypeVar("Options", bound=LoopOptions)
#: Folder of the hidden states of --dev-answers.
DEV_FEATURES_NAME = "dev_features"


@dataclass(frozen=True)
class Material:
    """The data that a head is trained on and measured with."""

    data: FeatureSet
    dev: FeatureSet | None
    draft_ids: torch.Tensor  # int64 [draft_vocab], ascending
    facts: dict  # about the data, for the checkpoint


def add_data_arguments(
    parser: argparse.ArgumentParser, training: bool = True, attention: bool = True, method: str = "eagle2"
) -> None:
    """Add the arguments for a run's data, its results and its device.

    training: false for a command that only measures. attention: whether the training uses multi-pass attention.
    method: serves the trained head.
    """
    parser.add_argument("--target", metavar="DIR", required=True, help="Hugging Face folder of the target")
    parser.add_argument("--data", metavar="DIR", help="folder that `specplug data` wrote, or a server recorded")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        nargs="+",
        default=[],
        help="files of prompts that the target answers first; JSON lines, also .gz",
    )
    add_chat_template_kwargs(parser)
    parser.add_argument(
        "--answers", metavar="FILE", help="file of answers (default: OUT/answers.jsonl, made from --prompts)"
    )
    parser.add_argument("--features", metavar="DIR", help="folder of the hidden states (default: OUT/features)")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the results and the training state")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=320,
        help="largest number of tokens of an answer (default: %(default)s)",
    )
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: torch chooses)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto (default: %(default)s)")
    if not training:
        parser.set_defaults(dev_answers=None, init_from=None)
        return
    parser.add_argument(
        "--dev-answers", metavar="FILE", help="file of answers on which acceptance is measured; they are not trained on"
    )
    parser.add_argument(
        "--init-from",
        metavar="DRAFTER",
        type=partial(_start, method),
        help="checkpoint of the same shape to start from: a folder, or a name that --speculative-config takes",
    )
    parser.add_argument(
        "--eval-every",
        metavar="N",
        type=int,
        default=0,
        help="training steps between two measurements on --dev-answers (default: 0, only at the end)",
    )
    if attention:
        parser.add_argument(
            "--attention",
            choices=ATTENTIONS,
            default="auto",
            help="attention over several passes: plain torch, or flex, torch's compiled flex attention, for CUDA "
            "(default: %(default)s)",
        )


def _start(method: str, name: str) -> str:
    """The folder of a drafter to start from, so that a wrong name ends a run before its long work."""
    try:
        return str(resolve_drafter(name, method))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_option_arguments(parser: argparse.ArgumentParser, defaults: LoopOptions) -> None:
    """Add one flag for each field of a method's options."""
    for one in fields(defaults):
        flag, value, text = flag_of(one.name), getattr(defaults, one.name), one.metadata["help"]
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            text = f"{text} (default: {value})".replace("%", "%%")
            metavar = "NAME" if isinstance(value, str) else "N"
            parser.add_argument(flag, type=type(value), default=value, metavar=metavar, help=text)


def options_from(args: argparse.Namespace, kind: type[Options]) -> Options:
    """Build the options from the flags of `add_option_arguments`."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


@contextmanager
def training(
    args: argparse.Namespace, options: LoopOptions, layers: tuple[int, ...] = ()
) -> Iterator[tuple[Team, Material]]:
    """Join the team of processes and prepare the data, the leader first; `layers` as in `extract`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    with join(args.device) as team:
        yield team, team.leader_first(lambda: _prepare(args, options, layers, team.device))


def run(
    args: argparse.Namespace,
    task_type: type[Task],
    *phases: LoopOptions,
    layers: tuple[int, ...] = (),
    **task_arguments: object,
) -> int:
    """Run a command from the prompts to the checkpoint: answers, features, training.

    phases: options of the training's phases; each starts from the checkpoint of the one before, which lies in
    OUT/phaseN. task_arguments: of `task_type` besides those that every task has.
    """
    if args.init_from is not None:  # before the answers and hidden states, which can take hours
        task_type.check_start(args.init_from, read_target_config(args.target), phases[0])
    with training(args, phases[0], layers) as (team, material):
        settings = RunSettings(material.dev, material.facts, args.eval_every, team=team)
        start = args.init_from
        for number, options in enumerate(phases, start=1):
            out = str(args.out if number == len(phases) else Path(args.out) / f"phase{number}")
            task = task_type(args.target, material.draft_ids, options, start, team.device, **task_arguments)
            train(task, material.data, out, settings)
            start = out
    return 0


def _prepare(args: argparse.Namespace, options: LoopOptions, layers: tuple[int, ...], device) -> Material:
    target_config = read_target_config(args.target)
    if args.data and is_recorded(args.data):
        return _recorded_material(args, options, layers, target_config, device)
    out = Path(args.out)
    folder = Path(args.data) if args.data else out
    answers_file = Path(args.answers or folder / ANSWERS_NAME)
    if args.prompts and args.data:
        raise ValueError("--data already has answers: give either --data or --prompts")
    if args.prompts:
        out.mkdir(parents=True, exist_ok=True)
        record_facts(out / FACTS_NAME, {"chat_template_kwargs": args.chat_template_kwargs})
        load(ANSWER_PROMPTS)(
            args.target,
            read_prompts(args.prompts),
            answers_file,
            max_tokens=args.max_tokens,
            switches=args.chat_template_kwargs,
        )
    if not answers_file.exists():
        raise ValueError(f"there is no answers file {answers_file}: give --prompts to make one, or --answers")
    answers = read_answers(answers_file)
    if not answers:
        raise ValueError(f"{answers_file} has no answers: delete it and give --prompts to make new ones")
    features = Path(args.features or folder / FEATURES_NAME)
    if layers and args.data and not has_layer_features(features):
        raise ValueError(
            f"{folder} has no features of three layers, which EAGLE-3 reads: make them with `specplug data --eagle3` "
            "(the same prompts and --out: its answers are kept)"
        )

    def features_of(rows, where: Path) -> FeatureSet:
        return load_features(extract(args.target, rows, where, layers=layers, device=device), layers=bool(layers))

    dev = None
    if args.dev_answers:
        dev = features_of(read_answers(args.dev_answers), features.with_name(DEV_FEATURES_NAME))
    return _material(args, answers, features_of(answers, features), dev, options, target_config)


def _recorded_material(
    args: argparse.Namespace, options: LoopOptions, layers: tuple[int, ...], config, device
) -> Material:
    """Prepare a server's recorded answers; the target runs only on --dev-answers."""
    if layers:
        raise ValueError(f"{args.data} was recorded by a server, without the three layers that EAGLE-3 reads")
    dev = None
    if args.dev_answers:
        folder = Path(args.out) / DEV_FEATURES_NAME
        dev = load_features(extract(args.target, read_answers(args.dev_answers), folder, device=device))
    data = read_recorded(args.data, config["vocab_size"])
    return _material(args, answers_of(data), data, dev, options, config)


def _material(
    args: argparse.Namespace,
    answers: list[Answer],
    data: FeatureSet,
    dev: FeatureSet | None,
    options: LoopOptions,
    target_config: dict,
) -> Material:
    facts = {
        "data_sha256": content_hash(answers),
        "prompts": len(answers),
        "answer_tokens": sum(len(answer.answer_ids) for answer in answers),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
    }
    draft_ids = _draft_vocabulary(answers, options.draft_vocab_size, target_config, args.init_from)
    return Material(data, dev, draft_ids, facts)


def _draft_vocabulary(answers: list[Answer], size: int, target_config: dict, init_from: str | None) -> torch.Tensor:
    """int64 [draft_vocab]: ids of a head to start from stay where the answers leave room."""
    end_ids = end_ids_of(target_config)
    state = {}
    with suppress(CheckpointError):  # a drafter of another kind: the vocabulary is chosen anew
        state = load_head(init_from)[1] if init_from else {}
    if "d2t" not in state or len(state["d2t"]) != size:
        return select_draft_vocabulary(answers, size, target_config["vocab_size"], end_ids)
    ids = target_ids(state["d2t"])
    return ids if "lm_head.weight" in state else adapted_vocabulary(ids, answers, end_ids)
