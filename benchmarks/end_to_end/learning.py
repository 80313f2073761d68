"""Measures a drafter that learns from a stream of requests against the same drafter left as it is, and plain decoding.

    python benchmarks/end_to_end/unseen_prompts.py spanish 384 > spanish.jsonl
    python benchmarks/end_to_end/learning.py --prompts spanish.jsonl --out learning_spanish.json [--from-nothing]

SmolLM2-135M-Instruct at batch 1. Several files are served one after the other (`--requests` counts those of each): so
one sees what a drafter keeps of a kind of text when the next comes. Every method has its own engine; they take turns,
block by block, on the same requests. The learning engine records and reloads; `specplug learn` runs beside it and is
halted (SIGSTOP) while the others answer, so that it takes time from the learning engine alone. Plain decoding and
lookup, and with `--from-nothing` the static drafter, answer one block in `--others-every`. The learning drafter's
texts are compared with plain decoding's, and in the other blocks with the static drafter's. Prompts are repeated if
they are too few, but each time with another number in front. The CPU share of the trainer is its processor time over
the learning engine's time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specplug.bench.methods import METHODS, Method
from vllm_specplug.bench.questions import Question, read_questions
from vllm_specplug.bench.workers import Measurement, started
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.published import publish, read_current
from vllm_specplug.utils.smollm2 import prepare

PLAIN, STATIC, LEARNING, LOOKUP = "plain", "static", "learning", "lookup"
WARM_UPS = 3
CLI = (sys.executable, "-m", "vllm_specplug.cli.cli")


def stream_of(questions: list[Question], requests: int) -> list[Question]:
    """Return so many requests; repeated questions get a number, so that no text comes twice."""
    rounds = [
        replace(question, text=question.text if turn == 0 else f"{turn}. {question.text}")
        for turn in range(-(-requests // len(questions)))
        for question in questions
    ]
    return rounds[:requests]


class Trainer:
    """`specplug learn` as a child process, which is halted unless it is its turn."""

    def __init__(self, command: list[str], log: Path):
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.halt()

    def halt(self) -> None:
        self._check()
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._check()
        self._process.send_signal(signal.SIGCONT)

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"specplug learn has ended with code {self._process.returncode}: see its log")

    def processor_seconds(self) -> float:
        """Return the processor time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(60)


@contextmanager
def trainer_beside(ring: Path, head: Path, arguments: list[str], log: Path) -> Iterator[Trainer]:
    """Run the trainer during the block; the ring has to exist."""
    trainer = Trainer([*CLI, "learn", str(ring), "--target", str(prepare()), "--out", str(head), *arguments], log)
    try:
        yield trainer
    finally:
        trainer.stop()


def make_head(head: Path, from_nothing: bool) -> str:
    """Publish the drafter to start from; return its folder."""
    if from_nothing:
        command = [
            sys.executable,
            "-m",
            "vllm_specplug.cli.cli",
            "drafter",
            "new",
            str(prepare()),
            "--out",
            str(head),
        ]
        subprocess.run(command, check=True)
    else:
        from vllm_specplug.config import resolve_drafter
        from vllm_specplug.proposers.training.learning import copy_checkpoint

        shipped = resolve_drafter("smollm2-135m-instruct")
        publish(head, lambda folder: copy_checkpoint(shipped, folder), {})
    return str(read_current(head).folder)


