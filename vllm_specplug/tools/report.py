"""``specplug report``: write the results of ``specplug bench`` as one HTML page that needs no network.

Every chart has its numbers in a table beside it.  A section without data in a run says how to measure it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vllm_specplug.tools.bench.methods import BASELINE
from vllm_specplug.tools.bench.results import origin, stage_table
from vllm_specplug.tools.draw import tree_svg
from vllm_specplug.utils.charts import bar_chart, legend, line_chart, stacked_bars
from vllm_specplug.utils.web_page import html_table, page_html, section_html


def _missing(title: str, how: str) -> str:
    return section_html(title, f"Not measured in this run: {escape(how)}.")


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def summary(report: dict[str, Any]) -> str:
    """Show the overall figures of every method."""
    headers = ["method", "tokens/s", "speedup", "speedup by repeat", "tau"]
    headers += ["first token ms", "ms per token", "same tokens"]
    rows = []
    for name, method in report["methods"].items():
        o = method["overall"]
        repeats = o.get("speedup_by_repeat") or [o["speedup"]]
        span = f"{min(repeats):.2f} to {max(repeats):.2f}" if len(repeats) > 1 else "1 repeat"
        row = [name, f"{o['tokens_per_s']:.1f}", f"{o['speedup']:.2f}", span, _number(o["tau"])]
        row += [_number(o.get("first_token_ms"), "{:.0f}"), _number(o.get("inter_token_ms"), "{:.1f}")]
        rows.append([*row, f"{o['agree']}/{o['questions']}"])
    text = "Speedup is tokens per second over those of plain decoding in the same run; tau includes the bonus token."
    return section_html("Overall", text, table=html_table(headers, rows))


def speedups(report: dict[str, Any]) -> str:
    """Show the speedup by method, then by category."""
    methods = {name: method for name, method in report["methods"].items() if name != BASELINE}
    if not methods:
        return _missing("Speedup", "give --methods at least one method besides plain")
    names = list(methods)
    overall = [method["overall"] for method in methods.values()]
    repeats = [o.get("speedup_by_repeat") or [o["speedup"]] for o in overall]
    spans = {"speedup": [(min(r), max(r)) if len(r) > 1 else None for r in repeats]}
    by_method = bar_chart("Speedup by method", names, {"speedup": [o["speedup"] for o in overall]}, "x", 1.0, spans)
    rows = [[name, f"{o['speedup']:.2f}", f"{o['speedup_median']:.2f}"] for name, o in zip(names, overall, strict=True)]
    categories = list(report["methods"][BASELINE]["categories"])
    values = {name: [m["categories"][c]["speedup"] for c in categories] for name, m in methods.items()}
    by_category = bar_chart("Speedup by category", categories, values, "x", 1.0)
    counts = report["methods"][BASELINE]["categories"]
    body = [
        [c, str(counts[c]["questions"]), *(f"{values[name][i]:.2f}" for name in names)]
        for i, c in enumerate(categories)
    ]
    return section_html(
        "Speedup by method",
        "The dashed line is plain decoding; whiskers show the range over the repeats.",
        by_method,
        html_table(["method", "speedup", "median over batches"], rows),
    ) + section_html(
        "Speedup by category",
        "With few questions per category the figures are rough.",
        legend(names) + by_category,
        html_table(["category", "questions", *names], body),
        wide=True,
    )


def tau(report: dict[str, Any]) -> str:
    """Show tokens per step by method."""
    found = {name: m["overall"]["tau"] for name, m in report["methods"].items() if m["overall"]["tau"]}
    if not found:
        return _missing("Tokens per step (tau)", "no method drafted anything")
    chart = bar_chart("Tokens per step by method", list(found), {"tau": list(found.values())}, reference=1.0)
    rows = [[name, f"{value:.2f}"] for name, value in found.items()]
    text = "Tokens per step of the target, the bonus token included; the dashed line is plain decoding."
    return section_html("Tokens per step (tau)", text, chart, html_table(["method", "tau"], rows))


def acceptance(report: dict[str, Any]) -> str:
    """Show the share of the drafts that are accepted to each depth."""
    found = {n: m["overall"].get("acceptance_by_depth") for n, m in report["methods"].items()}
    found = {name: shares for name, shares in found.items() if shares}
    if not found:
        return _missing("Acceptance by depth", "the server reported no counters by position")
    series = {name: list(enumerate(shares, start=1)) for name, shares in found.items()}
    chart = legend(list(series)) + line_chart("Acceptance by depth", series, "depth", "share of drafts")
    depths = max(map(len, found.values()))
    rows = [[str(d + 1), *(_number(s[d] if d < len(s) else None) for s in found.values())] for d in range(depths)]
    text = "The share of drafts of which at least this number of tokens in a row was accepted."
    return section_html("Acceptance by depth", text, chart, html_table(["depth", *found], rows))


def calibration(report: dict[str, Any]) -> str:
    """Compare the drafter's predicted acceptance with the measured acceptance."""
    found = {n: m["calibration"] for n, m in report["methods"].items() if m.get("calibration", {}).get("bins")}
    if not found:
        return _missing("Calibration", "specplug bench --look-inside with a tree method")
    series = {name: [(b["predicted"], b["accepted"]) for b in c["bins"]] for name, c in found.items()}
    chart = line_chart("Predicted against measured acceptance", series, "predicted", "accepted", diagonal=True)
    rows = [
        [name, str(b["outcomes"]), _number(b["predicted"]), _number(b["accepted"])]
        for name, c in found.items()
        for b in c["bins"]
    ]
    errors = ", ".join(f"{escape(name)} {c['error']:.3f}" for name, c in found.items())
    text = f"A node's prediction is the product of confidences along its path. Expected calibration error: {errors}."
    table = html_table(["method", "nodes", "predicted", "accepted"], rows)
    return section_html("Calibration", text, legend(list(series)) + chart, table)


