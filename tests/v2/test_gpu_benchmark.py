"""The benchmark for CUDA machines: its parts on tiny sizes, how it chooses, and what it does when something fails."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention, dense_step, drafting, engines, gpu, processes, train_drafter
from benchmarks.gpu.fake_device import end_of_dry_run
from benchmarks.gpu.plan import TINY, Sizes, Step, make_plan
from benchmarks.gpu.results import Results, choose, report
from tests.v2.conftest import ENGINE, PLAIN
from tests.v2.test_lookup import LOOKUP
from vllm_specplug.gpu.trees import DeviceTrees

SIZES = {"nodes": [6], "contexts": [40], "batches": [2], "rows": [1, 20]}
WITHOUT_VLLM = [step for step in make_plan(TINY, with_tests=False) if step.group == "torch"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the interpreter")


@without_gpu
@pytest.mark.wide
def test_parts_without_vllm(tmp_path, capsys):
    """All of them, as a user starts them, at tiny sizes in the interpreter."""
    output = tmp_path / "gpu.jsonl"
    only = ",".join(step.name for step in WITHOUT_VLLM)
    assert gpu.main(["--output", str(output), "--interpret", "--only", only]) == 0
    steps = Results(output).steps
    assert list(steps) == [step.name for step in WITHOUT_VLLM]
    assert steps.pop("attention chain")["reason"].endswith("needs a GPU")
    assert steps.pop("attention xformers")["status"] in ("passed", "skipped")
    for name in ("attention triton", "attention flash", "attention sdpa", "attention flex"):
        assert all(row["deviation"] < 1e-5 and row["ms"] > 0 and row["bytes"] > 0 for row in steps[name]["rows"])
    assert [row["rows"] for row in steps["step times by rows"]["rows"]] == [1, 20]
    assert {step["status"] for step in steps.values()} == {"passed"}
    shown = capsys.readouterr().out
    assert "| nodes | context | batch |" in shown and "| draft phase |" in shown and "step ms" in shown


@without_gpu
@pytest.mark.wide
def test_no_part_of_these_needs_vllm(tmp_path):
    names = ", ".join(module.__name__ for module in (attention, dense_step, drafting))
    script = f"import sys; sys.modules['vllm'] = None; from benchmarks.gpu import gpu_worker; import {names}"
    subprocess.run([sys.executable, "-c", script], cwd=processes.ROOT, check=True, env={**os.environ})


@without_gpu
def test_dry_run(tmp_path):
    """Every step comes to its first tensor on a device that is not there; what fails before is no such step."""
    output = tmp_path / "dry.jsonl"
    names = ["device", "growth", "attention triton", "times by rows", "drafting union", "search"]
    gpu.main(["--output", str(output), "--dry-run", "--only", ",".join(names)])
    steps = Results(output).steps
    assert all(any(name in step for step in steps) for name in names)
    assert {step["status"] for step in steps.values()} == {"reached"}
    worker = processes.Worker()
    try:
        found = worker.ask({"part": "attention", "name": "none", "interpret": False, "dry_run": True}, 120)
    finally:
        worker.close()
    assert found["done"] == "failed" and found["reason"].startswith("KeyError")


def test_where_a_dry_run_ends():
    """What vLLM's worker says without a device, 0.33 too; other errors are failures."""
    for message, is_end in (
        ("DP adjusted local rank 0 is out of bounds for 0 devices.", True),
        ("only 0 devices are visible", True),
        ("DP adjusted local rank 1 is out of bounds for 1 devices.", False),
    ):
        try:
            raise AssertionError(message)
        except AssertionError as error:
            assert (end_of_dry_run(error) is not None) == is_end


def test_a_wrong_attention_is_found(monkeypatch):
    attend = attention.tree_attention

    def blind(*args, tree, **kwargs):
        return attend(*args, tree=replace(tree, bits=tree.bits & ~1), **kwargs)  # no node sees the root

    monkeypatch.setattr(attention, "tree_attention", blind)
    (row,) = attention.measure({**SIZES, "name": "triton"})
    assert "from the reference" in row["problem"]


def test_what_waits_for_the_device_is_found(monkeypatch):
    attend, find = attention.tree_attention, drafting.match_keys

    def curious(query, *args, **kwargs):
        float(query.sum())
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(attention, "tree_attention", curious)
    (row,) = attention.measure({**SIZES, "name": "triton"})
    assert "waits for the device" in row["problem"]

    def curious_search(*args, **kwargs):
        keys = find(*args, **kwargs)
        return keys + 0 * len(keys.nonzero())

    def curious_draft(self, context):
        draft = propose(self, context)
        assert len(draft.tree.token_ids.nonzero()) >= 0
        return draft

    propose = drafting.LookupOnDevice.propose
    monkeypatch.setattr(drafting, "match_keys", curious_search)
    monkeypatch.setattr(drafting.LookupOnDevice, "propose", curious_draft)
    rows = [*drafting.measure_search(SIZES), *drafting.measure({**SIZES, "name": "lookup"})]
    assert all("waits for the device" in row["problem"] for row in rows)


