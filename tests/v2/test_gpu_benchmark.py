"""The benchmark for CUDA machines: its attention part on tiny sizes, and how it chooses."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_path_against_the_reference(gpu):
    answer = gpu.time_attention({"nodes": [3, 6], "contexts": [0, 40], "batches": [1, 2]})
    assert len(json.loads(json.dumps(answer))["table"]) == 8
    for row in answer["table"]:
        for path in ("triton", "flash"):
            assert row["paths"][path]["deviation"] < 1e-5 and row["paths"][path]["ms"] > 0
        assert "ms" in row["paths"]["xformers"] or row["paths"]["xformers"]["error"]
    chosen = gpu.choose({"attention": answer, "interpreted": True})
    assert chosen["best"] in ("triton", "flash") and len(chosen["table"]) == 8 and "nothing" in chosen["note"]
    assert "| nodes | context | batch |" in gpu.path_table(chosen)


def attention(*rows):
    """Rows of ``{path: (ms, deviation)}``."""
    table = [
        {"rows": 17, "context": 64 * i, "batch": 1, "paths": {p: dict(ms=m, deviation=d) for p, (m, d) in row.items()}}
        for i, row in enumerate(rows)
    ]
    return {"table": table}


def test_choice(gpu):
    good = 1e-3
    slow, fast = {"triton": (2.0, good), "flash": (1.0, good)}, {"triton": (1.0, good), "flash": (1.1, good)}
    results = {"interpreted": False, "attention": attention(slow, fast)}
    assert gpu.choose(results)["best"] == "flash"
    assert gpu.choose({"interpreted": False, "attention": attention(fast, fast)})["best"] == "triton"

    wrong = attention(slow, {**fast, "flash": (0.1, 0.5)})
    chosen = gpu.choose({"interpreted": False, "attention": wrong})
    assert chosen["best"] == "triton" and chosen["wrong"] == ["flash"]

    absent = attention(slow, {"triton": (1.0, good)})  # flash failed in one of the rows
    assert gpu.choose({"interpreted": False, "attention": absent})["best"] == "triton"

    steps = [{"rows": 17, "context": 64, "batch": 1, "step_ms": 5.0}]
    results["steps"] = {"tree triton 16": {"steps": steps}, "tree flash 16": {"steps": [{**steps[0], "step_ms": 6.0}]}}
    chosen = gpu.choose(results)
    assert (chosen["best"], chosen["measure"]) == ("triton", "whole steps")
    assert "error" in gpu.choose({"interpreted": False})
