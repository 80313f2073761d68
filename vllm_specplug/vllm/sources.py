"""Compare vLLM's source files with the manifest; they are read, never imported."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from vllm_specplug.vllm.manifest import VllmSymbol


class Sources:
    """Modules, parsed on demand.

    Args:
        read: returns the text of a file like ``vllm/config/model.py``, or None if there is no such file.
    """

    def __init__(self, read: Callable[[str], bytes | None]):
        self._read = read
        self._modules: dict[str, ast.Module | None] = {}
        self._packages: set[str] = set()

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is no such module."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            text = self._read(f"{stem}.py")
            if text is None and (text := self._read(f"{stem}/__init__.py")) is not None:
                self._packages.add(name)
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Find the definition of a name, following imports: its module and the syntax node."""
        tree = self.module(module)
        for node in ast.walk(tree) if tree is not None else ():
            if _defines(node, name):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._origin(module, node), alias.name)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module from which a module imports; ``node.level`` counts the dots of a relative import."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + (module in self._packages)]
        return ".".join([*parents, *([node.module] if node.module else [])])

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

    def problem(self, symbol: VllmSymbol) -> str | None:
        """Return the same as ``VllmSymbol.problem`` after an import."""
        return symbol.problem(self._problem)

    def _problem(self, symbol: VllmSymbol) -> str | None:
        module, _, qualified = symbol.path.partition(":")
        first, *rest = qualified.split(".")
        found = self.find(module, first)
        for name in rest:
            found = self.find_member(*found, name) if found is not None else None
        if found is None:
            return f"{symbol.path} is missing"
        node = found[1]
        return symbol.difference(_fields(node) if isinstance(node, ast.ClassDef) else _parameters(node))


def installed_sources() -> Sources:
    """Return the source files of the installed vLLM."""
    spec = find_spec("vllm")
    folders = [Path(folder).parent for folder in (spec.submodule_search_locations or ())] if spec is not None else []

    def read(path: str) -> bytes | None:
        found = next((folder / path for folder in folders if (folder / path).is_file()), None)
        return None if found is None else found.read_bytes()

    return Sources(read)


def _defines(node: ast.AST, name: str) -> bool:
    """Whether a statement defines a name."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


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