def run(stream: list[Question], args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the blocks of all methods; return them with the versions that were current and the trainer's cost."""
    head, ring = scratch / "head", scratch / "ring"
    start = make_head(head, args.from_nothing)
    eagle = METHODS["eagle2"] | json.loads(args.method_config)
    reload = json.loads(args.reload_config)
    methods = [
        Method(PLAIN, None),
        Method(LOOKUP, METHODS["lookup"]),
        Method(STATIC, eagle | {"model": "smollm2-135m-instruct" if args.from_nothing else start}),
        Method(LEARNING, eagle | reload | {"model": str(head), "record": str(ring)}),
    ]
    if not args.others_every:
        methods = [method for method in methods if method.label in (STATIC, LEARNING)]
    engine = {"model": str(prepare()), "dtype": args.dtype, "max_model_len": 2048, "max_num_seqs": 8}
    engine |= {"enable_prefix_caching": False, "disable_log_stats": False}
    blocks: dict[str, list[Measurement | None]] = {method.label: [] for method in methods}
    versions, cost = [], []
    others = (PLAIN, LOOKUP, STATIC) if args.from_nothing else (PLAIN, LOOKUP)
    arguments = ["--min-tokens", str(args.min_tokens), "--threads", str(args.threads)]
    with started(methods, engine, args.kv_gib) as workers:
        for worker in workers:
            worker.generate([replace(question, text=f"Hi. {question.text}") for question in stream[:WARM_UPS]], 8)
        with trainer_beside(ring, head, arguments, args.out.with_suffix(".log")) as trainer:
            for first in range(0, len(stream), args.block):
                block = stream[first : first + args.block]
                number = first // args.block
                turn = number % len(workers)
                for worker in workers[turn:] + workers[:turn]:
                    if worker.method.label in others and number % (args.others_every or 1):
                        blocks[worker.method.label].append(None)
                        continue
                    if worker.method.label == LEARNING:
                        trainer.go_on()
                    blocks[worker.method.label].append(worker.generate(block, args.max_tokens, at_once=1))
                    if worker.method.label == LEARNING:
                        trainer.halt()
                versions.append(read_current(head).version)
                cost.append(trainer.processor_seconds())
                done = f"{first + len(block)} of {len(stream)}"
                print(f"{done}: {line(blocks, versions[-1])}", file=sys.stderr, flush=True)
        for worker in workers:
            worker.close()
    history = head / "learn.jsonl"
    rounds = [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []
    return {"blocks": blocks, "versions": versions, "trainer_seconds": cost, "rounds": rounds}


def line(blocks: dict[str, list[Measurement | None]], version: int) -> str:
    """Return the newest block in words."""
    newest = [(label, found[-1]) for label, found in blocks.items() if found[-1] is not None]
    parts = (f"{label} tau {tau([one]):.2f}, {one.rate:.1f} tokens/s" for label, one in newest)
    return "; ".join([f"version {version}", *parts])


def part(found: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Return tau and tokens/s in the first and in the last quarter of some blocks, and learning over static."""
    quarter = max((last - first) // 4, 1)
    result = {}
    for name, blocks in (
        ("first_quarter", slice(first, first + quarter)),
        ("last_quarter", slice(last - quarter, last)),
    ):
        methods = {}
        for label, measured in found["blocks"].items():
            if known := [one for one in measured[blocks] if one is not None]:
                methods[label] = {"tau": round(tau(known), 4), "tokens_per_s": round(rate(known), 2)}
        if STATIC in methods:
            ratio = methods[LEARNING]["tau"] / methods[STATIC]["tau"]
            methods["tau_of_learning_over_static"] = round(ratio, 4)
        result[name] = methods
    return result


def parts(found: dict[str, Any], files: list[Path], requests: list[int], block: int) -> list[dict[str, Any]]:
    """Return the measurements of each file's requests."""
    ends = [sum(requests[: number + 1]) // block for number in range(len(files))]
    pairs = zip(files, requests, [0, *ends], ends, strict=False)
    return [{"prompts": file.name, "requests": count, **part(found, first, last)} for file, count, first, last in pairs]


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return by method: tau and tokens/s of each block, and of the last quarter; what learning cost; same texts."""
    blocks, result = found["blocks"], {}
    plain = blocks.get(PLAIN, [None] * len(blocks[LEARNING]))
    for label, measured in blocks.items():
        last = [one for one in measured[-max(len(measured) // 4, 1) :] if one is not None]
        expected = plain
        if label == LEARNING:
            expected = [one or static for one, static in zip(plain, blocks[STATIC], strict=True)]
        pairs = [(a, b) for a, b in zip(measured, expected, strict=True) if a is not None and b is not None]
        result[label] = {
            "tau": [one and round(tau([one]), 4) for one in measured],
            "tokens_per_s": [one and round(one.rate, 2) for one in measured],
            "last_quarter": last and {"tau": round(tau(last), 4), "tokens_per_s": round(rate(last), 2)},
            "same_texts": sum(
                a == b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True)
            ),
            "texts": sum(len(one.token_ids) for one, _ in pairs),
        }
    ends = {label: method["last_quarter"] for label, method in result.items()}
    overtaken = {
        f"block_that_overtakes_{label}_by_{factor}": overtakes(result[LEARNING], result[label], factor)
        for label, factor in ((LOOKUP, 1.0), (PLAIN, 1.2))
        if label in result
    }
    return {
        "methods": result,
        "requests": sum(len(one.token_ids) for one in blocks[LEARNING]),
        "versions": found["versions"],
        "rounds": found["rounds"],
        "trainer_share": round(found["trainer_seconds"][-1] / sum(one.seconds for one in blocks[LEARNING]), 4),
        "tau_of_learning_over_static": round(ends[LEARNING]["tau"] / ends[STATIC]["tau"], 4),
        "speed_of_learning_over_static": round(ends[LEARNING]["tokens_per_s"] / ends[STATIC]["tokens_per_s"], 4),
        **overtaken,
    }


def tau(measured: list[Measurement]) -> float:
    """Return the tokens per verification and request, the bonus token counted; 1 without drafts."""
    drafts = sum(one.drafts for one in measured)
    return 1 + sum(one.accepted for one in measured) / drafts if drafts else 1.0


def rate(measured: list[Measurement]) -> float:
    """Return tokens per second."""
    return sum(one.tokens for one in measured) / sum(one.seconds for one in measured)


def overtakes(one: dict[str, Any], other: dict[str, Any], factor: float) -> int | None:
    """Return the first block (from 0) from which on `one` is always faster by `factor`; None if there is none."""
    pairs = enumerate(zip(one["tokens_per_s"], other["tokens_per_s"], strict=True))
    faster = [(number, a > factor * b) for number, (a, b) in pairs if b is not None]
    first = None
    for number, is_faster in faster:
        first = (number if first is None else first) if is_faster else None
    return first


def plot(result: dict[str, Any], block: int, file: Path) -> None:
    """Draw tau and tokens per second over the stream, with the published versions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, key, name in zip(figure.subplots(1, 2), ("tau", "tokens_per_s"), ("tau", "tokens/s"), strict=True):
        for label, method in result["methods"].items():
            known = [(block * (number + 1), value) for number, value in enumerate(method[key]) if value is not None]
            axes.plot(*zip(*known, strict=True), ".-", linewidth=2.5 if label == LEARNING else 1.0, label=label)
        for number, (before, after) in enumerate(zip(result["versions"], result["versions"][1:], strict=False)):
            if after != before:
                axes.axvline(block * (number + 2), color="grey", linewidth=0.6)
        axes.set(xlabel="requests (a grey line: a version was published)", ylabel=name, ylim=(0, None))
        axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_figure(str(file), dpi=120)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path, nargs="+", help="JSON lines with one prompt each")
    parser.add_argument("--out", required=True, type=Path, help="JSON; a picture and a log are written beside it")
    parser.add_argument("--from-nothing", action="store_true", help="the learning drafter starts untrained")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[600], help="of each file of prompts; whole blocks (--block)"
    )
    parser.add_argument("--block", type=int, default=20, help="requests of a turn")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument(
        "--others-every", type=int, default=1, help="blocks from one to the next of plain and lookup; 0: neither runs"
    )
    parser.add_argument("--min-tokens", type=int, default=10_000, help="of `specplug learn`")
    parser.add_argument("--threads", type=int, default=1, help="of `specplug learn`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-gib", type=int, default=1)
    parser.add_argument("--method-config", default='{"budget": "measured"}', help="options of both eagle2 engines")
    parser.add_argument("--reload-config", default='{"reload": true}', help="options of the learning engine")
    args = parser.parse_args(argv)
    if len(args.requests) != len(args.prompts) or any(count % args.block for count in args.requests):
        parser.error(f"--requests needs one multiple of {args.block} (--block) for each file of prompts")
    return args


def main() -> None:
    """Run the stream, write JSON and a picture."""
    args = parse_arguments()
    streams = zip(args.prompts, args.requests, strict=True)
    stream = [question for file, count in streams for question in stream_of(read_questions(file), count)]
    with tempfile.TemporaryDirectory(prefix="specplug-learning-") as scratch:
        found = run(stream, args, Path(scratch))
    result = {**summary(found), "parts": parts(found, args.prompts, args.requests, args.block)}
    others = "plain decoding, lookup and the static drafter" if args.others_every else "the static drafter"
    about = provenance(f"the same requests with {others}, in turns")
    args.out.write_text(json.dumps({"provenance": about, **result}, indent=1) + "\n")
    plot(result, args.block, args.out.with_suffix(".png"))
    print(json.dumps({key: value for key, value in result.items() if key not in ("methods", "rounds")}, indent=1))


if __name__ == "__main__":
    main()
