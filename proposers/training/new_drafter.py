"""`specplug drafter new`: an untrained EAGLE head of a target's shape, to learn from the target's traffic.

With data, fc is the linear predictor of the next feature (initialise.py), and the head drafts something at once.
Without data it repeats the last feature: its drafts are valid and rarely accepted, until `specplug learn` trains it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from vllm_specplug.utils.published import is_published, publish

from .answers import read_answers, select_draft_vocabulary
from .data import ANSWERS_NAME, FEATURES_NAME
from .eagle import EagleOptions, EagleTask
from .features import FeatureSet, end_ids_of, load_features, read_target_config
from .initialise import small_layer
from .recorded import answers_of, is_recorded, read_recorded

#: Entry of the checkpoint's provenance: the first training starts anew from its data.
UNTRAINED_KEY = "untrained"
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug drafter new`."""
    parser.add_argument("target", metavar="MODEL", help="Hugging Face folder of the target")
    parser.add_argument(
        "--out", required=True, metavar="HEAD", help='folder to publish versions in: the "model" of the server'
    )
    parser.add_argument("--data", metavar="DIR", help="folder that `specplug data` wrote, or a server recorded")
    parser.add_argument(
        "--draft-vocab-size",
        metavar="N",
        type=int,
        default=EagleOptions().draft_vocab_size,
        help="tokens that the drafter can draft: the most frequent ones of --data, else those with the lowest ids "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """`specplug drafter new`.

    Raises:
        ValueError: HEAD has a drafter already, or no head can be made for the target.
        OSError: a file could not be written.
    """
    if is_published(args.out):
        raise ValueError(f"{args.out} has a drafter already: give another --out")
    config = read_target_config(args.target)
    if missing := [key for key in _NEEDED if key not in config]:
        raise ValueError(
            f"the config.json of {args.target} has no {', '.join(missing)}: heads can be made for targets in the "
            "layout of Llama only"
        )
    data = None if args.data is None else _read(Path(args.data), config["vocab_size"])
    answers = [] if data is None else answers_of(data)
    options = EagleOptions(draft_vocab_size=args.draft_vocab_size)
    ids = select_draft_vocabulary(answers, options.draft_vocab_size, config["vocab_size"], end_ids_of(config))
    task = EagleTask(args.target, ids, options)
    if data is None:
        _initialise(task)
    else:
        task.prepare(data, fresh=True)
    facts = {UNTRAINED_KEY: True, "answers": len(answers)}
    made = publish(args.out, lambda folder: task.export(str(folder), facts), {})
    print(f"{made.folder}: an untrained head, {ids.numel()} of {config['vocab_size']} tokens. Let it learn:")
    options_given = f'{{"method": "eagle2", "model": "{args.out}", "record": "DIR", "reload": true}}'
    print(f"  vllm serve {args.target} --speculative-config '{options_given}'")
    print(f"  specplug learn DIR --target {args.target} --out {args.out}")
    return 0


@torch.no_grad()
def _initialise(task: EagleTask) -> None:
    """Let the head repeat the last feature; its layer adds nothing to it."""
    head, hidden_size = task.head, task.head.config.hidden_size
    torch.manual_seed(task.options.seed)
    head.fc.weight.zero_()
    head.fc.weight[:, hidden_size:] = torch.eye(hidden_size)
    small_layer(head.layers[0], input_rms=1.0)


def _read(folder: Path, vocab_size: int) -> FeatureSet:
    """Read the answers and features of a folder of either kind.

    Raises:
        ValueError: it has none.
    """
    if is_recorded(folder):
        return read_recorded(folder, vocab_size)
    if not (folder / ANSWERS_NAME).is_file() or not read_answers(folder / ANSWERS_NAME):
        raise ValueError(f"{folder} has no answers: give a folder of `specplug data`, or one that a server records to")
    return load_features(sorted((folder / FEATURES_NAME).glob("shard-*.safetensors")))
