"""``specplug report``: print the tables of files of ``specplug bench``, and draw their figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_specplug.bench.methods import BASELINE
from vllm_specplug.bench.results import interval_of, read_result, render
from vllm_specplug.utils.figures import new_figure, save

Report = dict[str, Any]


def _others(report: Report) -> Report:
    return {name: method for name, method in report["methods"].items() if name != BASELINE}


def _by_category(report: Report, axes: Any) -> bool:
    methods, categories = _others(report), list(report["methods"][BASELINE]["categories"])
    height = 0.8 / max(len(methods), 1)
    for number, (name, method) in enumerate(methods.items()):
        values = [method["categories"][category]["speedup"] for category in categories]
        places = [place + number * height for place in range(len(categories))]
        intervals = [interval_of(report, name, category) for category in categories]
        axes.barh(places, values, height, label=name, xerr=_distances(values, intervals), capsize=2)
    axes.set(title="Speedup by category", yticks=range(len(categories)), yticklabels=categories)
    axes.axvline(1, color="grey", linestyle="--")
    axes.invert_yaxis()
    return bool(methods)


def _distances(values: list[float], intervals: list[tuple[float, float] | None]) -> tuple[list[float], list[float]]:
    """Return how far the 95% intervals reach below and above the values; 0 where there is none."""
    bounds = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, bounds, strict=True)]
    return below, [max(high - value, 0.0) for value, (_, high) in zip(values, bounds, strict=True)]


def _by_concurrency(report: Report, axes: Any) -> bool:
    levels = list(report["methods"][BASELINE].get("concurrency", {}))
    for name, method in _others(report).items() if levels else ():
        values = [method["concurrency"][level]["speedup"] for level in levels]
        intervals = [interval_of(report, name, concurrency=int(level)) for level in levels]
        axes.errorbar(levels, values, _distances(values, intervals), fmt="o-", capsize=2, label=name)
    axes.set(title="Speedup by concurrency", xlabel="concurrent questions")
    axes.axhline(1, color="grey", linestyle="--")
    return len(levels) > 1


def _by_depth(report: Report, axes: Any) -> bool:
    found = {name: m["overall"].get("acceptance_by_depth") for name, m in report["methods"].items()}
    for name, shares in found.items():
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=name)
    axes.set(title="Share of drafts accepted to a depth", xlabel="depth")
    return any(found.values())


def _calibration(report: Report, axes: Any) -> bool:
    found = {n: m["calibration"]["bins"] for n, m in report["methods"].items() if m.get("calibration", {}).get("bins")}
    for name, bins in found.items():
        axes.plot([one["predicted"] for one in bins], [one["accepted"] for one in bins], "o-", label=name)
    axes.axline((0, 0), slope=1, color="grey", linestyle="--")
    axes.set(title="Acceptance of nodes", xlabel="predicted", ylabel="measured")
    return bool(found)


#: Each draws into axes, and returns whether the file has its data.
PANELS: tuple[Callable[[Report, Any], bool], ...] = (_by_category, _by_concurrency, _by_depth, _calibration)


def draw(reports: dict[str, Report]) -> Any:
    """Return a figure with one row for each file, by its title, and one column for each panel.

    Bars have the 95% interval over the questions, where it is known.
    """
    figure = new_figure(5 * len(PANELS), 4 * len(reports))
    rows = figure.subfigures(len(reports), 1, squeeze=False)[:, 0]
    for row, (title, report) in zip(rows, reports.items(), strict=True):
        row.suptitle(title)
        for axes, panel in zip(row.subplots(1, len(PANELS)), PANELS, strict=True):
            if panel(report, axes):
                axes.legend()
            else:
                axes.set_axis_off()
                axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug report``."""
    parser.add_argument("results", type=Path, nargs="+", metavar="JSON", help="files that `specplug bench --out` wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw figures into this file (png, svg or pdf)")


def run(args: argparse.Namespace) -> None:
    """Run ``specplug report``."""
    reports = [read_result(path) for path in args.results]
    for path, report in zip(args.results, reports, strict=True):
        print(f"{path}\n\n{render(report)}\n")
    if args.out is not None:
        save(draw(dict(zip(map(str, args.results), reports, strict=True))), args.out)
        print(args.out)