def test_wrong_drafts_are_found(monkeypatch):
    assert all("problem" not in row for row in drafting.check_growth({}))
    honest, propose = drafting.match_keys, drafting.LookupOnDevice.propose

    def wrong_draft(self, context):
        draft = propose(self, context)
        return replace(draft, tree=replace(draft.tree, token_ids=draft.tree.token_ids + 1))

    monkeypatch.setattr(drafting, "match_keys", lambda *args, **kwargs: honest(*args, **kwargs) + 1)
    monkeypatch.setattr(drafting.LookupOnDevice, "propose", wrong_draft)
    problems = {row["name"]: "problem" in row for row in drafting.check_growth({})}
    assert problems["lookup"] and not problems["eagle2"]
    assert all("not what the reference finds" in row["problem"] for row in drafting.measure_search(SIZES))
    late = torch.tensor([[-1, 2, 0]])
    assert "before its parent" in drafting._wrong_tree((late, late), 2)


def test_identity(engine, prompts, monkeypatch):
    """Answers that are plain decoding's, and answers that are not."""
    texts = [prompts[0]["prompt_token_ids"][:9] * 3, prompts[1]["prompt_token_ids"]]
    plain = list(engines.answers(engine(**PLAIN), texts, 8))
    llm = engine(speculative_config={**LOOKUP, "num_speculative_tokens": 11}, **ENGINE)
    found = list(engines.answers(llm, texts, 8))
    for mine, theirs in zip(found, plain, strict=True):
        row = engines.compared(mine, theirs)
        assert "problem" not in row and row["same"] == 2 and row["logprob_deviation"] < 1e-4
    assert found[0]["tau"] > 1.2
    honest = DeviceTrees.stage

    def blind(self, input_batch):
        rows = honest(self, input_batch)
        self.bits[:, 1:, 0] &= ~1  # no node sees the root
        return rows

    monkeypatch.setattr(DeviceTrees, "stage", blind)
    llm.reset_prefix_cache()
    spoilt = next(engines.answers(llm, texts, 8))
    llm.reset_prefix_cache()
    assert engines.compared(spoilt, plain[0])["problem"].startswith("greedy: ")
    off = {**found[0], "logprobs": [[value + 0.1 for value in one] for one in plain[0]["logprobs"]]}
    assert "differ by 0.1" in engines.compared(off, plain[0])["problem"]


# ---- the plan


def test_plan():
    """What needs no vLLM first; engines with less of vLLM's machinery before those with more; short steps."""
    plan = make_plan(Sizes())
    names = [step.name for step in plan]
    assert len(set(names)) == len(names)
    groups = [step.group for step in plan if step.part != "tests"]
    first = next(i for i, group in enumerate(groups) if group != "torch")
    assert "torch" not in groups[first:]
    modes = [step.question["mode"] for step in plan if step.part == "identity"]
    assert modes == sorted(modes, key=["eager", "graphs", "defaults"].index)
    last_identity = max(i for i, step in enumerate(plan) if step.part == "identity")
    assert all(i > last_identity for i, step in enumerate(plan) if step.part == "speed")
    assert all(step.seconds <= 60 for step in plan if step.group == "torch")
    assert all(step.seconds <= 60 for step in plan if step.question.get("mode") == "eager")
    speed = [step.question for step in plan if step.part == "speed"]
    trees = {(one["nodes"], one["path"]) for one in speed if one["method"] == "eagle2" and one["path"]}
    assert trees == {(nodes, path) for nodes in (7, 15, 31, 63) for path in ("triton", "flash")}
    for target in ("smollm2", "8b"):
        assert {one["method"] for one in speed if one["target"] == target} == {"plain", "chain", "eagle2", "union"}
    assert all(one["batches"] == (1, 8, 64) for one in speed)


class FakeWorker:
    """Answers by the question's ``case``; ``cases``: what was asked."""

    cases, number = [], 0

    def __init__(self):
        FakeWorker.number += 1
        self.used, self.me = False, FakeWorker.number

    def ask(self, question, timeout):
        self.used, case = True, question["case"]
        self.cases.append((case, self.me))
        ends = {
            "dies": {"done": "failed", "reason": "killed by SIGSEGV", "traceback": ["and more"]},
            "wrong": {"done": "failed", "reason": "greedy: 1 of 6 answers are plain decoding's"},
            "lacks": {"done": "skipped", "reason": "vLLM cannot be imported"},
        }
        return {"rows": [{"ms": 1.0}], **ends.get(case, {"done": "passed"})}

    def close(self):
        return ""


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(gpu, "Worker", FakeWorker)
    FakeWorker.cases.clear()
    FakeWorker.number = 0
    return FakeWorker.cases


