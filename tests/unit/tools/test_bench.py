"""The parts of ``specplug bench`` that need no engine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_specplug.bench import command as bench_command
from vllm_specplug.bench.command import interruption
from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.questions import Question, make_batches
from vllm_specplug.bench.server import Server
from vllm_specplug.bench.workers import Measurement, MemoryCheck, Part, Worker, measure
from vllm_specplug.cli import cli
from vllm_specplug.vllm.probes import bench_worker


def test_several_at_once_are_asked_in_batches_of_any_category():
    questions = [Question(str(i), "abc"[i % 3], "?") for i in range(20)]
    assert make_batches(questions, 2) == [questions[:16], questions[16:]]
    assert make_batches(questions, 1) == [[question] for question in questions]


class FakeEngine:
    """Answers immediately; records the order of calls over all engines."""

    calls: list[str] = []

    def __init__(self, label):
        self.method = Method(label, None)

    def generate(self, questions, max_tokens, temperature=0.0, at_once=None):
        self.calls.append(self.method.label)
        names = [question.name for question in questions]
        return Measurement(names, questions[0].category, 1.0, [[1]] * len(names), 0, 0)

    def close(self):
        return 7

    def kill(self):
        self.calls.append(f"kill {self.method.label}")


def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    monkeypatch.setattr(FakeEngine, "calls", [])
    questions = [Question(str(i), "a", "?") for i in range(4)]
    parts, honest = [Part(1, 0, make_batches(questions, 1))], FakeEngine.generate

    def interrupted(self, batch, *args, **kwargs):
        if self.method.label == "y" and len(FakeEngine.calls) > 6 and batch[0].name == "2":
            raise KeyboardInterrupt
        return honest(self, batch, *args, **kwargs)

    monkeypatch.setattr(FakeEngine, "generate", interrupted)
    engines = [FakeEngine("plain"), FakeEngine("y")]
    results, peaks = measure(engines, parts, 8)
    assert {label: [m.questions for m in found] for label, found in results.items()} == {
        label: [["0"], ["1"]] for label in ("plain", "y")
    }
    assert peaks == {"plain": None, "y": None} and FakeEngine.calls[-2:] == ["kill plain", "kill y"]
    assert interruption(results, parts) == {"interrupted": "2 of 4 batches"}
    assert interruption(results, [Part(1, 0, parts[0].batches[:2])]) == {}


def test_an_interrupt_while_engines_end_keeps_all(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "close", interrupted)
    parts = [Part(1, 0, make_batches([Question("0", "a", "?")], 1))]
    results, peaks = measure([FakeEngine("plain")], parts, 8)
    assert [one.questions for one in results["plain"]] == [["0"]] and peaks == {"plain": None}
    assert interruption(results, parts) == {}


def test_an_interrupt_before_the_first_batch_ends_the_run(monkeypatch):
    monkeypatch.setattr(FakeEngine, "calls", [])

    def interrupted(self, *args, at_once=None, **kwargs):
        if at_once:
            raise KeyboardInterrupt
        return Measurement(["0"], "a", 1.0, [[1]], 0, 0)

    monkeypatch.setattr(FakeEngine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure([FakeEngine("plain")], [Part(1, 0, [[Question("0", "a", "?")]])], 8)


def test_engines_take_turns_and_each_begins_sometimes(monkeypatch):
    monkeypatch.setattr(FakeEngine, "calls", [])
    questions = [Question(str(i), "ab"[i % 2], "?") for i in range(4)]
    parts = [Part(1, repeat, make_batches(questions, 1)) for repeat in range(2)]
    parts.append(Part(4, 0, make_batches(questions, 4)))
    results, peaks = measure([FakeEngine("x"), FakeEngine("y")], parts, 8)
    assert peaks == {"x": 7, "y": 7}
    warm_ups, calls = FakeEngine.calls[:6], FakeEngine.calls[6:]
    assert sorted(warm_ups) == ["x"] * 3 + ["y"] * 3
    assert [calls[i : i + 2] for i in range(0, len(calls), 2)] == [["x", "y"], ["y", "x"]] * 4 + [["x", "y"]]
    assert [m.questions for m in results["x"]] == [m.questions for m in results["y"]]
    assert [(m.concurrency, m.repeat) for m in results["x"]] == [(1, 0)] * 4 + [(1, 1)] * 4 + [(4, 0)]
    assert results["x"][-1].category == "mixed"


CHATTY = """
from vllm_specplug.utils.worker_pipe import run_worker

