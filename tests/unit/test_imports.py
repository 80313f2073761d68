"""What may import what: only ``hosts/`` imports vLLM, no import circle, no import of a higher layer.

Imports are read from the source, those inside functions included.  Imports under ``if TYPE_CHECKING`` do not count.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Folders of the product, and the packages under which they are imported.
PACKAGES = {"vllm_specplug": "vllm_specplug", "proposers": "vllm_specplug.proposers"}
HOSTS = "vllm_specplug.hosts"

#: From the lowest layer up.  A module imports from its own layer and from lower ones.
LAYERS = (
    {"utils"},
    {"types", "config", "proposer"},
    {"core"},
    {"kernels", "budget"},
    {"proposers"},
    {"hosts"},
    {"tools"},
    {"plugin"},
)

#: Modules outside ``hosts/`` that may name a module of it as a string, which is loaded when it is needed.
LAZY_ENTRY_POINTS = {
    "vllm_specplug.proposers.training.command": "`specplug data` starts an engine that answers the prompts",
    "vllm_specplug.proposers.training.data": "`specplug train` starts one where no answers are given",
    "vllm_specplug.tools.bench.workers": "`specplug bench` starts an engine per method, each in its own process",
    "vllm_specplug.tools.cost_command": "`specplug calibrate costs` starts an engine in its own process",
    "vllm_specplug.tools.doctor": "`specplug doctor` checks the installed vLLM",
    "vllm_specplug.tools.step_command": "`specplug steps` starts engines in their own processes",
}
#: The one module that imports from ``hosts/``, inside a function: vLLM loads it in every process as the entry point.
ENTRY = "vllm_specplug.plugin"

#: Violations known so far, as (importing module, imported module).  This list only shrinks.
KNOWN = {
    # A lower layer imports a higher one.
    ("vllm_specplug.hosts.probes.bench_worker", "vllm_specplug.tools.bench.serving"),
    ("vllm_specplug.hosts.probes.round_probe", "vllm_specplug.tools.bench.serving"),
    ("vllm_specplug.proposers.medusa.steps", "vllm_specplug.tools.step_command"),
    ("vllm_specplug.proposers.swift.report", "vllm_specplug.tools.report"),
    # Imports of ``hosts/``.
    ("vllm_specplug.proposers.training.command", "vllm_specplug.hosts.probes.offline"),
    ("vllm_specplug.proposers.training.data", "vllm_specplug.hosts.probes.offline"),
    ("vllm_specplug.tools.doctor", "vllm_specplug.hosts.compat.check"),
    ("vllm_specplug.tools.doctor", "vllm_specplug.hosts.probes.platform_probe"),
}


def imported_names(source, package=""):
    """Full names of everything that ``source``, a module of ``package``, imports.

    ``from a import b`` gives ``a.b``.  ``import_module("a")``, ``__import__("a")`` and ``load("a:b")`` give ``a``.
    """
    tree, names = ast.parse(source), set()
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
            "load",
        ):
            strings = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names |= {string.split(":")[0] for string in strings}
    return names


def named_modules(source):
    """Strings in ``source`` that are the name of a module of ``hosts/``, with or without ``:name``."""
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    names = {string.split(":")[0] for string in strings if isinstance(string, str)}
    return {name for name in names if re.fullmatch(re.escape(HOSTS) + r"(\.\w+)*", name)}


def is_in(name, package):
    return name == package or name.startswith(package + ".")


def product():
    """Source of each module of the product, by its full name."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = product()


def import_graph():
    """By module, the modules of the product that its import statements name (no strings)."""
    graph = {}
    for module, file in MODULES.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        named = {name for name in imported_names(file.read_text(), package) if is_in(name, "vllm_specplug")}
        named -= named_modules(file.read_text())
        graph[module] = {name if name in MODULES else name.rpartition(".")[0] for name in named} & MODULES.keys()
        graph[module].discard(module)
    return graph


GRAPH = import_graph()