COMMON = {"interpret": False, "dry_run": False, "model": None}


def steps_of(*cases):
    return [Step(case, "attention", question={"case": case}) for case in cases]


def test_a_step_that_fails_loses_nothing_else(tmp_path, asked, capsys):
    """One dies, one finds something wrong, one lacks something: each is named, and the others are done."""
    results = Results(tmp_path / "gpu.jsonl", tmp_path / "copy.jsonl")
    plan = steps_of("good", "dies", "wrong", "lacks", "last")
    gpu.run(plan, results, COMMON, lambda: 1000.0)
    # What dies in a process that others have used is tried again in a new one; the next step gets another.
    assert asked == [("good", 1), ("dies", 1), ("dies", 2), ("wrong", 3), ("lacks", 3), ("last", 3)]
    written = Results(tmp_path / "gpu.jsonl").steps
    assert written == results.steps == Results(tmp_path / "copy.jsonl").steps
    assert [step["status"] for step in written.values()] == ["passed", "failed", "failed", "skipped", "passed"]
    assert written["dies"]["traceback"] == ["and more"] and written["dies"]["rows"] == [{"ms": 1.0}]
    shown = report(results, [step.name for step in plan])
    assert "2 passed, 2 failed, 1 skipped" in shown and "killed by SIGSEGV" in shown
    assert "dies: failed: killed by SIGSEGV" in capsys.readouterr().err


def test_a_command_goes_on_where_the_last_one_ended(tmp_path, asked):
    output, plan, left = tmp_path / "gpu.jsonl", steps_of("good", "wrong", "lacks", "late"), [100.0] * 6 + [10.0] * 9
    gpu.run(plan, Results(output), COMMON, lambda: left.pop(0) if left else 0.0)
    steps = Results(output).steps
    assert steps["good"]["status"] == "passed" and steps["late"] == {**steps["late"], "reason": "the time was over"}
    assert "| late | skipped |" in report(Results(output), ["late"]).replace("  ", "")
    with open(output, "a") as file:
        file.write('{"step": "late", "stat')  # a command was killed while it wrote
    asked.clear()
    gpu.run(plan, Results(output), COMMON, lambda: 1000.0)
    assert [case for case, _ in asked] == ["lacks", "late"]
    assert Results(output).steps["late"]["status"] == "passed"
    asked.clear()
    gpu.run(plan, Results(output), COMMON, lambda: 1000.0, retry=True)
    assert [case for case, _ in asked] == ["wrong", "lacks"]


def test_without_a_device_nothing_is_tried(tmp_path, asked):
    results = Results(tmp_path / "gpu.jsonl")
    plan = [Step("device", "device", question={"case": "dies"}), *steps_of("good")]
    gpu.run(plan, results, COMMON, lambda: 1000.0)
    assert list(results.steps) == ["device"] and "| good   | skipped | 0 | not reached" in report(
        results, ["device", "good"]
    ).replace("  0", "0").replace("|0", "| 0")


def attention_rows(*rows):
    """Of each path, rows of milliseconds."""
    found = {}
    for i, row in enumerate(rows):
        for path, ms in row.items():
            found.setdefault(path, []).append({"nodes": 15, "context": 64 * i, "batch": 1, "ms": ms, "floor_ms": 0.1})
    return found


def test_choice(tmp_path):
    def chosen(*rows, failed=(), steps=()):
        results = Results(tmp_path / "none.jsonl")
        for path, own in attention_rows(*rows).items():
            status = "failed" if path in failed else "passed"
            results._take({"step": f"attention {path}", "status": status, "rows": own})
        for path, ms in steps:
            row = {"nodes": 15, "context": 64, "batch": 1, "step_ms": ms}
            results._take({"step": f"speed graphs 8b eagle2 15 {path}", "status": "passed", "rows": [row]})
        return choose(results)

    slow, fast = {"triton": 2.0, "flash": 1.0, "chain": 0.1}, {"triton": 1.0, "flash": 1.1}
    assert chosen(slow, fast)["best"] == "flash"
    assert chosen(fast, fast)["best"] == "triton"
    wrong = chosen(slow, fast, failed=["flash"])
    assert wrong["best"] == "triton" and wrong["wrong"] == ["flash"]
    assert chosen(slow, {"triton": 1.0})["rows"] == 1
    steps = chosen(slow, fast, steps=[("triton", 5.0), ("flash", 6.0)])
    assert (steps["best"], steps["measure"]) == ("triton", "whole steps")
    assert chosen()["best"] is None


# ---- processes


