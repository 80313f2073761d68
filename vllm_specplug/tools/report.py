"""``specplug report``: what ``specplug bench`` measured, as one HTML page that needs no network.

Every chart has its numbers as a table beside it.  A section whose data a run has not measured says how to get it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vllm_specplug.tools.bench.methods import BASELINE
from vllm_specplug.tools.bench.results import origin, stage_table
from vllm_specplug.tools.draw import tree_svg
from vllm_specplug.utils.charts import bar_chart, legend, line_chart, stacked_bars

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1b1b1b;--soft:#595959;--line:#d5d5d5;--tree-text:#555;
--tree-edge:#aaa;
--tree-accepted:#0a7d33;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a3478f;
--c4:#b58900;--c5:#3fa0d8;--c6:#7a5230;--c7:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--ground:#15181c;--text:#e8e8e8;--soft:#a9b0b8;--line:#3a4048;
--tree-text:#b9c0c7;
--tree-edge:#5a626b;--tree-accepted:#4fd07f;--c0:#5fb3e8;--c1:#ff9054;--c2:#3fd0a4;--c3:#dd8fcb;--c4:#e3c04a;
--c5:#a9dcf7;
--c6:#c89b72;--c7:#a8a8a8}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:1180px;margin:0 auto;
padding:1rem}
h1{font-size:1.7rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.2rem 0 .3rem;border-top:1px solid var(--line);
padding-top:1rem}
p,li{color:var(--soft);max-width:75ch}.side{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start}
.side>figure{flex:1 1 480px;margin:0;min-width:0}.side>div{flex:1 1 300px;overflow-x:auto}
figure{margin:0 0 1rem;overflow-x:auto}figcaption{color:var(--soft);font-size:.9rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft)}th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);
text-align:right}
th:first-child,td:first-child{text-align:left}td.text{text-align:left}
svg.chart{width:100%;height:auto}svg.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg.chart text.axis{font-size:12px}.grid{stroke:var(--line);fill:none}.reference{stroke:var(--text);
stroke-dasharray:5 4;fill:none}
.whisker{stroke:var(--text);fill:none;stroke-width:1.5}svg.tree{max-width:none}
.legend{list-style:none;padding:0;margin:.2rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
""" + "".join(
    f".s{i}{{fill:var(--c{i});background:var(--c{i})}}path.line.s{i}{{fill:none;background:none;stroke:var(--c{i});"
    f"stroke-width:2;{'' if i % 2 == 0 else 'stroke-dasharray:7 3'}}}"
    for i in range(8)
)


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table with header cells that say what they head; the first column heads its row."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in headers)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td{_is_text(cell)}>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_text(cell: str) -> str:
    return "" if cell[:1] in "0123456789.-+" else ' class="text"'


def section_html(title: str, text: str, chart: str = "", table: str = "", wide: bool = False) -> str:
    """A titled section: ``text`` (HTML), a chart, a table beside it."""
    sides = (f"<figure>{chart}</figure>" if chart else "") + (f"<div>{table}</div>" if table else "")
    return (
        f'<section><h2>{escape(title)}</h2><p>{text}</p><div class="{"" if wide else "side"}">{sides}</div></section>'
    )


def _missing(title: str, how: str) -> str:
    return section_html(title, f"Not measured in this run: {escape(how)}.")


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def summary(report: dict[str, Any]) -> str:
    """The overall figures of every method."""
    headers = [
        "method",
        "tokens/s",
        "speedup",
        "speedup by repeat",
        "tau",
        "first token ms",
        "ms per token",
        "same tokens",
    ]
    rows = []
    for name, method in report["methods"].items():
        o = method["overall"]
        repeats = o.get("speedup_by_repeat") or [o["speedup"]]
        rows.append(
            [
                name,
                f"{o['tokens_per_s']:.1f}",
                f"{o['speedup']:.2f}",
                f"{min(repeats):.2f} to {max(repeats):.2f}" if len(repeats) > 1 else "1 repeat",
                _number(o["tau"]),
                _number(o.get("first_token_ms"), "{:.0f}"),
                _number(o.get("inter_token_ms"), "{:.1f}"),
                f"{o['agree']}/{o['questions']}",
            ]
        )
    text = "Speedup is tokens per second over plain decoding's in the same run; tau counts the bonus token."
    return section_html("Overall", text, table=html_table(headers, rows))


def speedups(report: dict[str, Any]) -> str:
    """Speedup by method, then by category."""
    methods = {name: method for name, method in report["methods"].items() if name != BASELINE}
    if not methods:
        return _missing("Speedup", "give --methods more than plain")
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
        "The dashed line is plain decoding; whiskers span the repeats.",
        by_method,
        html_table(["method", "speedup", "median over batches"], rows),
    ) + section_html(
        "Speedup by category",
        "Few questions per category make a rough figure.",
        legend(names) + by_category,
        html_table(["category", "questions", *names], body),
        wide=True,
    )


