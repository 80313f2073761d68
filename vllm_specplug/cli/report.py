"""``specplug report``: print the tables of files of ``specplug bench``, and draw their figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_specplug.bench.methods import BASELINE
from vllm_specplug.bench.results import render
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
        axes.barh(places, values, height, label=name)
    axes.set(title="Speedup by category", yticks=range(len(categories)), yticklabels=categories)
    axes.axvline(1, color="grey", linestyle="--")
    axes.invert_yaxis()
    return bool(methods)


def _by_concurrency(report: Report, axes: Any) -> bool:
    levels = list(report["methods"][BASELINE].get("concurrency", {}))
    for name, method in _others(report).items():
        axes.plot(levels, [method["concurrency"][level]["speedup"] for level in levels if levels], "o-", label=name)
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


def draw(reports: list[Report]) -> Any:
    """Return a figure with one row for each file and one column for each panel."""
    figure = new_figure(5 * len(PANELS), 4 * len(reports))
    for row, report in zip(figure.subplots(len(reports), len(PANELS), squeeze=False), reports, strict=True):
        for axes, panel in zip(row, PANELS, strict=True):
            if panel(report, axes):
                axes.legend()
            else:
                axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    return figure


def read_result(path: Path) -> Report:
    """Read a file of ``specplug bench``.

    Raises:
        ValueError: the file cannot be read, or is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not {"methods", "settings"} <= content.keys():
        raise ValueError(f"{path} has no results: give a file that `specplug bench --out` wrote")
    return content


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
        save(draw(reports), args.out)
        print(args.out)