def start(arguments):
    print("loading")
    seen = []

    def answer(request):
        print("thinking")
        seen.append(request["texts"])
        return {"seconds": 1.0, "token_ids": [[len(seen)]], "drafts": 0, "accepted": 0}

    return {"model": arguments["model"]}, answer

run_worker(start)
"""


def test_a_worker_answers_line_by_line_whatever_it_prints(tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text(CHATTY)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]))
    worker = Worker(Method("x", None), {"model": "m"}, 1, tmp_path / "log", "chatty")
    try:
        assert worker.receive() == {"model": "m"}
        asked = [worker.generate([Question("q", "c", "?")], 8) for _ in range(2)]
        assert [found.token_ids for found in asked] == [[[1]], [[2]]]
        assert 1 < worker.close() < 2000
        assert worker.process.returncode == 0
    finally:
        worker.kill()
    assert (tmp_path / "log").read_text().split() == ["loading", "thinking", "thinking"]


def test_engines_that_will_not_fit_into_memory_end_the_run_early():
    memory = MemoryCheck()
    memory.started(3.0, 17.0, 4)
    memory.started(2.0, 15.0, 3)
    memory.started(2.9, 12.1, 4)
    with pytest.raises(RuntimeError, match=r"8.0 GiB are free for 2 more engines of up to 4.1 GiB .*--methods"):
        memory.started(4.1, 8.0, 2)


def test_memory_that_is_not_known_is_not_checked():
    MemoryCheck().started(None, 1.0, 9)
    MemoryCheck().started(1.0, None, 9)


PARENT = """
import sys
from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.workers import started

with started([Method("x", None)], {"model": "m"}, 1, "family"):
    sys.stdin.read()
"""
FAMILY = """
import os, subprocess, sys, time
from vllm_specplug.utils.worker_pipe import run_worker

def start(arguments):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(float(os.environ["START_SECONDS"]))
    return {}, lambda request: {}

run_worker(start)
"""


def states_of(pids):
    """Return the state letters of ``/proc/PID/stat``; processes that have ended are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return [state for state in found if state != "Z"]


def wait_for_states(pids, wanted):
    for _ in range(300):
        if states_of(pids) == wanted:
            return
        time.sleep(0.1)
    assert states_of(pids) == wanted


