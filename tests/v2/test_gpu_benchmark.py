"""The benchmark for CUDA machines: its parts on tiny sizes, how it chooses, and what it does when something fails."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu, gpu_worker
from tests.v2.conftest import ENGINE, PLAIN
from tests.v2.test_lookup import LOOKUP
from vllm_specplug.hosts.v2.trees import DeviceTrees
from vllm_specplug.kernels import triton_lookup

SIZES = {"nodes": [3, 6], "contexts": [0, 40], "batches": [1, 2]}


def test_every_path_against_the_reference():
    attention = {}
    for path in ("triton", "flash"):
        rows = list(gpu_worker.time_attention({**SIZES, "name": path}))
        assert len(json.loads(json.dumps(rows))) == 8
        assert all(row["deviation"] < 1e-5 and row["ms"] > 0 and "problem" not in row for row in rows)
        attention[path] = {"rows": rows}
    chosen = gpu.choose({"attention": attention, "interpreted": True})
    assert chosen["best"] in ("triton", "flash") and len(chosen["table"]) == 8 and "nothing" in chosen["note"]
    assert "| nodes | context | batch |" in gpu.path_table(chosen)
    paths = [gpu_worker.attention_path(name, 16, on_gpu=False) for name in gpu.PATHS]
    assert all(callable(path) or "xformers" in path for path in paths)


@pytest.mark.parametrize("name", ["search", "trees", "union"])
def test_rounds_of_lookup(name, monkeypatch):
    question = {**SIZES, "nodes": [6], "contexts": [300], "name": name}
    for row in gpu_worker.time_lookup(question):
        assert "problem" not in row and row["ms"] > 0
    honest = triton_lookup.match_keys
    monkeypatch.setattr(triton_lookup, "match_keys", lambda *args, **kwargs: honest(*args, **kwargs) + 1)
    assert all("problem" in row for row in gpu_worker.time_lookup(question))


def test_identity(engine, prompts, monkeypatch):
    """Answers that are plain decoding's, and answers that are not."""
    texts = [prompts[0]["prompt_token_ids"][:9] * 3, prompts[1]["prompt_token_ids"]]
    plain = list(gpu_worker.answers(engine(**PLAIN), texts, 8))
    llm = engine(speculative_config=LOOKUP, **ENGINE)
    found = list(gpu_worker.answers(llm, texts, 8))
    for mine, theirs in zip(found, plain, strict=True):
        row = gpu_worker.compared(mine, theirs)
        assert "problem" not in row and row["same"] == 2 and row["logprob_deviation"] < 1e-4
    assert found[0]["tau"] > 1.2
    assert "no answers" in gpu_worker.compared(found[0], None)["problem"]
    honest = DeviceTrees.stage

    def blind(self, input_batch):
        rows = honest(self, input_batch)
        self.bits[:, 1:, 0] &= ~1  # no node sees the root
        return rows

    monkeypatch.setattr(DeviceTrees, "stage", blind)
    llm.reset_prefix_cache()
    spoilt = next(gpu_worker.answers(llm, texts, 8))
    llm.reset_prefix_cache()
    assert gpu_worker.compared(spoilt, plain[0])["problem"].startswith("greedy: ")
    off = {**found[0], "logprobs": [[value + 0.1 for value in one] for one in plain[0]["logprobs"]]}
    assert "differ by 0.1" in gpu_worker.compared(off, plain[0])["problem"]


def attention(*rows):
    """Of each path, rows of ``(ms, whether it is right)``."""
    found = {path: {"rows": []} for row in rows for path in row}
    for i, row in enumerate(rows):
        for path, (ms, right) in row.items():
            problem = {} if right else {"problem": "off"}
            found[path]["rows"].append({"nodes": 16, "context": 64 * i, "batch": 1, "ms": ms, **problem})
    return found


def test_choice():
    slow, fast = {"triton": (2.0, True), "flash": (1.0, True)}, {"triton": (1.0, True), "flash": (1.1, True)}
    results = {"interpreted": False, "attention": attention({**slow, "chain": (0.1, True)}, fast)}
    assert gpu.choose(results)["best"] == "flash"
    assert gpu.choose({"interpreted": False, "attention": attention(fast, fast)})["best"] == "triton"

    wrong = attention(slow, {**fast, "flash": (0.1, False)})
    chosen = gpu.choose({"interpreted": False, "attention": wrong})
    assert chosen["best"] == "triton" and chosen["wrong"] == ["flash"]

    absent = attention(slow, {"triton": (1.0, True)})  # flash failed in one of the rows
    assert gpu.choose({"interpreted": False, "attention": absent})["best"] == "triton"

    rows = [{"nodes": 16, "context": 64, "batch": 1, "step_ms": 5.0}]
    results["steps"] = {"eagle2 triton 16": {"rows": rows}, "eagle2 flash 16": {"rows": [{**rows[0], "step_ms": 6.0}]}}
    chosen = gpu.choose(results)
    assert (chosen["best"], chosen["measure"]) == ("triton", "whole steps")
    assert "error" in gpu.choose({"interpreted": False})

    results["steps"]["plain"] = {"rows": [{**rows[0], "step_ms": 2.5}]}
    (first, _) = gpu.project(results["steps"], "eagle2 triton 16")["speedup"]
    assert first["speedup"] == round(gpu.PUBLISHED_TAU["eagle2"] / 2, 2)


