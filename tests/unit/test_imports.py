"""Only ``vllm_specplug/hosts`` imports vllm: the methods know nothing of the host."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "vllm_specplug" / "hosts"


def imported_modules(source):
    """Top-level names of all modules that ``source`` imports, anywhere in it, ``import_module("...")`` included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name.split(".")[0] for name in names}


def sources():
    files = [*(ROOT / "vllm_specplug").rglob("*.py"), *(ROOT / "proposers").rglob("*.py")]
    return sorted(file for file in files if HOSTS not in file.parents)


@pytest.mark.parametrize(
    "source",
    [
        "import vllm",
        "import os, vllm.config as c",
        "from vllm.v1 import x",
        "def f():\n    from vllm import LLM",
        "import importlib\nimportlib.import_module('vllm.config')",
        "__import__('vllm')",
    ],
)
def test_the_check_sees_an_import(source):
    assert "vllm" in imported_modules(source)


@pytest.mark.parametrize("source", ["import vllm_specplug", "from vllm_specplug.vllm import x", "x = 'import vllm'"])
def test_the_check_sees_no_import_where_none_is(source):
    assert "vllm" not in imported_modules(source)


def test_only_hosts_import_vllm():
    names = {str(file.relative_to(ROOT)) for file in sources()}
    assert {"vllm_specplug/core/tree.py", "vllm_specplug/core/step.py", "proposers/eagle2/__init__.py"} <= names
    offenders = [file for file in sources() if "vllm" in imported_modules(file.read_text())]
    assert offenders == []