def step_cost(report: dict[str, Any]) -> str:
    """Show the time of a step by verified nodes, and over the time that reading the weights takes."""
    cost = report.get("step_cost")
    if not cost:
        return _missing("Cost of a step", "specplug bench --look-inside with the method eagle2 or hass")
    floor = cost["weight_bytes"] / cost["read_gb_s"] / 1e6
    points = [(s["nodes"], s["step_ms"]) for s in cost["steps"]]
    title = "Milliseconds per step by verified nodes"
    chart = line_chart(title, {"step": points}, "nodes", "ms", reference=floor, log_x=True)
    rows = [[str(n), f"{ms:.2f}", f"{ms / floor:.2f}"] for n, ms in points]
    text = (
        f"The dashed line is the floor: reading {cost['weight_bytes'] / 1e6:.0f} MB of weights once at "
        f"{cost['read_gb_s']:.1f} GB/s, measured in the same process ({cost['threads']} threads), takes {floor:.2f} ms."
    )
    return section_html("Cost of a step", text, chart, html_table(["nodes", "ms", "times the floor"], rows))


def stages(report: dict[str, Any]) -> str:
    """Show the stages of a decode step."""
    found = {name: m["stages"] for name, m in report["methods"].items() if m.get("stages")}
    if not found:
        return _missing("Time of a step by stage", "specplug bench --look-inside")
    parts = {"verify": "verify_ms", "draft forward": "draft_forward_ms"}
    parts |= {"draft, other": "draft_other_ms", "other": "host_ms"}
    rows = {name: {part: max(s[key], 0.0) for part, key in parts.items()} for name, s in found.items()}
    chart = legend(list(parts)) + stacked_bars("Milliseconds of a decode step by stage", rows)
    text = (
        "Batch 1, the engine in one process, with as many threads as when it serves (its overhead differs a little "
        "from the runs above). Verify is the target's forward with its logits; other is everything that is neither "
        "drafting nor verifying."
    )
    return section_html("Time of a step by stage", text, chart, html_table(*stage_table(found)))


def concurrency(report: dict[str, Any]) -> str:
    """Show the speedup by concurrent questions."""
    levels = list(report["methods"][BASELINE].get("concurrency", {}))
    if len(levels) < 2:
        return _missing("Speedup by concurrency", "specplug bench --concurrency 1,4,8,16,32")
    found = {n: m["concurrency"] for n, m in report["methods"].items() if n != BASELINE}
    series = {name: [(int(c), m[c]["speedup"]) for c in levels] for name, m in found.items()}
    chart = line_chart(
        "Speedup by concurrency", series, "concurrent questions", "speedup", "x", 1.0, log_x=True, from_zero=False
    )
    base = report["methods"][BASELINE]["concurrency"]
    rows = [[c, f"{base[c]['tokens_per_s']:.1f}", *(f"{m[c]['speedup']:.2f}" for m in found.values())] for c in levels]
    text = "The dashed line is plain decoding at the same concurrency. Below it, speculation is slower."
    table = html_table(["concurrency", "plain tokens/s", *found], rows)
    return section_html("Speedup by concurrency", text, legend(list(series)) + chart, table)


