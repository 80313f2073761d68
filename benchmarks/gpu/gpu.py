"""Checks and measures everything on a CUDA machine by one command; writes JSON with provenance.

    python benchmarks/gpu/gpu.py --output gpu.json                     # all parts
    python benchmarks/gpu/gpu.py --output gpu.json --parts steps       # one of them
    python benchmarks/gpu/gpu.py --output self.json --interpret        # self-check on a CPU: tiny sizes, no real time

Parts, in this order:

tests       ``tests/v2``, file by file: every kernel against its reference, the engine's tokens, the negative controls
identity    the engine as users start it (recorded graphs, asynchronous scheduling): greedy and seeded answers of
            eagle2, Medusa, lookup and a union against plain decoding's, tiny models in float32
attention   one layer of an 8B model, by nodes, context and batch: each ``tree_attention`` against the reference
            (deviation), vLLM's chain attention of as many tokens (time), and the time in which the memory delivers the
            context's key/value
lookup      the search of lookup, its trees, and their union with others: against the reference, and the time of a
            draft phase, launched one by one and from a recorded graph
steps       an 8B-shaped target with random weights: verification, drafting and the share of a step in which the device
            idles, for plain decoding, vLLM's chain, EAGLE trees with each ``tree_attention``, Medusa, lookup and a
            union
end_to_end  tokens/s of ``--model``, in new and in copied text: plain, lookup, with ``--drafter`` eagle2 and its union
            with lookup, with ``--heads`` Medusa
projection  speedups computed from the measured steps and published acceptance lengths (not measured)

Every step of a part runs in a process of its own (``gpu_worker.py``), and the file is written after each.  A step that
fails keeps the rows it has written.  It is reported with its reason, at once, at the end and in ``failed``; the others
run.

``tree_attention`` in the output is the table from which to choose the default (whole steps if measured, else one
layer's attention), and the fastest one: the lowest geometric mean of time relative to the best of each row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_specplug.utils.environment import first_error, provenance
from vllm_specplug.utils.tables import format_table

ROOT = Path(__file__).resolve().parents[2]

PARTS = ("tests", "identity", "attention", "lookup", "steps", "end_to_end")
#: Values of the option ``tree_attention``.
PATHS = ("triton", "flash", "xformers")
#: Methods that are measured with the first of ``PATHS`` only: attention is not their main cost.
OTHERS = ("medusa", "lookup", "union")
#: Published tau for LLaMA-2-chat 7B at T = 0, mean of three tasks, the bonus token counted (HASS paper).
PUBLISHED_TAU = {"eagle2": 4.61, "hass": 5.15}
#: The strongest published speedups on vLLM, by concurrent requests.
PUBLISHED_SPEEDUP = {1: 2.83, 8: 1.72, 64: 1.14}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--nodes", default="16,60")
    parser.add_argument("--model", help="a real target, for end_to_end")
    parser.add_argument("--drafter", help="its EAGLE head")
    parser.add_argument("--heads", help="its Medusa heads")
    parser.add_argument("--timeout", type=int, default=540, help="seconds for each process")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    return 1 if run(args) else 0


def run(args: argparse.Namespace) -> dict[str, str]:
    """Run all steps of the requested parts; return the reasons of those that failed."""
    report = Report(args.output, {"provenance": provenance("vLLM's own kernels and steps, same run")})
    report.results["interpreted"] = args.interpret
    parts = args.parts.split(",")
    contexts = [64] if args.interpret else [int(word) for word in args.contexts.split(",")]
    batches = [1, 2] if args.interpret else [int(word) for word in args.batches.split(",")]
    nodes = [6] if args.interpret else [int(word) for word in args.nodes.split(",")]
    common = {"interpret": args.interpret, "nodes": nodes, "contexts": contexts, "batches": batches}

    def step(part: str, name: str | None = None, **changes: Any) -> dict[str, Any]:
        question = {**common, "part": part, "name": name, **changes}
        return report.step(part, name, lambda: ask(question, args.timeout))

    device = step("device")
    if "error" in device:  # nothing else can run
        return report.finish()
    unavailable = device["rows"][0]["unavailable"]
    paths = [path for path in PATHS if path not in unavailable]
    if "tests" in parts:
        for file in sorted((ROOT / "tests" / "v2").glob("test_*.py")):
            report.step("tests", file.stem, lambda file=file: run_tests(file, args.timeout))
    if "identity" in parts:
        plain = step("identity", "plain").get("rows", [])
        for method in ("eagle2", *OTHERS):
            step("identity", method, plain=plain)
    if "attention" in parts:
        for path in [*paths] if args.interpret else [*paths, "chain"]:
            step("attention", path)
    if "lookup" in parts:
        for what in ("search", "trees", "union"):
            step("lookup", what)
    if "steps" in parts:
        # The other paths need CUDA; one step under the interpreter shows that the part works.
        trees = [("eagle2", path) for path in (PATHS[:1] if args.interpret else paths)]
        for method, path in [("plain", None), ("chain", None), *trees, *((method, PATHS[0]) for method in OTHERS)]:
            for count in nodes if method != "plain" else [0]:
                name = " ".join(str(word) for word in (method, path if method == "eagle2" else None, count) if word)
                step("steps", name, method=method, path=path, nodes=count)
    best = PATHS[0]
    if "attention" in parts or "steps" in parts:
        chosen = report.step("tree_attention", None, lambda: choose(report.results))
        best = chosen.get("best", best)
    if "steps" in parts:
        trees = f"eagle2 {best} {nodes[-1]}"
        report.step("projection", None, lambda: project(report.results["steps"], trees))
    if "end_to_end" in parts and args.model:
        given = {"model": args.model, "drafter": args.drafter, "heads": args.heads, "nodes": nodes[-1], "path": best}
        drafted = ["eagle2", "union"] if args.drafter else []
        for method in ["plain", "lookup", *drafted, *(["medusa"] if args.heads else [])]:
            step("end_to_end", method, method=method, **given)
    return report.finish()


class Report:
    """Results, written to disk after every step; a failed step is reported and the next ones run.

    Attributes:
        results: by part, and by step where a part has several.
    """

    def __init__(self, path: Path, results: dict[str, Any]):
        self.path, self.results = path, results
        self._failed: dict[str, str] = results.setdefault("failed", {})

    def step(self, part: str, name: str | None, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``call``; the step failed if it has ``error`` or ``problems``."""
        title, started = part if name is None else f"{part} {name}", time.perf_counter()
        try:
            found = call()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        if name is None:
            self.results[part] = found
        else:
            self.results.setdefault(part, {})[name] = found
        reasons = [*([found["error"].partition("\n")[0]] if "error" in found else []), *found.get("problems", [])]
        if reasons:
            self._failed[title] = "; ".join(reasons)
        self._save()
        seconds = time.perf_counter() - started
        print(f"{title}: {'FAILED: ' + self._failed[title] if reasons else 'ok'} ({seconds:.0f} s)", file=sys.stderr)
        return found

    def finish(self) -> dict[str, str]:
        """Print all results, the failed steps at the end; return those."""
        self._save()
        print(json.dumps(self.results, indent=1))
        if "tree_attention" in self.results:
            print(path_table(self.results["tree_attention"]))
        if self._failed:
            print("\n".join([f"{len(self._failed)} steps failed:", *(f"  {k}: {v}" for k, v in self._failed.items())]))
        return self._failed

    def _save(self) -> None:
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")