def tau(report: dict[str, Any]) -> str:
    """Tokens per step by method."""
    found = {name: m["overall"]["tau"] for name, m in report["methods"].items() if m["overall"]["tau"]}
    if not found:
        return _missing("Tokens per step (tau)", "no method drafted anything")
    chart = bar_chart("Tokens per step by method", list(found), {"tau": list(found.values())}, reference=1.0)
    rows = [[name, f"{value:.2f}"] for name, value in found.items()]
    text = "Tokens emitted per step of the target, the bonus token included; the dashed line is plain decoding."
    return section_html("Tokens per step (tau)", text, chart, html_table(["method", "tau"], rows))


def acceptance(report: dict[str, Any]) -> str:
    """Share of the drafts that are accepted to each depth."""
    found = {n: m["overall"].get("acceptance_by_depth") for n, m in report["methods"].items()}
    found = {name: shares for name, shares in found.items() if shares}
    if not found:
        return _missing("Acceptance by depth", "the server gave no counters by position")
    series = {name: list(enumerate(shares, start=1)) for name, shares in found.items()}
    chart = legend(list(series)) + line_chart("Acceptance by depth", series, "depth", "share of drafts")
    depths = max(map(len, found.values()))
    rows = [[str(d + 1), *(_number(s[d] if d < len(s) else None) for s in found.values())] for d in range(depths)]
    text = "Of all drafts, the share of which at least so many tokens in a row were accepted."
    return section_html("Acceptance by depth", text, chart, html_table(["depth", *found], rows))


def calibration(report: dict[str, Any]) -> str:
    """What the drafter believed against what was accepted."""
    found = {n: m["calibration"] for n, m in report["methods"].items() if m.get("calibration", {}).get("bins")}
    if not found:
        return _missing("Calibration", "specplug bench --look-inside, with a tree method")
    series = {name: [(b["predicted"], b["accepted"]) for b in c["bins"]] for name, c in found.items()}
    chart = line_chart("Draft confidence against acceptance", series, "believed", "accepted", diagonal=True)
    rows = [
        [name, str(b["outcomes"]), _number(b["predicted"]), _number(b["accepted"])]
        for name, c in found.items()
        for b in c["bins"]
    ]
    errors = ", ".join(f"{escape(name)} {c['error']:.3f}" for name, c in found.items())
    text = f"A node's value is the product of confidences along its path. Expected calibration error: {errors}."
    table = html_table(["method", "nodes", "believed", "accepted"], rows)
    return section_html("Calibration", text, legend(list(series)) + chart, table)


def step_cost(report: dict[str, Any]) -> str:
    """A step's time against the nodes that it verifies, over the time that reading the weights takes."""
    cost = report.get("step_cost")
    if not cost:
        return _missing("Cost of a step", "specplug bench --look-inside, with the method eagle2 or hass")
    floor = cost["weight_bytes"] / cost["read_gb_s"] / 1e6
    points = [(s["nodes"], s["step_ms"]) for s in cost["steps"]]
    title = "Milliseconds of a step by verified nodes"
    chart = line_chart(title, {"step": points}, "nodes", "ms", reference=floor, log_x=True)
    rows = [[str(n), f"{ms:.2f}", f"{ms / floor:.2f}"] for n, ms in points]
    text = (
        f"The dashed line is the floor: reading {cost['weight_bytes'] / 1e6:.0f} MB of weights once at "
        f"{cost['read_gb_s']:.1f} GB/s, measured in the same process ({cost['threads']} threads), takes {floor:.2f} ms."
    )
    return section_html("Cost of a step", text, chart, html_table(["nodes", "ms", "times the floor"], rows))


def stages(report: dict[str, Any]) -> str:
    """What a decode round is made of."""
    found = {name: m["stages"] for name, m in report["methods"].items() if m.get("stages")}
    if not found:
        return _missing("Where a round goes", "specplug bench --look-inside")
    parts = {
        "verify": "verify_ms",
        "draft forward": "draft_forward_ms",
        "draft, other": "draft_other_ms",
        "host": "host_ms",
    }
    rows = {name: {part: max(s[key], 0.0) for part, key in parts.items()} for name, s in found.items()}
    chart = legend(list(parts)) + stacked_bars("Milliseconds of a decode round by stage", rows)
    text = (
        "Batch 1, the engine in one process, with as many threads as when it serves (its overhead differs a little "
        "from the runs above). Verify is the target's forward with its logits; host is everything that is neither "
        "drafting nor verifying."
    )
    return section_html("Where a round goes", text, chart, html_table(*stage_table(found)))