def trees(report: dict[str, Any]) -> str:
    """Draw some drafted trees; heavy lines mark the accepted paths."""
    found = {name: m["trees"] for name, m in report["methods"].items() if m.get("trees")}
    if not found:
        return _missing("Trees", "specplug bench --look-inside with a tree method")
    parts = []
    for name, drawn in found.items():
        for number, tree in enumerate(drawn, start=1):
            values = tree.get("log_values")
            values = [math.nan, *map(math.exp, values)] if values else None
            svg = tree_svg(tree["parents"], tree["tokens"], set(tree["accepted_rows"]), values)
            path = "".join(tree["tokens"][row] for row in tree["accepted_rows"])
            caption = f"{escape(name)}, tree {number}: {len(tree['tokens']) - 1} nodes; accepted: “{escape(path)}”"
            parts.append(f"<figure>{svg}<figcaption>{caption}</figcaption></figure>")
    text = "At even distances over a run; the numbers are predicted acceptance. The first column is the root token."
    return section_html("Trees", text, table=sources(report)) + "".join(parts)


def sources(report: dict[str, Any]) -> str:
    """Return a table of the nodes of each source of merged drafts; empty if no method merges drafts."""
    rows = [
        [method, name, *(str(share[key]) for key in ("drafted", "accepted", "alone"))]
        for method, found in report["methods"].items()
        for name, share in found.get("sources", {}).items()
    ]
    return html_table(["method", "source", "verified", "accepted", "accepted, from it alone"], rows) if rows else ""


def reproductions(tables: Sequence[dict[str, Any]]) -> str:
    """Show the claims of the papers beside the measurements."""
    if not tables:
        return _missing(
            "Reproductions",
            "give files of benchmarks/papers/reproduce_*.py (some are in benchmarks/results) to specplug report too",
        )
    parts = []
    for table in tables:
        text = f"{escape(table['source'])} claims: {escape(table['claim'])} Here: {escape(table['verdict'])}"
        rows = [[str(cell) for cell in row] for row in table["rows"]]
        parts.append(
            section_html(table["title"], text, table=html_table(table["headers"], rows, table.get("note", "")))
        )
    return "".join(parts)


Section = Callable[[dict[str, Any]], str]
SECTIONS: tuple[Section, ...] = (summary, speedups, concurrency, tau, acceptance, calibration, step_cost, stages, trees)


def others(files: dict[str, Any]) -> str:
    """Show further result files, each as a table of its values."""
    parts = []
    for name, content in files.items():
        rows = [[key, str(value)] for key, value in _values(content)]
        parts.append(section_html(name, "All values of this file.", table=html_table(["value", ""], rows)))
    return "".join(parts)


def _values(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON with their paths; lists of plain values stay whole."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
        for index, item in enumerate(content):
            yield from _values(item, f"{path}[{index}]")
    else:
        yield path, content


@dataclass(frozen=True)
class Results:
    """What files of results contain.

    Attributes:
        benchmarks: JSON of ``specplug bench``.
        reproductions: each with ``title``, ``source``, ``claim``, ``verdict``, ``headers`` and ``rows``.
        others: any other results, by file name.
    """

    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    reproductions: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


def build_page(results: Results) -> str:
    """Return the whole page."""
    titles, origins, body = [], [], ""
    for report in results.benchmarks:
        titles.append(f"{report['settings']['model']}, {report['provenance']['date'][:10]}")
        origins.append(origin(report))
        body += "".join(section(report) for section in SECTIONS)
    title = "specplug bench: " + "; ".join(titles) if titles else "specplug results"
    if results.reproductions or results.benchmarks:
        body += reproductions(results.reproductions)
    return page_html(title, " ".join(origins), body + others(results.others))


def read_results(paths: Sequence[Path]) -> Results:
    """Read files of ``specplug bench``, of the reproductions and of other benchmarks.

    Raises:
        ValueError: a file cannot be read, or is not a JSON object.
    """
    results = Results()
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} has no results: give a JSON object, for example from specplug bench --out")
        if "methods" in content and "settings" in content:
            results.benchmarks.append(content)
        elif "reproductions" in content:
            results.reproductions.extend(content["reproductions"])
        else:
            results.others[path.name] = content
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug report``."""
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="result files of `specplug bench` or of a script in benchmarks/",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="HTML", help="page to write (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Run ``specplug report``: write the page and print its path."""
    args.out.write_text(build_page(read_results(args.results)), encoding="utf-8")
    print(args.out)
