"""``specplug swift-report``: the state of SWIFT's search for a target as an HTML page (SWIFT, figures 6, 10 and 12)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vllm_specplug.utils.charts import legend, line_chart, stacked_bars
from vllm_specplug.utils.web_page import html_table, page_html, section_html

from .layer_set import LayerSet
from .search import LayerSearch, SearchOptions
from .state import SwiftState, load_state, read_state

#: Most layer sets drawn for one stream: the first, the last, and some between them.
MAX_STRIPS = 8
_KEPT, _ATTENTION, _MLP = "#b5b5b5", "#d62728", "#1f77b4"


def expected_speedup(tokens_per_step: float, acceptance: float, skip_ratio: float) -> float:
    """Return ``M alpha / ((M - 1) c + alpha)`` with ``c = 1 - r``, the relative cost of a draft (SWIFT, equation 6).

    Args:
        tokens_per_step: ``M``, including the bonus token.
        acceptance: ``alpha``, accepted tokens per drafting forward.
        skip_ratio: ``r``.
    """
    return tokens_per_step * acceptance / ((tokens_per_step - 1) * (1 - skip_ratio) + acceptance)


def strips_svg(rows: Sequence[tuple[str, LayerSet]]) -> str:
    """Draw each layer set as two strips, attention above MLP: grey runs, red is skipped attention, blue skipped MLP."""
    left, cell, height = 150, 16, 44
    width = left + cell * max(layer_set.num_layers for _, layer_set in rows)
    parts = []
    for number, (name, layer_set) in enumerate(rows):
        top = number * height
        parts.append(f'<text x="0" y="{top + 21}">{escape(name)}</text>')
        for line, (skipped, colour) in enumerate(((layer_set.attention, _ATTENTION), (layer_set.mlp, _MLP))):
            for layer in range(layer_set.num_layers):
                kind = ("attention", "MLP")[line]
                state = "skipped" if layer in skipped else "runs"
                fill, x, y = colour if layer in skipped else _KEPT, left + layer * cell, top + 2 + line * cell
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{cell - 2}" fill="{fill}">'
                    f"<title>layer {layer}, {kind}: {state}</title></rect>"
                )
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height * len(rows)}" style="max-width:{width}px" '
        f'aria-label="skipped sub-layers"><title>skipped sub-layers</title>{"".join(parts)}</svg>'
    )


def build_page(state: SwiftState, source: str) -> str:
    """Build the page; ``source`` is the name of the state file."""
    names = {stream: stream or "(no stream)" for stream in state.streams}
    body = _matchness(state, names)
    body += "".join(_strips(names[stream], search) for stream, search in state.streams.items())
    body += _acceptance(state, names) + _phases(state)
    options = state.options
    intro = f"{source}: {options.num_layers} layers, skip ratio {options.skip_ratio}"
    return page_html("SWIFT: layer sets", intro, body)


def _matchness(state: SwiftState, names: dict[str, str]) -> str:
    lines = {names[s]: [(steps, m) for steps, m, _ in search.history] for s, search in state.streams.items()}
    lines = {name: line for name, line in lines.items() if line}
    if not lines:
        return section_html(
            "Matchness", "No candidate was scored: answers were too short, or the time limits allowed no scoring."
        )
    chart = legend(list(lines)) + line_chart("Matchness of the set in use", lines, "candidates scored", "matchness")
    rows = [
        [
            names[s],
            f"{x.history[0][1]:.3f}",
            f"{x.matchness:.3f}",
            str(x.all_steps),
            str(x.restarts),
            x.stopped or "running",
        ]
        for s, x in state.streams.items()
        if x.history
    ]
    text = "Share of an answer's last tokens that the target still predicts with the set skipped; mean over windows."
    return section_html(
        "Matchness", text, chart, html_table(["stream", "first", "now", "candidates", "restarts", "search"], rows)
    )


def _strips(name: str, search: LayerSearch) -> str:
    found: list[tuple[str, LayerSet]] = []
    for steps, _, layer_set in search.history:
        if not found or found[-1][1] != layer_set:
            found.append((f"after {steps}", layer_set))
    if not found or found[-1][1] != search.best:
        found.append((f"after {search.all_steps}", search.best))
    chosen = sorted({i * (len(found) - 1) // max(MAX_STRIPS - 1, 1) for i in range(MAX_STRIPS)})
    rows = [
        [found[i][0], " ".join(map(str, found[i][1].attention)), " ".join(map(str, found[i][1].mlp))] for i in chosen
    ]
    text = (
        "Upper strip: attention, lower strip: MLP, layer 0 at the left. Grey runs, "
        f'<span style="color:{_ATTENTION}">red</span> is skipped attention, '
        f'<span style="color:{_MLP}">blue</span> is skipped MLP.'
    )
    table = html_table(["candidates", "attention", "MLP"], rows)
    return section_html(f"Layer sets of {name}", text, strips_svg([found[i] for i in chosen]), table, wide=True)


def acceptance_of(state: SwiftState, stream: str) -> tuple[float, float] | None:
    """Return ``(M, alpha)`` of a stream, see ``expected_speedup``; None before its first verified draft."""
    found = state.acceptance[stream]
    if not found.rounds or not found.draft_steps:
        return None
    return 1 + found.accepted / found.rounds, found.accepted / found.draft_steps


def _acceptance(state: SwiftState, names: dict[str, str]) -> str:
    rows = []
    for stream in state.streams:
        if (found := acceptance_of(state, stream)) is not None:
            speedup = expected_speedup(*found, state.options.skip_ratio)
            rounds = str(state.acceptance[stream].rounds)
            rows.append([names[stream], rounds, f"{found[0]:.2f}", f"{found[1]:.3f}", f"{speedup:.2f}"])
    if not rows:
        return section_html("Acceptance", "Nothing was drafted: the measured budget chose plain decoding.")
    text = (
        "M: tokens per verified draft, including the bonus token. alpha: accepted tokens per drafting forward. The "
        "expected speedup is the paper's: it assumes that a drafting forward costs 1 - r of a step. LM head and "
        "sampling cost the same in both, so a small model gains less."
    )
    return section_html(
        "Acceptance", text, table=html_table(["stream", "drafts", "M", "alpha", "expected speedup"], rows)
    )


def phases_of(state: SwiftState) -> dict[str, float]:
    """Return the seconds of all steps by phase."""
    s = state.seconds
    rest = s["served"] - s["draft"] - s["optimise"] - s["propose"]
    return {
        "draft": s["draft"],
        "verification, sampling": max(rest, 0.0),
        "score candidates": s["optimise"],
        "choose candidates": s["propose"],
    }


def _phases(state: SwiftState) -> str:
    phases = phases_of(state)
    total = sum(phases.values())
    if not total:
        return section_html("Latency by phase", "Nothing was served.")
    chart = legend(list(phases)) + stacked_bars("Seconds by phase", {"all steps": phases}, "s")
    rows = [[name, f"{seconds:.2f}", f"{100 * seconds / total:.2f}%"] for name, seconds in phases.items()]
    return section_html(
        "Latency by phase", "Time of the model's steps, without vLLM's scheduler.", chart,
        html_table(["phase", "seconds", "share"], rows),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug swift-report``."""
    parser.add_argument("state", metavar="FILE", help="the file that the option swift_state names")
    parser.add_argument("--out", default="swift.html", metavar="FILE", help="HTML page to write (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Run ``specplug swift-report``."""
    content: dict[str, Any] = read_state(args.state)
    state = load_state(args.state, SearchOptions(int(content.get("num_layers", 0)), content.get("skip_ratio")))
    Path(args.out).write_text(build_page(state, Path(args.state).name), encoding="utf-8")
    print(args.out)
