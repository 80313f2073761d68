"""Allowed imports: vLLM in three rooms only, no import between the platforms, no circle, none of a higher layer.

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
#: The folders that import vLLM.
ROOMS = tuple(f"vllm_specplug.{room}" for room in ("vllm", "cpu", "gpu"))
CPU, GPU = "vllm_specplug.cpu", "vllm_specplug.gpu"
#: Operators of a platform: they import no vLLM, and methods may run them.
KERNELS = (f"{CPU}.kernels", f"{GPU}.kernels")

#: From the lowest layer up.  A module imports from its own layer and from lower ones.
LAYERS = (
    {"utils"},
    {"types", "config", "proposer"},
    {"core"},
    {"kernels", "budget"},
    {"proposers"},
    {"vllm", "cpu", "gpu"},
    {"cli", "bench"},
    {"plugin"},
)

#: Modules outside these folders that name a module in them as a string, which is loaded when it is needed.
LAZY_ENTRY_POINTS = {
    "vllm_specplug.plugin": "the plugin's entry point: vLLM loads it in every process",
    "vllm_specplug.proposer": "a method names the classes that run its drafter in vLLM",
    "vllm_specplug.proposers.dflash": "as above",
    "vllm_specplug.proposers.draft_model": "as above",
    "vllm_specplug.proposers.eagle2": "as above",
    "vllm_specplug.proposers.medusa": "as above",
    "vllm_specplug.proposers.mtp": "as above",
    "vllm_specplug.proposers.swift": "as above",
    "vllm_specplug.proposers.training.data": "`specplug data` starts an engine that answers the prompts",
    "vllm_specplug.bench.workers": "`specplug bench` starts an engine per method, each in its own process",
    "vllm_specplug.cli.doctor": "`specplug doctor` checks the installed vLLM",
}


def imported_names(source, package=""):
    """Full names that the import statements of ``source``, a module of ``package``, name.

    ``from a import b`` gives ``a.b``.
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
    return names


def loaded_names(source):
    """Modules that ``import_module("a")``, ``__import__("a")`` or ``load("a:b")`` names: ``a``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__", "load")]
    arguments = [arg.value for call in loads for arg in call.args if isinstance(arg, ast.Constant)]
    return {argument.split(":")[0] for argument in arguments if isinstance(argument, str)}


def named_modules(source):
    """Strings in ``source`` that are the name of a module in a room, with or without ``:name``."""
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    names = {string.split(":")[0] for string in strings if isinstance(string, str)}
    return {name for name in names if re.fullmatch(r"vllm_specplug\.(vllm|cpu|gpu)(\.\w+)+", name)}


def is_in(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_in_room(name):
    return is_in(name, *ROOMS) and not is_in(name, *KERNELS)


def imports_vllm(source, package=""):
    return any(is_in(name, "vllm") for name in imported_names(source, package) | loaded_names(source))


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
    """By module, the modules of the product that it imports."""
    graph = {}
    for module, file in MODULES.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        named = {name for name in imported_names(file.read_text(), package) if is_in(name, "vllm_specplug")}
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
    names = ["kernels"] if is_in(module, *KERNELS) else module.split(".")[1:2]
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
    assert imports_vllm(source)


def test_the_check_sees_relative_imports_and_named_modules():
    found = imported_names("from ..types import Walk\nfrom . import tree", "vllm_specplug.core")
    assert found == {"vllm_specplug.types.Walk", "vllm_specplug.core.tree"}
    source = '"""See vllm_specplug.vllm.a."""\nload("vllm_specplug.vllm.a.b:c")\nMODULE = "vllm_specplug.cpu.d"'
    assert named_modules(source) == {"vllm_specplug.vllm.a.b", "vllm_specplug.cpu.d"}


def test_the_check_sees_the_product():
    assert {"vllm_specplug", "vllm_specplug.core.tree", "vllm_specplug.proposers.eagle2"} <= MODULES.keys()
    assert "vllm_specplug.types" in GRAPH["vllm_specplug.core.walk"]
    assert "vllm_specplug.vllm.check" in GRAPH["vllm_specplug.vllm.install"]


def test_only_rooms_import_vllm():
    assert [one for one, file in MODULES.items() if not is_in_room(one) and imports_vllm(file.read_text())] == []


def test_only_rooms_import_rooms():
    assert violations(lambda one, other: is_in_room(other) and not is_in_room(one)) == set()


def test_the_platforms_do_not_import_each_other():
    assert violations(lambda one, other: is_in(one, CPU) and is_in(other, GPU)) == set()
    assert violations(lambda one, other: is_in(one, GPU) and is_in(other, CPU)) == set()


def test_lazy_entry_points_are_the_ones_listed():
    named = {one: named_modules(file.read_text()) for one, file in MODULES.items() if not is_in_room(one)}
    assert {one for one, names in named.items() if names} == LAZY_ENTRY_POINTS.keys()
    assert set().union(*named.values()) <= MODULES.keys()


def test_there_is_no_import_circle():
    assert circle_in(GRAPH) is None


def test_lower_layers_do_not_import_higher_ones():
    assert layer_of("vllm_specplug.core.tree") < layer_of("vllm_specplug.proposers.lookup.index")
    assert violations(lambda one, other: layer_of(one) < layer_of(other)) == set()
