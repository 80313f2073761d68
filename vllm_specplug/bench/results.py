"""Figures from measurements, the report with all of them, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_specplug.bench.intervals import speedup_interval
from vllm_specplug.bench.methods import BASELINE, NO_DRAFTS, Method
from vllm_specplug.bench.workers import Measurement
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.files import read_object
from vllm_specplug.utils.tables import format_table

MARKS = ("<!-- results -->", "<!-- /results -->")


def mark_agreement(methods: Sequence[Method], results: dict[str, list[Measurement]]) -> None:
    """Set ``agree`` of all measurements, and ``agree_without_drafts`` of those with the plugin, if it was measured."""
    without_drafts = results.get(NO_DRAFTS)
    for method in methods:
        own = results[method.label]
        for measurement, baseline in zip(own, results[BASELINE], strict=True):
            measurement.agree = _agreement(measurement, baseline)
        if without_drafts is not None and method.drafts and not method.stock:
            for measurement, reference in zip(own, without_drafts, strict=True):
                measurement.agree_without_drafts = _agreement(measurement, reference)


def _agreement(measurement: Measurement, reference: Measurement) -> list[bool]:
    return [a == b for a, b in zip(measurement.token_ids, reference.token_ids, strict=True)]


def speedup_of(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> float:
    """Return tokens per second over all batches, divided by the baseline's."""

    def rate(found: Sequence[Measurement]) -> float:
        return sum(m.tokens for m in found) / sum(m.seconds for m in found)

    return rate(measurements) / rate(baseline)


def summarise(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> dict[str, Any]:
    """Return the figures of one method over some batches; ``baseline`` is plain decoding of the same batches."""
    pairs = list(zip(measurements, baseline, strict=True))
    tokens, seconds = sum(m.tokens for m in measurements), sum(m.seconds for m in measurements)
    drafts, accepted = sum(m.drafts for m in measurements), sum(m.accepted for m in measurements)
    by_repeat = [
        speedup_of(*zip(*(pair for pair in pairs if pair[0].repeat == repeat), strict=True))
        for repeat in sorted({m.repeat for m in measurements})
    ]
    agree = [same for m in measurements for same in m.agree]
    without_drafts = [same for m in measurements for same in m.agree_without_drafts]
    first_token_s = [value for m in measurements for value in m.first_token_s]
    inter_token_s = [value for m in measurements for value in m.inter_token_s]
    depth = max((len(m.accepted_by_depth) for m in measurements), default=0)
    by_depth = [sum(m.accepted_by_depth[d] for m in measurements if d < len(m.accepted_by_depth)) for d in range(depth)]
    return {
        "questions": len(agree),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_s_median": round(statistics.median(m.rate for m in measurements), 2),
        "speedup": round(speedup_of(measurements, baseline), 3),
        "speedup_median": round(statistics.median(m.rate / b.rate for m, b in pairs), 3),
        "speedup_by_repeat": [round(value, 3) for value in by_repeat],
        "tau": round(1 + accepted / drafts, 3) if drafts else None,
        # share of the drafts of which at least 1, 2, ... tokens were accepted
        "acceptance_by_depth": [round(count / drafts, 4) for count in by_depth if count] if drafts else [],
        "first_token_ms": _median_ms(first_token_s),
        "inter_token_ms": _median_ms(inter_token_s),
        "agree": sum(agree),
        "agree_without_drafts": sum(without_drafts) if without_drafts else None,
    }


def _median_ms(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds) * 1e3, 2) if seconds else None


def _grouped(
    own: list[Measurement], baseline: list[Measurement], key: Callable[[Measurement], Any]
) -> dict[Any, dict[str, Any]]:
    """Return summaries by ``key``, in order of appearance."""
    groups: dict[Any, list[tuple[Measurement, Measurement]]] = {}
    for pair in zip(own, baseline, strict=True):
        groups.setdefault(key(pair[0]), []).append(pair)
    return {name: summarise(*zip(*pairs, strict=True)) for name, pairs in groups.items()}