def circle_in(graph):
    """The modules of one import circle in their order, the first one again at the end; None without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]


def layer_of(module):
    """Index of the module's layer.  The package ``vllm_specplug`` itself imports nothing and may be imported by all."""
    names = module.split(".")[1:2]
    return next(i for i, groups in enumerate(LAYERS) if names[0] in groups) if names else -1


def violations(forbidden):
    return {(one, other) for one, others in GRAPH.items() for other in others if forbidden(one, other)}


@pytest.mark.parametrize(
    "source",
    [
        "import vllm",
        "import os, vllm.config as c",
        "from vllm.v1 import x",
        "def f():\n    from vllm import LLM",
        "import importlib\nimportlib.import_module('vllm.config')",
        "__import__('vllm')",
        "load('vllm.config:VllmConfig')",
        "if TYPE_CHECKING:\n    import os\nelse:\n    import vllm",
    ],
)
def test_the_check_sees_an_import(source):
    assert any(is_in(name, "vllm") for name in imported_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "import vllm_specplug",
        "from vllm_specplug.vllm import x",
        "x = 'import vllm'",
        "if TYPE_CHECKING:\n    import vllm",
        "from . import vllm",
    ],
)
def test_the_check_sees_no_import_where_none_is(source):
    assert not any(is_in(name, "vllm") for name in imported_names(source, "vllm_specplug.core"))


def test_the_check_sees_relative_imports_and_named_modules():
    found = imported_names("from ..types import Walk\nfrom . import tree", "vllm_specplug.core")
    assert found == {"vllm_specplug.types.Walk", "vllm_specplug.core.tree"}
    source = '"""See vllm_specplug.hosts.a."""\nload("vllm_specplug.hosts.a.b:c")\nMODULE = "vllm_specplug.hosts.d"'
    assert named_modules(source) == {"vllm_specplug.hosts.a.b", "vllm_specplug.hosts.d"}


def test_the_check_sees_the_product():
    assert {"vllm_specplug", "vllm_specplug.core.tree", "vllm_specplug.proposers.eagle2"} <= MODULES.keys()
    assert "vllm_specplug.types" in GRAPH["vllm_specplug.core.walk"]
    assert GRAPH[ENTRY] == {"vllm_specplug.hosts.compat.install"}


def test_only_hosts_import_vllm():
    names = {one: imported_names(file.read_text()) for one, file in MODULES.items() if not is_in(one, HOSTS)}
    assert [one for one, imported in names.items() if any(is_in(name, "vllm") for name in imported)] == []


def test_no_import_of_hosts_from_elsewhere():
    found = violations(lambda one, other: is_in(other, HOSTS) and not is_in(one, HOSTS) and one != ENTRY)
    assert found - KNOWN == set()


def test_hosts_are_named_by_lazy_entry_points_only():
    naming = {one for one, file in MODULES.items() if not is_in(one, HOSTS) and named_modules(file.read_text())}
    assert naming - LAZY_ENTRY_POINTS.keys() == set()
    names = set().union(*(named_modules(MODULES[one].read_text()) for one in naming))
    assert names and names <= MODULES.keys()


def test_the_plugin_imports_when_it_is_called():
    """Loading the entry point loads nothing of ``hosts/``."""
    body = ast.parse(MODULES[ENTRY].read_text()).body
    assert not any(HOSTS in ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom)))


def test_the_check_finds_a_circle():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert sorted(set(circle_in(graph))) == ["b", "c"]
    graph["c"].remove("b")
    assert circle_in(graph) is None


def test_there_is_no_import_circle():
    graph = {one: {other for other in others if (one, other) not in KNOWN} for one, others in GRAPH.items()}
    assert circle_in(graph) is None


def test_lower_layers_do_not_import_higher_ones():
    assert layer_of("vllm_specplug.core.tree") < layer_of("vllm_specplug.proposers.lookup.index")
    assert violations(lambda one, other: layer_of(one) < layer_of(other)) - KNOWN == set()


def test_known_violations_are_still_there():
    """A violation that is gone leaves the list ``KNOWN``."""
    assert KNOWN - violations(lambda one, other: True) == set()
