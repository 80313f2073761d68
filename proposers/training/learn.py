"""`specplug learn`: train a drafter beside the server, on the answers that the server records.

It waits for new answers, trains, compares on held-out answers and publishes what is better, again and again (see
learning.py). A server that reloads takes the new version. A signal ends it; the same command goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_specplug.utils.processes import terminate_like_interrupt

from .eagle import EagleOptions
from .learning import FROM_NOTHING, FURTHER, Learner, Outcome
from .team import join

LOCK_NAME = ".lock"
POLL_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug learn`."""
    parser.add_argument("data", metavar="DIR", help='folder that a server records to ("record": "DIR")')
    parser.add_argument("--target", metavar="DIR", required=True, help="Hugging Face folder of the target")
    parser.add_argument("--model", metavar="DRAFTER", help="drafter to start from, if HEAD is empty")
    parser.add_argument(
        "--out", required=True, metavar="HEAD", help='folder to publish versions in: the "model" of the server'
    )
    parser.add_argument(
        "--min-tokens",
        metavar="N",
        type=int,
        default=20_000,
        help="answer tokens that a round waits for; twice as many after a round that published nothing, four times "
        "after two (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=int, help="stop after this number of rounds (default: run until stopped)"
    )
    parser.add_argument(
        "--once", action="store_true", help="run one round with the answers that are there, however few, and stop"
    )
    parser.add_argument(
        "--epochs",
        metavar="N",
        type=int,
        help=f"passes over the answers of a round (default: {FURTHER.epochs}; untrained: {FROM_NOTHING.epochs})",
    )
    parser.add_argument(
        "--lr",
        metavar="LR",
        type=float,
        help=f"highest learning rate (default: {FURTHER.lr}; untrained: {FROM_NOTHING.lr})",
    )
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--nice",
        metavar="N",
        type=int,
        default=10,
        help="how much to lower the priority of the process (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """`specplug learn`.

    Raises:
        ValueError: the arguments, the drafter or the recorded answers do not fit together.
        OSError: a file could not be written.
    """
    for name in ("min_tokens", "rounds", "epochs", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    os.nice(args.nice)
    torch.set_num_threads(args.threads)
    head = Path(args.out)
    head.mkdir(parents=True, exist_ok=True)
    with _only_learner(head), join(args.device) as team, terminate_like_interrupt():
        recipes = (_changed(FURTHER, args), _changed(FROM_NOTHING, args))
        learner = Learner(
            args.target, args.data, head, _drafter(args.model), team.device, *recipes, progress=sys.stderr.isatty()
        )
        try:
            _learn(learner, 1 if args.once else args.rounds, args.min_tokens, waits=not args.once)
        except KeyboardInterrupt:
            print("Stopped. The same command goes on where it was.")
    return 0


def _learn(learner: Learner, rounds: int | None, min_tokens: int, waits: bool) -> None:
    done = 0
    min_tokens = min_tokens if waits else 1
    while rounds is None or done < rounds:
        if learner.state.plan is None and not _wait(learner, min_tokens * learner.patience, waits):
            print(f"There are no new answers in {learner.recorded}.")
            return
        if (plan := learner.plan()) is None:  # the ring has deleted the shards in the meantime
            continue
        print(f"Round {plan.number}: {len(plan.new)} new shards, {len(plan.replayed)} replayed")
        print(describe(learner.run(plan)), flush=True)
        done += 1


def describe(outcome: Outcome) -> str:
    """Describe the result of a round in one line."""
    facts = outcome.facts
    if "skipped" in facts:
        return f"Round {outcome.plan.number}: skipped, {facts['skipped']}"
    taus = ", ".join(
        f"{name} tau {facts[f'baseline_{name}_tau']:.3f} -> {facts[f'{name}_tau']:.3f} ({facts[f'{name}_difference']})"
        for name in ("chain", "tree")
    )
    verdict = f"published version {outcome.published.version}" if outcome.published else "not better, not published"
    return f"Round {outcome.plan.number}: {taus} on {facts['held_out_answers']} held-out answers: {verdict}"


def _wait(learner: Learner, min_tokens: int, waits: bool) -> bool:
    """Wait until there are enough new answer tokens; return whether there are."""
    with tqdm(total=min_tokens, desc="new answer tokens", unit="tok", disable=not (waits and learner.progress)) as bar:
        while (found := learner.waiting_tokens()) < min_tokens:
            if not waits:
                return False
            bar.n = found
            bar.refresh()
            time.sleep(POLL_SECONDS)
    return True


def _changed(recipe: EagleOptions, args: argparse.Namespace) -> EagleOptions:
    given = {name: value for name in ("epochs", "lr") if (value := getattr(args, name)) is not None}
    return replace(recipe, **given)


def _drafter(name: str | None) -> str | None:
    from vllm_specplug.config import resolve_drafter

    return None if name is None else str(resolve_drafter(name))


@contextmanager
def _only_learner(head: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process.

    Raises:
        ValueError: another process has it.
    """
    with open(head / LOCK_NAME, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another `specplug learn` publishes in {head}: give another --out, or stop it") from None
        yield
