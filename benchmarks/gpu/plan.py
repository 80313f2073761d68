"""The steps of ``gpu.py``, in the order of their worth: when time ends, what is missing is worth least.

What needs no vLLM comes first.  Then engines in float32 whose answers must be plain decoding's, with as little of
vLLM's machinery as possible first; then their speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Of each engine mode: the seconds that a step may take.  Engines with graphs record them at start, the defaults
#: compile the model before: these may take more than a minute.
IDENTITY_SECONDS = {"eager": 60, "graphs": 90, "defaults": 180}
SPEED_SECONDS = {"eager": 60, "graphs": 120, "defaults": 240}
METHODS = ("eagle2", "union", "lookup", "medusa")


@dataclass(frozen=True)
class Step:
    """One thing to check or to measure.

    Attributes:
        name: in the results; unique.
        part: function of the worker, see ``gpu_worker.PARTS``; ``tests``: a pytest file, in a process of its own.
        seconds: the longest time that it may take.
        group: steps of a group share a process, unless one of them fails.
        question: its arguments.
    """

    name: str
    part: str
    seconds: int = 60
    group: str = "torch"
    question: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """What the steps run on: nodes of a tree, tokens of a context, requests of a batch, rows of a step."""

    nodes: tuple[int, ...] = (7, 15, 31, 63)
    contexts: tuple[int, ...] = (1024, 8192)
    batches: tuple[int, ...] = (1, 8, 64)
    rows: tuple[int, ...] = tuple(1 << i for i in range(10))


TINY = Sizes(nodes=(6,), contexts=(40,), batches=(2,), rows=(1, 20))


def make_plan(sizes: Sizes, with_tests: bool = True) -> list[Step]:
    """Return all steps; without a GPU the test files are left out: they run there by themselves."""
    tests = _test_steps() if with_tests else []
    return [*_torch_steps(sizes), *_identity_steps(), *_speed_steps(sizes), *tests]


def _torch_steps(sizes: Sizes) -> list[Step]:
    few = {"nodes": [sizes.nodes[i] for i in (len(sizes.nodes) // 3, -1)], "contexts": sizes.contexts}
    few = {**few, "nodes": sorted(set(few["nodes"])), "batches": sizes.batches}
    others = {**few, "nodes": [nodes for nodes in sizes.nodes if nodes not in few["nodes"]]}
    #: Each of its shapes is compiled for about ten seconds.
    fewest = {**few, "nodes": few["nodes"][-1:], "contexts": sizes.contexts[-1:]}
    kernels = ROOT / "tests" / "v2" / "test_kernels.py"
    return [
        Step("device", "device"),
        Step("growth equals the CPU's", "check_growth"),
        Step("kernels equal their references", "tests", 120, "tests", {"file": str(kernels), "alone": True}),
        Step("attention triton", "attention", question={**few, "name": "triton"}),
        Step("step times by rows", "dense_step", question={"rows": sizes.rows, "contexts": sizes.contexts}),
        *(
            Step(f"drafting {name}", "drafting", question={**few, "name": name})
            for name in ("eagle2", "union", "lookup")
        ),
        Step("search of lookup", "search", question=few),
        Step("attention sdpa", "attention", question={**few, "name": "sdpa"}),
        Step("attention flash", "attention", question={**few, "name": "flash"}),
        Step("attention chain", "attention", question={**few, "name": "chain"}),
        Step("attention flex", "attention", question={**fewest, "name": "flex"}),
        *(
            Step(f"attention {name}, other trees", "attention", question={**others, "name": name})
            for name in ("triton", "flash")
            if others["nodes"]
        ),
        Step("attention xformers", "attention", question={**few, "name": "xformers"}),
    ]


def _identity_steps() -> list[Step]:
    steps = []
    for mode, methods in (("eager", METHODS), ("graphs", METHODS), ("defaults", METHODS[:2])):
        for method in methods:
            question = {"method": method, "mode": mode}
            name = f"identity {mode} {method}"
            steps.append(Step(name, "identity", IDENTITY_SECONDS[mode], f"identity {mode}", question))
    return steps


def _speed_steps(sizes: Sizes) -> list[Step]:
    """Speed on both targets: first the four methods, then each number of nodes with each ``tree_attention``."""
    most = sizes.nodes[-1]
    usual = sizes.nodes[len(sizes.nodes) // 3]
    methods = [("plain", 0, None), ("chain", min(3, usual), None), ("eagle2", usual, None), ("union", usual, None)]
    paths = [("eagle2", nodes, path) for nodes in (usual, most, *sizes.nodes) for path in ("triton", "flash")]
    #: Its verification has as many rows as a tree's.
    paths.insert(2, ("chain", usual, None))
    plan = [
        *(("graphs", "smollm2", *one) for one in methods),
        *(("graphs", "8b", *one) for one in methods),
        *(("graphs", "8b", *one) for one in dict.fromkeys(paths)),
        *(("defaults", target, *one) for target in ("smollm2", "8b") for one in methods),
    ]
    steps = []
    for mode, target, method, nodes, path in plan:
        words = ("speed", mode, target, method, nodes if method != "plain" else None, path)
        name = " ".join(str(word) for word in words if word is not None)
        question = {"mode": mode, "target": target, "method": method, "nodes": nodes, "path": path}
        question |= {"batches": sizes.batches, "contexts": sizes.contexts}
        steps.append(Step(name, "speed", SPEED_SECONDS[mode], f"speed {mode} {target}", question))
    return steps


def _test_steps() -> list[Step]:
    files = sorted((ROOT / "tests" / "v2").glob("test_*.py"))
    return [Step(f"tests {file.stem}", "tests", 240, "tests", {"file": str(file)}) for file in files]