@pytest.fixture
def start_family(tmp_path):
    """``start_family(seconds)`` returns the parent of a worker that starts for so long, and the pids of both others."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "family.py").write_text(FAMILY)
    started, pids = [], []

    def start(seconds):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "START_SECONDS": str(seconds)},
            # Under nohup SIGHUP would be ignored, and the worker would run until its requests end.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        started.append(parent)
        for _ in range(600):
            if (tmp_path / "pids").exists() and len(found := (tmp_path / "pids").read_text().split()) == 2:
                pids.extend(map(int, found))
                return parent, pids
            assert parent.poll() is None
            time.sleep(0.1)
        raise AssertionError("the worker has not begun to start")

    yield start
    for parent in started:
        parent.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_an_idle_worker_is_stopped_with_its_family_and_ends_when_its_parent_is_killed(start_family):
    parent, pids = start_family(0)
    wait_for_states(pids, ["T", "T"])
    parent.kill()
    parent.wait()
    wait_for_states(pids, [])


@pytest.mark.slow
def test_a_starting_worker_ends_with_its_family_when_its_parent_is_terminated(start_family):
    """As ``kill`` and ``timeout`` do; Ctrl-C is the same to the parent."""
    parent, pids = start_family(600)
    parent.terminate()
    assert "KeyboardInterrupt" in parent.communicate()[1]
    wait_for_states(pids, [])


class FakeVllm(BaseHTTPRequestHandler):
    """Sends two tokens per chunk; each answer adds 5 drafts to the counters, 3 of them accepted to depth 1, 1 to 2."""

    protocol_version = "HTTP/1.0"

    def log_message(self, *args):
        pass

    def reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": "tiny"}]}))
        n, at = self.server.answers, 'engine="0",model_name="tiny"'
        prefix = "vllm:spec_decode_num_"
        lines = [f"# TYPE {prefix}drafts counter", f"{prefix}drafts_total{{{at}}} {5.0 * n}"]
        for position, count in ((1, 1.0), (0, 3.0)):
            lines.append(f'{prefix}accepted_tokens_per_pos_total{{{at},position="{position}"}} {count * n}')
        return self.reply("\n".join(lines) + "\n")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.server.bodies.append(body)
        if text == "wait" and not self.server.two_at_once():
            return self.reply('{"error": "alone"}', 400)
        if text == "bad":
            return self.reply('{"error": "too long"}', 400)
        self.server.answers += 1
        chunks = [{"choices": [{"delta": {"role": "assistant"}}]}]
        chunks += [{"choices": [{"token_ids": [i, len(text)]}]} for i in range(3 if text != "mute" else 0)]
        self.reply("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeVllm) as fake:
        fake.answers, fake.bodies = 4, []
        pair = threading.Barrier(2, timeout=1)

        def two_at_once():
            with contextlib.suppress(threading.BrokenBarrierError):
                pair.wait()
            return not pair.broken

        fake.two_at_once = two_at_once
        threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
        yield fake, f"http://127.0.0.1:{fake.server_port}"
        fake.shutdown()


def test_a_server_is_measured(server):
    fake, url = server
    found = Server("plain", url + "/v1/").generate([Question(str(i), "c", "?" * i) for i in (1, 2)], 6, 0.5)
    assert found.token_ids == [[0, 1, 1, 1, 2, 1], [0, 2, 1, 2, 2, 2]]
    assert (found.drafts, found.accepted, found.accepted_by_depth) == (10, 8, [6, 2])
    assert len(found.first_token_s) == len(found.inter_token_s) == 2 and min(found.first_token_s) > 0
    assert {body["temperature"] for body in fake.bodies} == {0.5} and all("seed" in body for body in fake.bodies)


def test_every_engine_of_a_benchmark_gets_the_switches_of_the_template(server, tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    switches, questions = {"enable_thinking": False}, tmp_path / "q.jsonl"
    questions.write_text('{"question": "1 + 1?"}\n')
    command = ["bench", "--questions", str(questions), "--chat-template-kwargs", json.dumps(switches)]
    assert cli.main([*command, "--server", server[1]]) == 0
    assert all(body["chat_template_kwargs"] == switches for body in server[0].bodies)
    engines = []

    @contextlib.contextmanager
    def started(methods, engine, kv_gib):
        engines.append(engine)
        raise RuntimeError("enough")
        yield

    monkeypatch.setattr(bench_command, "started", started)
    assert cli.main([*command, "--methods", "plain", "--target", str(tmp_path)]) == 2
    assert engines[0]["chat_template_kwargs"] == switches


def test_workers_apply_the_switches_of_the_template():
    class Tokenizer:
        def apply_chat_template(self, chat, enable_thinking=True, **given):
            assert given == {"add_generation_prompt": True, "return_dict": False}
            return [7] if enable_thinking else [7, 8]

    config = SimpleNamespace(max_model_len=9)
    llm = SimpleNamespace(get_tokenizer=Tokenizer, llm_engine=SimpleNamespace(model_config=config))
    for switches, ids in ((None, [7]), ({"enable_thinking": False}, [7, 8])):
        assert bench_worker.prompts_of(llm, ["a"], 2, switches) == [{"prompt_token_ids": ids}]


def test_a_server_is_asked_for_as_many_at_once_as_wanted(server):
    waiting = [Question(str(i), "c", "wait") for i in range(4)]
    assert len(Server("plain", server[1]).generate(waiting, 6, at_once=2).token_ids) == 4
    with pytest.raises(RuntimeError, match="alone"):
        Server("plain", server[1]).generate(waiting, 6, at_once=1)


@pytest.mark.parametrize(("text", "said"), [("bad", "too long"), ("mute", "no token ids")])
def test_a_server_that_refuses_is_quoted(server, text, said):
    with pytest.raises(RuntimeError, match=said):
        Server("plain", server[1]).generate([Question("7", "c", text)], 6)


@pytest.mark.parametrize(
    "argv", [["--concurrency", "0"], ["--concurrency", "1,1"], ["--concurrency", "a"], ["--server", "ours=host:1"]]
)
def test_bad_numbers_and_addresses(argv, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *argv])
    assert "expected" in capsys.readouterr().err