@without_gpu
def test_a_worker_that_fails_keeps_its_rows():
    question = {"interpret": True, "dry_run": False, "part": "attention", "name": "sdpa", "batches": [1]}
    worker = processes.Worker()
    try:
        found = worker.ask({**question, "contexts": [8], "nodes": [3, None]}, 120)
        assert [row["nodes"] for row in found["rows"]] == [3] and found["done"] == "failed"
        assert found["reason"].startswith("TypeError: ") and "TypeError" in found["traceback"][-1]
        found = worker.ask({**question, "contexts": [8], "nodes": [3]}, 120)
        assert found["done"] == "passed"
    finally:
        worker.close()


def worker_of(script, tmp_path, monkeypatch):
    (tmp_path / "fake_worker.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return processes.Worker("fake_worker")


def test_a_worker_that_hangs_or_dies(tmp_path, monkeypatch):
    row = """import os, subprocess, sys, time\nsys.stdin.readline()\nprint('{"row": {"ms": 1}}', flush=True)\n"""
    child = "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, file=sys.stderr)\n"
    found = worker_of(row + child + "sys.stderr.flush()\ntime.sleep(600)", tmp_path, monkeypatch).ask({}, 5)
    assert found["rows"] == [{"ms": 1}] and found["reason"] == "no end in 5 s"
    assert has_ended(int(found["traceback"][0]))  # killed with its parent
    found = worker_of(row + "raise ValueError('bad luck')", tmp_path, monkeypatch).ask({}, 60)
    assert found["rows"] == [{"ms": 1}] and found["reason"] == "exit code 1: ValueError: bad luck"
    assert worker_of(row + "os.abort()", tmp_path, monkeypatch).ask({}, 60)["reason"] == "killed by SIGABRT"


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


def test_outcomes_of_tests(tmp_path, monkeypatch):
    """Of a file of tests: up to the one in which its process ends, too."""
    file = tmp_path / "test_it.py"
    file.write_text("import os\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): os.abort()\n")
    question = {"file": str(file), "interpret": False}
    found = processes.run_tests(question, 60)
    assert (found["rows"][0]["passed"], found["rows"][0]["failed"], found["done"]) == (1, 1, "failed")
    assert found["reason"].startswith("in ") and "test_it.py::test_c, killed by SIGABRT" in found["reason"]
    file.write_text("import pytest\ndef test_a(): pytest.skip('nothing here')\n")
    assert processes.run_tests(question, 60)["done"] == "skipped"

    output = "tests/v2/test_it.py::test_a[by depth] PASSED [ 50%]\ntests/v2/test_it.py::test_b[by depth] "
    monkeypatch.setattr(processes, "run_process", lambda *_: (None, output, ""))
    found = processes.run_tests(question, 9)
    assert found["rows"][0]["passed"] == 1
    assert found["reason"].startswith("in tests/v2/test_it.py::test_b[by depth], no end in 9 s")
    output = output.strip() + " FAILED [100%]\nE   assert 0\nFAILED tests/v2/test_it.py::test_b - assert 0\n"
    monkeypatch.setattr(processes, "run_process", lambda *_: (1, output, ""))
    found = processes.run_tests(question, 9)
    assert found["reason"] == "1 tests failed: FAILED tests/v2/test_it.py::test_b - assert 0"


# ---- training


def test_training_goes_on_where_the_last_command_ended(tmp_path, monkeypatch, capsys):
    """The first command makes answers and begins to train, the second goes on with the training only."""
    script = tmp_path / "stage.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "words = sys.argv[1:]\n"
        "out = pathlib.Path(words[words.index('--out') + 1]); out.mkdir(parents=True, exist_ok=True)\n"
        "if words[0] == 'data':\n"
        "    (out / 'answers.jsonl').write_text('{}\\n'); time.sleep(600)\n"
        "first = not (out / 'training_state.pt').exists(); (out / 'training_state.pt').touch()\n"
        "if first: time.sleep(600)\n"
        "[(out / name).touch() for name in ('config.json', 'model.safetensors', 'training_log.jsonl')]\n"
    )
    started = []

    def fake(*words):
        started.append(words[0])
        return [sys.executable, str(script), *map(str, words)]

    monkeypatch.setattr(train_drafter, "specplug", fake)
    monkeypatch.setattr(train_drafter, "GRACE", 2)
    words = ["--prompts", "p.jsonl", "--out", str(tmp_path / "run"), "--target", "t", "--minutes", "0.15"]
    words += ["--copy", str(tmp_path / "copy")]
    assert train_drafter.main(words) == 0 and started == ["data", "train"]
    assert "goes on with it" in capsys.readouterr().out and not (tmp_path / "copy").exists()
    assert train_drafter.main(words) == 0 and started == ["data", "train", "train"]
    assert {file.name for file in (tmp_path / "copy").iterdir()} == set(train_drafter.RESULTS)