# ---- one process per step


def ask(question: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run a worker: its ``rows`` so far, what is wrong with them (``problems``) or with the worker (``error``)."""
    started = time.perf_counter()
    code, output, errors = run_process(
        [sys.executable, "-m", "benchmarks.gpu.gpu_worker", json.dumps(question)], timeout
    )
    rows = [json.loads(line.removeprefix("ROW ")) for line in output.splitlines() if line.startswith("ROW ")]
    found: dict[str, Any] = {"rows": rows, "seconds": round(time.perf_counter() - started, 1)}
    if problems := [row["problem"] for row in rows if "problem" in row]:
        found["problems"] = problems
    return found if code == 0 else {**found, "error": ending(code, timeout, errors)}


def run_tests(file: Path, timeout: float) -> dict[str, Any]:
    """Return the outcomes of a test file, also of a process that dies or hangs, up to its last test."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", str(file)]
    code, output, errors = run_process(command, timeout)
    tests = re.findall(r"^(\S+\.py::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)? *$", output, re.MULTILINE)
    found: dict[str, Any] = {"returncode": code, **Counter(outcome.lower() for _, outcome in tests if outcome)}
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    if lines:
        found["failures"] = lines[:60]
    if code == 1 and lines:
        found["problems"] = [f"{found.get('failed', 0) + found.get('error', 0)} tests failed: {lines[-1][:300]}"]
    elif code != 0:
        where = f"in {tests[-1][0]}, " if tests and not tests[-1][1] else ""
        found["error"] = where + ending(code, timeout, errors.strip() or output)
    return found


