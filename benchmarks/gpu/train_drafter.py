"""Trains a drafter on a GPU in commands of limited time; the same command again goes on where the last one ended.

    python -m benchmarks.gpu.train_drafter --prompts prompts.jsonl --out run --minutes 10

1. The target answers the prompts in vLLM, for ``--answer-share`` of the first command's time, or until all are
   answered.  Training data does not change afterwards.
2. ``specplug train hass`` computes the target's hidden states of these answers, and trains.  Both are kept while they
   run: hidden states in shards, the training's state every minute.

The drafter is in ``OUT/head``, with its log; ``--copy`` receives both when the training has ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from vllm_specplug.proposers.training.data import ANSWERS_NAME
from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.smollm2 import prepare

#: Seconds in which an interrupted stage writes what it has.
GRACE = 20
DONE = "answers.done"
RESULTS = ("config.json", "model.safetensors", "training_log.jsonl")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSON lines (.gz too), see docs/training.md")
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is kept")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for this command; default %(default)s")
    parser.add_argument("--answer-share", type=float, default=0.4, help="of the first command; default %(default)s")
    parser.add_argument("--target", help="Hugging Face folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cuda", help="of hidden states and training; default %(default)s")
    parser.add_argument("--copy", type=Path, help="folder for the finished drafter")
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer; default %(default)s")
    add_chat_template_kwargs(parser)
    parser.add_argument("train", nargs="*", help="further arguments of `specplug train hass`, after --")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    ends = time.monotonic() + 60 * args.minutes - GRACE
    target, data, head = args.target or str(prepare()), args.out / "data", args.out / "head"
    data.mkdir(parents=True, exist_ok=True)
    if not (args.out / DONE).exists():
        seconds = args.answer_share * (ends - time.monotonic())
        given = ["--target", target, "--prompts", *args.prompts, "--out", str(data), "--max-tokens", args.max_tokens]
        if args.chat_template_kwargs:
            given += ["--chat-template-kwargs", json.dumps(args.chat_template_kwargs)]
        code = run_for(specplug("data", *given, "--no-features"), seconds)
        answers = data / ANSWERS_NAME
        count = answers.read_bytes().count(b"\n") if answers.exists() else 0
        if code not in (0, None) or not count:
            print(f"no answers were made (exit code {code}, {count} answers)", file=sys.stderr)
            return 1
        (args.out / DONE).touch()
        print(f"answers: {count}, {'all' if code == 0 else 'then the time was over'}")
    given = ["--target", target, "--data", str(data), "--out", str(head), "--device", args.device, *args.train]
    code = run_for(specplug("train", "hass", *given), ends - time.monotonic())
    if code is None:
        print("training: the time was over; the same command goes on with it")
        return 0
    if code == 0 and args.copy is not None:
        args.copy.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            shutil.copy(head / name, args.copy)
    print(f"training: {'done, ' + str(head) if code == 0 else f'failed with exit code {code}'}")
    return code


def specplug(*words: object) -> list[str]:
    """Return the command line of a `specplug` command."""
    return [sys.executable, "-m", "vllm_specplug.cli.cli", *map(str, words)]


def run_for(command: list[str], seconds: float) -> int | None:
    """Run a command for so long at most; it is interrupted then, and may write what it has.

    Returns:
        Its exit code; None if it was interrupted.
    """
    process = subprocess.Popen(command)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(seconds, 1.0))
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


if __name__ == "__main__":
    sys.exit(main())
