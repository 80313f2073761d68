"""The result file of ``gpu.py``, one line of JSON per step, and the tables that follow from it."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.attention import PATHS
from vllm_specplug.utils.tables import format_table

#: ``reached``: a dry run came to the device.
STATUSES = ("passed", "reached", "failed", "skipped")

Row = dict[str, Any]


class Results:
    """Steps that were done, appended to a file as soon as each has ended.

    Args:
        path: the file; what it holds already is read.
        copy: a folder to which the file is copied after each step; None: none.

    Attributes:
        steps: by name, the newest result of each step: ``status`` (one of ``STATUSES``), ``reason``,
            ``seconds``, ``rows``.
        runs: provenance of each command that wrote to the file.
    """

    def __init__(self, path: Path, copy: Path | None = None):
        self.path, self._copy = path, copy
        self.steps: dict[str, Row] = {}
        self.runs: list[Row] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                self._take(json.loads(line))
            except json.JSONDecodeError:  # the last line of a command that was killed
                continue

    def _take(self, line: Row) -> None:
        if "step" in line:
            self.steps[line["step"]] = line
        else:
            self.runs.append(line)

    def add(self, line: Row) -> None:
        """Append a step's result, or with ``run`` a command's provenance."""
        self._take(line)
        cut = self.path.exists() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n")
        with open(self.path, "a") as file:
            file.write(("\n" if cut else "") + json.dumps(line) + "\n")
        if self._copy is not None:
            shutil.copy(self.path, self._copy)

    def is_done(self, name: str, retry: bool = False) -> bool:
        """Return whether a step need not run again: a skipped one may find now what it lacked."""
        return self.steps.get(name, {}).get("status") in (("passed",) if retry else ("passed", "failed"))

    def rows(self, start: str) -> dict[str, list[Row]]:
        """Return the rows of the steps whose names start so, by the rest of the name up to a comma."""
        found: dict[str, list[Row]] = {}
        for name, step in self.steps.items():
            if name.startswith(start):
                found.setdefault(name.removeprefix(start).partition(",")[0], []).extend(step["rows"])
        return found


def report(results: Results, plan: Iterable[str]) -> str:
    """Return all tables in Markdown, at the end what passed, what failed and what was skipped."""
    parts = [_attention(results), _choice(results), _dense_steps(results), _drafting(results), _speed(results)]
    return "\n\n".join(part for part in [*parts, summary(results, plan)] if part)


def summary(results: Results, plan: Iterable[str]) -> str:
    """Return a line for each step, and how many passed; one that was not reached is skipped."""
    absent = {"status": "skipped", "reason": "not reached", "seconds": 0}
    rows, counts = [], Counter()
    for name in plan:
        step = results.steps.get(name, absent)
        counts[step["status"]] += 1
        rows.append([name, step["status"], str(round(step["seconds"])), step.get("reason", "")[:100].replace("|", "/")])
    table = format_table(["step", "status", "s", "reason"], rows, markdown=True)
    return table + "\n\n" + ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    return format_table(heads, [[cell(value) for value in row] for row in rows], markdown=True) if rows else ""


def _attention(results: Results) -> str:
    found = results.rows("attention ")
    cells: dict[tuple[int, int, int], Row] = {}
    for path, rows in found.items():
        for row in rows:
            own = cells.setdefault((row["nodes"], row["context"], row["batch"]), {"floor": row["floor_ms"]})
            own[path] = row["ms"]
    paths = [path for path, rows in found.items() if rows]
    heads = ["nodes", "context", "batch", *(f"{path} ms" for path in paths), "memory floor ms"]
    rows = [[*key, *(own.get(path) for path in paths), own["floor"]] for key, own in cells.items()]
    return _table(heads, rows)


def choose(results: Results) -> Row:
    """Return the milliseconds of each ``tree_attention`` by nodes, context and batch, and the best one over all.

    Whole steps count where they were measured, else one layer's attention.  A path that failed somewhere, or is not the
    reference's there, cannot win: the lowest geometric mean of time relative to the best of each row does.
    """
    failed = [name for name, step in results.steps.items() if step["status"] == "failed"]
    wrong = {path for path in PATHS if any(name.split(",")[0] == f"attention {path}" for name in failed)}
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for name, rows in results.rows("speed graphs 8b eagle2 ").items():
        path = name.split()[-1]
        for row in rows if path in PATHS else ():
            if row["step_ms"]:
                times.setdefault((row["nodes"], row["context"], row["batch"]), {})[path] = row["step_ms"]
    measure = "whole steps"
    if len({path for row in times.values() for path in row}) < 2:
        measure = "one layer's attention"
        times.clear()
        for path in PATHS:
            for row in results.rows("attention ").get(path, ()):
                times.setdefault((row["nodes"], row["context"], row["batch"]), {})[path] = row["ms"]
    # Only rows that all measured paths have can be compared.
    paths = {path for row in times.values() for path in row}
    common = [row for row in times.values() if paths <= row.keys()]
    costs = {
        path: math.exp(sum(math.log(row[path] / min(row.values())) for row in common) / len(common))
        for path in PATHS
        if common and path in paths
    }
    able = {path: cost for path, cost in costs.items() if path not in wrong}
    return {
        "measure": measure,
        "rows": len(common),
        "cost_over_best": {path: round(cost, 4) for path, cost in costs.items()},
        "wrong": sorted(wrong & costs.keys()),
        "best": min(able, key=able.get) if able else None,
    }


def _choice(results: Results) -> str:
    chosen = choose(results)
    if not chosen["rows"]:
        return ""
    costs = ", ".join(f"{path} {cost:.3f}" for path, cost in chosen["cost_over_best"].items())
    return f"tree_attention, time over the best ({chosen['measure']}, {chosen['rows']} rows): {costs}"


def _dense_steps(results: Results) -> str:
    rows = results.rows("step times by rows").get("", [])
    heads = ["rows", "step ms", "weights' floor ms", "with attention ms"]
    return _table(heads, [[row["rows"], row["ms"], row["floor_ms"], row["with_attention"]["ms"]] for row in rows])


def _drafting(results: Results) -> str:
    rows = [
        [name, row["nodes"], row["batch"], row["launches"], row.get("launched_ms"), row["ms"]]
        for name, found in results.rows("drafting ").items()
        for row in found
        if "ms" in row
    ]
    return _table(["draft phase", "nodes", "batch", "launches", "launched ms", "graph ms"], rows)


def _speed(results: Results) -> str:
    names = ("batch", "context", "tokens_per_second", "tau", "step_ms", "verify_ms", "draft_ms", "idle_share")
    rows = [[name, *map(row.get, names)] for name, found in results.rows("speed ").items() for row in found]
    return _table(["engine", *(name.replace("_", " ") for name in names)], rows)
