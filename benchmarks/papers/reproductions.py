"""Claims of the papers beside our measurements: the files of ``benchmarks/papers/reproduce_*.py`` and their Markdown.

    python -m benchmarks.papers.reproductions FILE... [--into PAGE]

prints the tables, or writes those of ``NAME.json`` between ``<!-- NAME -->`` and ``<!-- /NAME -->`` of the page.

A script that is stopped (Ctrl-C, SIGTERM) keeps its finished figures; the same command continues (see ``Figures``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_specplug.bench.results import origin_of, write_table
from vllm_specplug.utils.environment import git_commit, provenance
from vllm_specplug.utils.files import read_object, replacing, write_json
from vllm_specplug.utils.processes import terminate_like_interrupt
from vllm_specplug.utils.tables import format_table

#: Tokens and cycles (drafted steps) of each answer, of one method.
Cycles = Sequence[tuple[int, int]]


def tau(cycles: Cycles) -> float:
    """Return tokens per cycle."""
    tokens, steps = np.sum(cycles, axis=0)
    return float(tokens / steps)


def gain(own: Cycles, base: Cycles, draws: int = 2000) -> tuple[float, float, float]:
    """Return tau over that of ``base`` on the same answers, and the bounds of its 95% bootstrap interval."""
    chosen = np.random.default_rng(0).integers(len(own), size=(draws, len(own)))
    own_sums, base_sums = (np.asarray(cycles)[chosen].sum(axis=1) for cycles in (own, base))
    ratios = own_sums[:, 0] / own_sums[:, 1] / (base_sums[:, 0] / base_sums[:, 1])
    low, high = np.quantile(ratios, (0.025, 0.975))
    return tau(own) / tau(base), float(low), float(high)


def gain_text(own: Cycles, base: Cycles) -> str:
    """Format ``gain`` for a table cell: ``1.034x (1.021 to 1.047)``."""
    ratio, low, high = gain(own, base)
    return f"{ratio:.3f}x ({low:.3f} to {high:.3f})"


def verdict_on(own: Cycles, base: Cycles) -> str:
    """Say whether ``own`` is better: ``holds``, ``does not hold``, or ``cannot be told`` if the interval contains 1."""
    _, low, high = gain(own, base)
    return "holds" if low > 1 else "does not hold" if high < 1 else "cannot be told"


def summary(verdicts: dict[str, str]) -> str:
    """Say how many verdicts of ``verdict_on`` hold and which do not; the keys name the baselines."""
    others = [f"{verdict} against {name}" for name, verdict in verdicts.items() if verdict != "holds"]
    held = f"holds in {len(verdicts) - len(others)} of {len(verdicts)} comparisons"
    return "; ".join([held, *others]) + "."


class Figures:
    """Figures of a script by name: each is saved when it is measured, and read by a later run of the same command.

    They are in a file beside the result, which ``write`` deletes.  A progress bar shows which figure is measured.
    """

    def __init__(self, out: Path, total: int, inputs: dict[str, Any]) -> None:
        """Read the saved figures.

        Args:
            out: the result file of the script.
            total: number of figures.
            inputs: all that the figures depend on, besides the commit.

        Raises:
            ValueError: the saved figures have other inputs.
        """
        self.file = figures_file(out)
        self.inputs = {name: str(value) for name, value in inputs.items()} | {"commit": git_commit()}
        self.found: dict[str, Any] = {}
        if self.file.exists():
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            if changed := sorted(key for key in self.inputs if saved["inputs"].get(key) != self.inputs[key]):
                raise ValueError(
                    f"{self.file} has figures of another run, with other {', '.join(changed)}: delete it, or give "
                    "another --out"
                )
            self.found = saved["figures"]
        self.bar = tqdm(desc="figures", total=total, initial=len(self.found), unit="figure")

    def __call__(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a figure as JSON has it; measure and save it if it is missing."""
        if name not in self.found:
            self.bar.set_postfix_str(name)
            self.found[name] = json.loads(json.dumps(measure()))
            write_json(self.file, {"inputs": self.inputs, "figures": self.found})
            self.bar.update()
        return self.found[name]


def figures_file(out: Path) -> Path:
    """Return the file of a run's finished figures."""
    return out.with_suffix(".figures.json")


def run_script(main: Callable[[], None]) -> int:
    """Run a script; SIGTERM ends it, and the programs that it runs, as Ctrl-C does.  Returns its exit code."""
    with terminate_like_interrupt():
        try:
            main()
        except KeyboardInterrupt:
            print("\ninterrupted: finished figures are kept, and the same command continues", file=sys.stderr)
            return 130
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def write(out: Path, tables: Sequence[dict[str, Any]], baseline: str, **more: Any) -> None:
    """Write the file and print its tables.

    Args:
        out: JSON file.
        tables: each with ``title``, ``source``, ``claim``, ``verdict``, ``headers``, ``rows`` and optionally ``note``.
        baseline: what the tables compare with.
        more: other entries of the file.
    """
    content = {"reproductions": list(tables), **more, "provenance": provenance(baseline)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    figures_file(out).unlink(missing_ok=True)
    print(markdown(content))


def offline_parser(summary: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of a script that measures a drafter on a target's answers."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--target", required=True, metavar="DIR", help="Hugging Face folder of the target")
    parser.add_argument("--answers", required=True, type=Path, metavar="FILE", help="answers.jsonl of `specplug data`")
    parser.add_argument("--features", required=True, type=Path, metavar="DIR", help="features; made if missing")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON file to write")
    return parser


def markdown(content: dict[str, Any]) -> str:
    """Return all tables of a file and their provenance as Markdown."""
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


def read(file: Path) -> dict[str, Any]:
    """Read a result of a script.

    Raises:
        ValueError: there is none in the file.
    """
    return read_object(file, {"reproductions", "provenance"}, "a script reproduce_*.py")


def main() -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables into this page")
    args = parser.parse_args()
    for file in args.files:
        text = markdown(read(file))
        if args.into is None:
            print(text)
        else:
            write_table(text, args.into, (f"<!-- {file.stem} -->", f"<!-- /{file.stem} -->"))


if __name__ == "__main__":
    sys.exit(run_script(main))