def concurrency(report: dict[str, Any]) -> str:
    """Speedup by questions at once."""
    levels = list(report["methods"][BASELINE].get("concurrency", {}))
    if len(levels) < 2:
        return _missing("Speedup by concurrency", "specplug bench --concurrency 1,4,8,16,32")
    found = {n: m["concurrency"] for n, m in report["methods"].items() if n != BASELINE}
    series = {name: [(int(c), m[c]["speedup"]) for c in levels] for name, m in found.items()}
    chart = line_chart(
        "Speedup by concurrency", series, "questions at once", "speedup", "x", 1.0, log_x=True, from_zero=False
    )
    base = report["methods"][BASELINE]["concurrency"]
    rows = [[c, f"{base[c]['tokens_per_s']:.1f}", *(f"{m[c]['speedup']:.2f}" for m in found.values())] for c in levels]
    text = "The dashed line is plain decoding at the same concurrency. Below it, speculation costs more than it gains."
    table = html_table(["at once", "plain tokens/s", *found], rows)
    return section_html("Speedup by concurrency", text, legend(list(series)) + chart, table)


def trees(report: dict[str, Any]) -> str:
    """Drafted trees, the accepted paths heavy."""
    found = {name: m["trees"] for name, m in report["methods"].items() if m.get("trees")}
    if not found:
        return _missing("Trees", "specplug bench --look-inside, with a tree method")
    parts = []
    for name, drawn in found.items():
        for number, tree in enumerate(drawn, start=1):
            values = tree.get("log_values")
            values = [math.nan, *map(math.exp, values)] if values else None
            svg = tree_svg(tree["parents"], tree["tokens"], set(tree["accepted_rows"]), values)
            path = "".join(tree["tokens"][row] for row in tree["accepted_rows"])
            caption = f"{escape(name)}, tree {number}: {len(tree['tokens']) - 1} nodes; accepted: “{escape(path)}”"
            parts.append(f"<figure>{svg}<figcaption>{caption}</figcaption></figure>")
    text = "Evenly spaced over a run; the numbers are the drafter's belief. The first column is the last emitted token."
    return section_html("Trees", text, table=sources(report)) + "".join(parts)


def sources(report: dict[str, Any]) -> str:
    """What each proposer of merged drafts has earned, as a table; nothing where drafts are not merged."""
    rows = [
        [method, name, *(str(share[key]) for key in ("drafted", "accepted", "alone"))]
        for method, found in report["methods"].items()
        for name, share in found.get("sources", {}).items()
    ]
    return html_table(["method", "source", "verified", "accepted", "accepted, its own only"], rows) if rows else ""


def reproductions(tables: Sequence[dict[str, Any]]) -> str:
    """Claims of the papers beside what was measured here."""
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


SECTIONS: tuple[Callable[[dict[str, Any]], str], ...] = (
    summary,
    speedups,
    concurrency,
    tau,
    acceptance,
    calibration,
    step_cost,
    stages,
    trees,
)


def build_page(report: dict[str, Any], tables: Sequence[dict[str, Any]] = ()) -> str:
    """The whole page.

    Args:
        report: the JSON of ``specplug bench``.
        tables: reproductions: ``title``, ``source``, ``claim``, ``verdict``, ``headers``, ``rows`` each.
    """
    s = report["settings"]
    title = f"specplug bench: {s['model']}, {report['provenance']['date'][:10]}"
    body = "".join(section(report) for section in SECTIONS) + reproductions(tables)
    return page_html(title, origin(report), body)


def page_html(title: str, intro: str, body: str) -> str:
    """A page of sections, in the style of all reports; ``body`` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"<p>{escape(intro)}</p>{body}</main></body></html>\n"
    )


def read_results(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One file of ``specplug bench`` and any number of reproductions.

    Raises:
        ValueError: a file is neither, or the benchmark's is missing or there twice.
    """
    reports, tables = [], []
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if isinstance(content, dict) and "methods" in content and "settings" in content:
            reports.append(content)
        elif isinstance(content, dict) and "reproductions" in content:
            tables += content["reproductions"]
        else:
            raise ValueError(f"{path} comes neither from specplug bench --output nor from benchmarks/papers/reproduce_*.py")
    if len(reports) != 1:
        raise ValueError(f"give one file of specplug bench --output, not {len(reports)}")
    return reports[0], tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``specplug report``."""
    parser.add_argument("results", type=Path, nargs="+", metavar="JSON", help="of specplug bench, and of reproductions")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="HTML", help="default: %(default)s")


def run(args: argparse.Namespace) -> None:
    """``specplug report``."""
    args.out.write_text(build_page(*read_results(args.results)), encoding="utf-8")
    print(args.out)
