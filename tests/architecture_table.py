"""The table of architectures in docs/support.md, from what ``tests/hosts/test_architectures.py`` has seen last.

python -m tests.architecture_table       # prints it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.doubles.architectures import ARCHITECTURES
from vllm_specplug.utils.tables import format_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".benchmarks" / "architectures.json"
METHODS = ("eagle2", "lookup")
#: Column -> key of a result.  Where methods differ, they are in the order of ``METHODS``.
COLUMNS = {
    "greedy": "greedy",
    "seeded": "seeded",
    "preemptions": "preemptions",
    "prefix hits (tokens)": "cached tokens",
    "chunked prompts": "chunked prompts",
    "tau": "tau",
}


def architecture_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table in Markdown; ``results`` are by architecture and method."""
    rows = []
    for name, architecture in ARCHITECTURES.items():
        of_methods = [results[name][method] for method in METHODS]
        cells = [", ".join(dict.fromkeys(str(one[key]) for one in of_methods)) for key in COLUMNS.values()]
        rows.append([name, architecture.special, ", ".join(METHODS), *cells])
    return format_table(["architecture", "what is special", "methods", *COLUMNS], rows, markdown=True)


def listed() -> list[list[str]]:
    """Return the cells of the table that are no results: architecture, what is special, methods."""
    return [[name, one.special, ", ".join(METHODS)] for name, one in ARCHITECTURES.items()]


def written() -> list[list[str]]:
    """Return the same cells of the table in docs/support.md."""
    page = (ROOT / "docs" / "support.md").read_text()
    table = page.split("<!-- architectures -->\n")[1].split("\n<!-- /architectures -->")[0]
    return [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()[2:]]


if __name__ == "__main__":
    if not RESULTS.is_file():
        raise SystemExit(f"{RESULTS} is missing: run pytest tests/hosts/test_architectures.py first")
    print(architecture_table(json.loads(RESULTS.read_text())))