def build_report(
    methods: list[Method],
    results: dict[str, list[Measurement]],
    peaks: dict[str, int | None],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of the JSON file.

    ``overall`` and ``categories`` are figures at the first concurrency of the run; ``concurrency`` has all of them.
    """
    mark_agreement(methods, results)
    first = results[BASELINE][0].concurrency
    report: dict[str, Any] = {
        "provenance": provenance(baseline="plain vLLM (no plugin, no speculation), same run, questions interleaved"),
        "settings": settings,
        "methods": {},
    }
    for method in methods:
        own, baseline = results[method.label], results[BASELINE]
        own_first = [m for m in own if m.concurrency == first]
        base_first = [m for m in baseline if m.concurrency == first]
        report["methods"][method.label] = {
            "config": method.config,
            "overall": summarise(own_first, base_first),
            "categories": _grouped(own_first, base_first, lambda m: m.category),
            "concurrency": {str(c): summary for c, summary in _grouped(own, baseline, lambda m: m.concurrency).items()},
            "peak_rss_mib": peaks[method.label],
            "batches": [{k: v for k, v in asdict(m).items() if k != "token_ids"} | {"tokens": m.tokens} for m in own],
        }
    return report


def read_result(path: Path) -> dict[str, Any]:
    """Read a report that ``specplug bench --out`` wrote.

    Raises:
        ValueError: the file cannot be read, or has none.
    """
    return read_object(path, {"methods", "settings", "provenance"}, "`specplug bench --out`")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def interval_of(
    report: dict[str, Any], label: str, category: str | None = None, concurrency: int | None = None
) -> tuple[float, float] | None:
    """Return the 95% interval of a method's speedup over the questions of a category (default: all), if it has any.

    concurrency: of the batches (default: the first one of the run).
    """
    own, plain = (report["methods"][name]["batches"] for name in (label, BASELINE))
    level = concurrency or own[0]["concurrency"]
    chosen = [
        pair
        for pair in zip(own, plain, strict=True)
        if pair[0]["concurrency"] == level and category in (None, pair[0]["category"])
    ]
    if label == BASELINE:
        return None
    return speedup_interval([mine for mine, _ in chosen], [base for _, base in chosen])


def _with_interval(report: dict[str, Any], label: str, category: str | None = None) -> str:
    """Return a method's speedup of all questions or of a category, with its interval, if any."""
    own = report["methods"][label]
    figures = own["categories"][category] if category else own["overall"]
    return f"{figures['speedup']:.2f}x{_brackets(interval_of(report, label, category))}"


def _brackets(interval: tuple[float, float] | None) -> str:
    return f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""


def _at_level(report: dict[str, Any], label: str, level: str) -> str:
    """Return a method's speedup at a concurrency, with its interval, and those of the slowest and fastest pass."""
    figures = report["methods"][label]["concurrency"][level]
    passes = figures.get("speedup_by_repeat", ())
    spread = f", passes {min(passes):.2f}-{max(passes):.2f}" if len(passes) > 1 else ""
    return f"{figures['speedup']:.2f}x{_brackets(interval_of(report, label, concurrency=int(level)))}{spread}"


def _around_first_tokens(report: dict[str, Any], label: str) -> tuple[float | None, float | None]:
    """Return a method's speedup after the first tokens, and the share of its time before them; None if unknown.

    They are known where one question runs at a time, its first token was timed, and others follow.
    """
    own, plain = (_first_tokens_and_rest(report["methods"][name]["batches"]) for name in (label, BASELINE))
    if own is None or plain is None:
        return None, None
    (before, after, tokens), (_, plain_after, plain_tokens) = own, plain
    return tokens / after / (plain_tokens / plain_after), before / (before + after)


def _first_tokens_and_rest(batches: list[dict[str, Any]]) -> tuple[float, float, int] | None:
    """Return the seconds before and after first tokens, and the tokens after them, at the first concurrency."""
    chosen = [batch for batch in batches if batch["concurrency"] == batches[0]["concurrency"]]
    if any(len(batch["questions"]) != 1 or len(batch.get("first_token_s", ())) != 1 for batch in chosen):
        return None
    before = sum(batch["first_token_s"][0] for batch in chosen)
    after = sum(batch["seconds"] for batch in chosen) - before
    tokens = sum(batch["tokens"] - 1 for batch in chosen)
    return (before, after, tokens) if tokens > 0 and after > 0 else None


def render(report: dict[str, Any], markdown: bool = False) -> str:
    """Return the overall table, the speedups by category and concurrency, and the origin of the numbers.

    The brackets after a speedup have its 95% interval over the questions.  ``prompts`` is the share of the time to
    first tokens.
    """
    methods = report["methods"]
    others = [name for name in methods if name != BASELINE]
    repeated = any(len(m["overall"].get("speedup_by_repeat", ())) > 1 for m in methods.values())
    timed = any(m["overall"].get("first_token_ms") is not None for m in methods.values())
    around = {label: _around_first_tokens(report, label) for label in methods}
    split = any(share is not None for _, share in around.values())
    headers = ["method", "tokens/s", "speedup"] + ["repeats"] * repeated + ["after first token", "prompts"] * split
    headers += ["tau"] + ["first token ms", "ms per token"] * timed + [*_same_text_headers(report), "peak RSS MiB"]
    rows = []
    for label, method in methods.items():
        o = method["overall"]
        row = [label, f"{o['tokens_per_s']:.1f}", _with_interval(report, label)]
        if repeated:
            row.append(f"{min(o['speedup_by_repeat']):.2f}-{max(o['speedup_by_repeat']):.2f}x")
        if split:
            speedup, share = around[label]
            row += [_or_dash(speedup, "{:.2f}x"), _or_dash(share, "{:.0%}")]
        row.append(_or_dash(o["tau"], "{:.2f}"))
        if timed:
            row += [_or_dash(o["first_token_ms"], "{:.0f}"), _or_dash(o["inter_token_ms"], "{:.1f}")]
        rows.append([*row, *_same_texts(report, label), _or_dash(method["peak_rss_mib"], "{}")])
    parts = [format_table(headers, rows, markdown)]
    if others:
        by_category = []
        for category, base in methods[BASELINE]["categories"].items():
            cells = (_with_interval(report, name, category) for name in others)
            by_category.append([category, str(base["questions"]), *cells])
        titles = [f"{name} speedup" for name in others]
        if len(by_category) > 1:  # of one, the table above has the figures
            parts.append(format_table(["category", "answers", *titles], by_category, markdown))
        levels = list(methods[BASELINE].get("concurrency", {}))
        if len(levels) > 1:
            body = [[level, *(_at_level(report, name, level) for name in others)] for level in levels]
            parts.append(format_table(["concurrency", *titles], body, markdown))
        if stages := {name: m["stages"] for name, m in methods.items() if m.get("stages")}:
            parts.append(format_table(*stage_table(stages), markdown))
    return "\n\n".join([*parts, origin(report)])


def _same_text_headers(report: dict[str, Any]) -> list[str]:
    return [f"same text as {NO_DRAFTS}"] * (NO_DRAFTS in report["methods"]) + ["same text as plain"]


def _same_texts(report: dict[str, Any], label: str) -> list[str]:
    """Return for each header of ``_same_text_headers`` how many answers of a method are the same."""
    overall = report["methods"][label]["overall"]
    columns = ["agree_without_drafts"] * (NO_DRAFTS in report["methods"]) + ["agree"]
    counts = (overall.get(column) for column in columns)
    return ["-" if count is None else f"{count}/{overall['questions']}" for count in counts]


def render_short(report: dict[str, Any]) -> str:
    """Return the overall figures in fewer columns and their origin, in Markdown; intervals as in ``render``."""
    rows = [
        [
            label,
            f"{o['tokens_per_s']:.1f}",
            _with_interval(report, label),
            _or_dash(_around_first_tokens(report, label)[0], "{:.2f}x"),
            _or_dash(o["tau"], "{:.2f}"),
            *_same_texts(report, label),
        ]
        for label, o in ((label, method["overall"]) for label, method in report["methods"].items())
    ]
    headers = ["method", "tokens/s", "speedup", "after first token", "tau", *_same_text_headers(report)]
    return "\n\n".join([format_table(headers, rows, markdown=True), origin(report)])


def stage_table(stages: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of the milliseconds per decode step and stage, by method."""
    headers = ["method", "ms per step", "verify", "draft forward", "draft, other", "other", "outside forwards"]
    keys = ("round_ms", "verify_ms", "draft_forward_ms", "draft_other_ms", "host_ms")
    rows = []
    for name, s in stages.items():
        outside = (s["draft_other_ms"] + s["host_ms"]) / s["round_ms"]
        rows.append([name, *(f"{s[key]:.2f}" for key in keys), f"{outside:.0%}"])
    return headers, rows


def _lengths(settings: dict[str, Any]) -> str:
    interrupted = f", interrupted after {settings['interrupted']}" if "interrupted" in settings else ""
    return f"at most {settings['max_tokens']} tokens each{interrupted}"


def origin(report: dict[str, Any]) -> str:
    """Return settings and provenance as one paragraph."""
    s = report["settings"]
    sampling = f"temperature {s['temperature']}, seeded" if s.get("temperature") else "greedy"
    repeats = f", {s['repeats']} repeats" if s.get("repeats", 1) > 1 else ""
    return (
        f"{s['num_questions']} questions of {s['questions']}, {s['dtype']}, concurrency {s['concurrency']}{repeats}, "
        f"{sampling}, {_lengths(s)}; tau counts the bonus token.  "
        f"{origin_of(report['provenance'])}"
    )


def origin_of(found: dict[str, Any]) -> str:
    """Return a provenance as one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = found["commit"] or "unknown"
    return (
        f"{found['hardware']['cpu']}, {found['hardware']['cores']} cores; {versions}; commit {commit}; "
        f"baseline: {found['baseline']}; {found['date'][:10]}; command: `{found['command']}`"
    )


def write_table(table: str, page: Path, marks: tuple[str, str] = MARKS) -> None:
    """Replace the text between the marks of a Markdown page."""
    head, begin, rest = page.read_text().partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} has no {marks[0]} ... {marks[1]}")
    page.write_text(f"{head}{begin}\n{table}\n{end}{tail}")
