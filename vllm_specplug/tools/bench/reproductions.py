"""Claims of the papers beside what was measured here: files of ``benchmarks/papers/reproduce_*.py``, and their Markdown.

    python -m vllm_specplug.tools.bench.reproductions FILE... [--into PAGE]

prints the tables, or writes those of ``NAME.json`` between ``<!-- NAME -->`` and ``<!-- /NAME -->`` of the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplug.tools.bench.results import origin_of, write_table
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.tables import format_table

#: Of one method on every answer: tokens, and the cycles that they took.
Cycles = Sequence[tuple[int, int]]


def tau(cycles: Cycles) -> float:
    """Tokens by cycles."""
    tokens, steps = np.sum(cycles, axis=0)
    return float(tokens / steps)


def gain(own: Cycles, base: Cycles, draws: int = 2000) -> tuple[float, float, float]:
    """tau by ``base``'s on the same answers, with its 95% interval over draws of the answers."""
    chosen = np.random.default_rng(0).integers(len(own), size=(draws, len(own)))
    own_sums, base_sums = (np.asarray(cycles)[chosen].sum(axis=1) for cycles in (own, base))
    ratios = own_sums[:, 0] / own_sums[:, 1] / (base_sums[:, 0] / base_sums[:, 1])
    low, high = np.quantile(ratios, (0.025, 0.975))
    return tau(own) / tau(base), float(low), float(high)


def gain_text(own: Cycles, base: Cycles) -> str:
    """``gain`` for a cell: ``1.034x (1.021 to 1.047)``."""
    ratio, low, high = gain(own, base)
    return f"{ratio:.3f}x ({low:.3f} to {high:.3f})"


def verdict_on(own: Cycles, base: Cycles) -> str:
    """Whether ``own`` is ahead: ``holds``, ``does not hold``, or ``cannot be told``, where the interval has 1 in it."""
    _, low, high = gain(own, base)
    return "holds" if low > 1 else "does not hold" if high < 1 else "cannot be told"


def summary(verdicts: dict[str, str]) -> str:
    """Verdicts of ``verdict_on`` by what was compared with: how many hold, and which do not."""
    others = [f"{verdict} against {name}" for name, verdict in verdicts.items() if verdict != "holds"]
    held = f"holds in {len(verdicts) - len(others)} of {len(verdicts)} comparisons"
    return "; ".join([held, *others]) + "."


def write(out: Path, tables: Sequence[dict[str, Any]], baseline: str, **more: Any) -> None:
    """Write the file and print its tables.

    Args:
        out: JSON file; ``specplug report`` takes it too.
        tables: ``title``, ``source``, ``claim``, ``verdict``, ``headers``, ``rows`` and perhaps ``note`` of each.
        baseline: what the tables compare with.
        more: further entries of the file.
    """
    content = {"reproductions": list(tables), **more, "provenance": provenance(baseline)}
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    print(markdown(content))


def markdown(content: dict[str, Any]) -> str:
    """All tables of a file, and where they come from."""
    parts = []
    for table in content["reproductions"]:
        rows = [[str(cell) for cell in row] for row in table["rows"]]
        parts += [
            f"**{table['title']}.** {table['source']} claims: {table['claim']} Here: {table['verdict']}",
            format_table(table["headers"], rows, markdown=True),
        ]
        if table.get("note"):
            parts.append(table["note"][:1].upper() + table["note"][1:] + ".")
    return "\n\n".join([*parts, origin_of(content["provenance"]) + "."])


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write them into this page")
    args = parser.parse_args()
    for file in args.files:
        text = markdown(json.loads(file.read_text(encoding="utf-8")))
        if args.into is None:
            print(text)
        else:
            write_table(text, args.into, (f"<!-- {file.stem} -->", f"<!-- /{file.stem} -->"))


if __name__ == "__main__":
    main()