def run_process(command: list[str], timeout: float) -> tuple[int | None, str, str]:
    """Return exit code (None: out of time), output and errors; all processes that it started end with it."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=ROOT, start_new_session=True)
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, errors):
            file.seek(0)
        return code, output.read(), errors.read()


def ending(code: int | None, timeout: float, log: str) -> str:
    """Return in one line how a process ended and its first error, then its last output."""
    how = f"no end in {timeout:g} s" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    raised = first_error(log)
    return "\n".join([f"{how}: {raised}" if raised else how, *log.splitlines()[-25:]])


# ---- conclusions


def choose(results: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of each ``tree_attention`` by nodes, context and batch, and the best one over all.

    A path that failed somewhere, or is not the reference's there, cannot win.
    """
    unit, wrong = "one layer's attention", set()
    rows: dict[tuple[int, int, int], dict[str, float]] = {}

    def add(path: str, row: dict[str, Any], value: float | None) -> None:
        if value:
            rows.setdefault((row["nodes"], row["context"], row["batch"]), {})[path] = value

    for path, found in results.get("attention", {}).items():
        for row in found["rows"]:
            add(path, row, row.get("ms"))
            wrong |= {path} if "problem" in row else set()
    trees = {name.split()[1]: [] for name in results.get("steps", {}) if name.startswith("eagle2 ")}
    for name, found in results.get("steps", {}).items():
        if name.startswith("eagle2 "):
            trees[name.split()[1]] += [row for row in found.get("rows", []) if row["step_ms"]]
    if len(trees) > 1 and any(trees.values()):
        unit = "whole steps"
        rows.clear()
        for path, measured in trees.items():
            for row in measured:
                add(path, row, row["step_ms"])
    if not rows:
        return {"error": "nothing was measured"}
    best_of = {key: min(row[path] for path in PATHS if path in row) for key, row in rows.items() if set(row) & {*PATHS}}
    costs = {
        path: math.exp(sum(math.log(rows[key][path] / best) for key, best in best_of.items()) / len(best_of))
        for path in PATHS
        if best_of and all(path in row for row in rows.values())
    }
    able = {path: cost for path, cost in costs.items() if path not in wrong}
    return {
        "measure": unit,
        "table": [dict(zip(("nodes", "context", "batch"), key, strict=True), ms=row) for key, row in rows.items()],
        "cost_over_best": {path: round(cost, 4) for path, cost in costs.items()},
        "wrong": sorted(wrong & costs.keys()),
        **({"best": min(able, key=able.get)} if able else {}),
        **({"note": "interpreted: the times mean nothing"} if results["interpreted"] else {}),
    }


def path_table(chosen: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    if "table" not in chosen:
        return chosen["error"]
    columns = [path for path in (*PATHS, "chain") if any(path in row["ms"] for row in chosen["table"])]

    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row['ms'][path]:.3f}" if path in row["ms"] else "-" for path in columns]
        return [*(str(row[name]) for name in ("nodes", "context", "batch")), *times]

    heads = ["nodes", "context", "batch", *(f"{path} ms" for path in columns)]
    table = format_table(heads, [cells(row) for row in chosen["table"]], markdown=True)
    return "\n".join([table, f"{chosen['measure']}; best: {chosen.get('best', 'none')}", chosen.get("note", "")])


def project(steps: dict[str, Any], name_of_trees: str) -> dict[str, Any]:
    """Compute speedup = tau * plain step / (verification + drafting): a projection, not a measurement."""
    projected: dict[str, Any] = {
        "note": "projection from measured step costs and published tau, not a measured speedup",
        "published_on_vllm": PUBLISHED_SPEEDUP,
        "speedup": [],
    }
    before, after = (
        {(row["context"], row["batch"]): row["step_ms"] for row in steps.get(name, {}).get("rows", [])}
        for name in ("plain", name_of_trees)
    )
    for (context, batch), step_ms in after.items():
        if not step_ms or not before.get((context, batch)):  # no step was counted
            continue
        for name, tau in PUBLISHED_TAU.items():
            row = {"batch": batch, "context": context, "tau_of": name, "tau": tau}
            projected["speedup"].append({**row, "speedup": round(tau * before[context, batch] / step_ms, 2)})
    return projected


if __name__ == "__main__":
    sys.exit(main())