def test_a_step_that_fails_loses_nothing_else(tmp_path, monkeypatch, capsys):
    """One raises, one ends with an error, one finds something wrong: each is named, and the others are done."""
    output, asked = tmp_path / "gpu.json", []

    def ask(question, _):
        step = (question["part"], question["name"])
        if asked:  # what was found before is on disk
            part, name = asked[-1]
            assert name is None or name in json.loads(output.read_text())[part]
        asked.append(step)
        if step == ("lookup", "trees"):
            raise ZeroDivisionError("out of luck")
        row = {"nodes": 16, "context": 64, "batch": 1, "ms": 1.0, "step_ms": 2.0, "unavailable": {}}
        if step == ("attention", "flash"):
            return {"rows": [row], "error": "killed by SIGSEGV\nand more"}
        if step == ("identity", "union"):
            return {"rows": [row], "problems": ["greedy: 1 of 6 answers are plain decoding's"]}
        return {"rows": [row]}

    monkeypatch.setattr(gpu, "ask", ask)
    monkeypatch.setattr(gpu, "run_tests", lambda file, _: {"passed": 1})
    args = {"output": output, "parts": ",".join(gpu.PARTS), "interpret": False, "timeout": 1}
    sizes = {"contexts": "64", "batches": "1", "nodes": "16"}
    models = {"model": "target", "drafter": "eagle", "heads": "medusa"}
    failed = gpu.run(argparse.Namespace(**args, **sizes, **models))
    assert failed == {
        "identity union": "greedy: 1 of 6 answers are plain decoding's",
        "attention flash": "killed by SIGSEGV",
        "lookup trees": "ZeroDivisionError: out of luck",
    }
    results = json.loads(output.read_text())
    assert results["failed"] == failed and "ZeroDivisionError" in results["lookup"]["trees"]["error"]
    steps = {part: set(results[part]) for part in gpu.PARTS}
    assert steps["tests"] >= {"test_lookup", "test_union", "test_medusa", "test_kernels"}
    assert steps["identity"] == {"plain", "eagle2", "medusa", "lookup", "union"}
    assert steps["attention"] == {*gpu.PATHS, "chain"} and steps["lookup"] == {"search", "trees", "union"}
    trees = {f"eagle2 {path} 16" for path in gpu.PATHS}
    assert steps["steps"] == {"plain", "chain 16", *trees, "medusa 16", "lookup 16", "union 16"}
    assert steps["end_to_end"] == {"plain", "lookup", "eagle2", "union", "medusa"}
    assert results["tree_attention"]["table"] and results["projection"]["speedup"]
    shown = capsys.readouterr()
    assert "3 steps failed" in shown.out and "lookup trees: FAILED: ZeroDivisionError: out of luck" in shown.err


def test_without_a_device_nothing_is_tried(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu, "ask", lambda question, _: asked.append(question) or {"rows": [], "error": "no device"})
    sizes = {"contexts": "64", "batches": "1", "nodes": "16"}
    args = argparse.Namespace(output=tmp_path / "gpu.json", parts="identity", interpret=False, timeout=1, **sizes)
    assert gpu.run(args) == {"device": "no device"} and len(asked) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the interpreter")
def test_a_worker_that_fails_keeps_its_rows():
    question = {"interpret": True, "part": "attention", "name": "triton", "contexts": [8], "batches": [1]}
    found = gpu.ask({**question, "nodes": [3, None]}, 120)
    assert [row["nodes"] for row in found["rows"]] == [3]
    assert found["error"].startswith("exit code 1: TypeError: ")


def has_ended(pid):
    """Within half a minute: what was killed is gone a moment later only."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(300):
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_processes_that_hang_or_die():
    """What they said until then is kept, and nothing that they started is waited for."""
    script = "import subprocess, sys, time; print('so far', flush=True); {}; time.sleep(600)"
    child = "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)"
    code, output, _ = gpu.run_process([sys.executable, "-c", script.format(child)], 5)
    said, _, pid = output.partition("\n")
    assert (code, said) == (None, "so far") and pid.strip()
    assert has_ended(int(pid))  # killed with its parent
    code, output, errors = gpu.run_process([sys.executable, "-c", script.format("import os; os.abort()")], 60)
    assert output == "so far\n" and gpu.ending(code, 60, errors).startswith("killed by SIGABRT")
    assert gpu.ending(None, 60, "ValueError: bad luck\nmore").startswith("no end in 60 s: ValueError: bad luck\n")


def test_outcomes_of_tests(tmp_path, monkeypatch):
    """Of a file of tests: up to the one in which its process ends, too."""
    file = tmp_path / "test_it.py"
    file.write_text("import os\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): os.abort()\n")
    found = gpu.run_tests(file, 60)
    assert (found["passed"], found["failed"]) == (1, 1)
    assert found["error"].startswith("in ") and "test_it.py::test_c, killed by SIGABRT" in found["error"]

    output = "tests/v2/test_it.py::test_a[by depth] PASSED [ 50%]\ntests/v2/test_it.py::test_b[by depth] "
    monkeypatch.setattr(gpu, "run_process", lambda *_: (None, output, ""))
    found = gpu.run_tests(file, 9)
    assert found["passed"] == 1 and found["error"].startswith("in tests/v2/test_it.py::test_b[by depth], no end in 9 s")
    output = output.strip() + " FAILED [100%]\nE   assert 0\nFAILED tests/v2/test_it.py::test_b - assert 0\n"
    monkeypatch.setattr(gpu, "run_process", lambda *_: (1, output, ""))
    found = gpu.run_tests(file, 9)
    assert found["problems"] == ["1 tests failed: FAILED tests/v2/test_it.py::test_b - assert 0"]
    assert (found["passed"], found["failed"], "error" in found) == (1, 1, False)
