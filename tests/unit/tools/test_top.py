"""The plugin's counters, and ``specplug top`` on the metrics text of a server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import REGISTRY, generate_latest
from rich.console import Console

from vllm_specplug.cli import top
from vllm_specplug.cli.cli import main
from vllm_specplug.utils import metrics

#: Metrics text of two engines in the form of vLLM 0.32.0.
TEXT = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 320.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


@pytest.fixture
def counters():
    """Counters as a worker opens them; this process reports them."""
    counters = metrics.Counters(metrics.publish())
    counters.add("steps", 20)
    counters.add("draft_seconds", 0.04)
    counters.add("verify_seconds", 0.5)
    counters.add("proposer failed", 3)
    counters.add("proposer failed")
    return counters


def shown(text: str) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(top.table(top.counters_of(text)))
    return console.file.getvalue()


def test_counters_reach_the_registry(counters):
    text = generate_latest(REGISTRY).decode()
    assert "specplug:steps_total 20.0" in text
    assert 'specplug:fallbacks_total{reason="proposer failed"} 4.0' in text
    metrics.publish()  # a second engine in this process: its counters start at 0
    assert "specplug:steps_total 0.0" in generate_latest(REGISTRY).decode()


def test_versions_of_the_drafter_are_told_apart(counters):
    """Only the newest are kept; an old one's counts are not added to the one that takes its place."""
    counters.serve_version(1)
    for version in (1, 2, 5):
        counters.add_trees(version, 10, 10 * version)
    counters.add_trees(5, 10, 0)
    counters.serve_version(5)
    text = generate_latest(REGISTRY).decode()
    assert "specplug:drafter_version 5.0" in text
    assert 'specplug:drafter_trees_total{version="5"} 20.0' in text
    assert 'version="1"' not in text
    lines = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in shown(TEXT + text).splitlines()
        if "│" in line
    }
    assert lines["version of the drafter"] == "5"
    assert lines["tau with version 2, since its start"] == "3.00"
    assert lines["tau with version 5, since its start"] == "3.50"
    now = top.counters_of(TEXT + text)
    assert top.since(now, now)["drafter_trees 5"] == 20 and top.since(now, now)["drafts"] == 0


def test_replicas_count_beside_each_other():
    path = metrics.publish(replicas=2)
    for replica in (0, 1):
        metrics.Counters(path, replica).add("steps", 1 + replica)
    assert "specplug:steps_total 3.0" in generate_latest(REGISTRY).decode()


def test_a_killed_process_leaves_no_file(tmp_path):
    """The counters of an engine that was killed do not stay in the temporary folder."""
    program = "import os, signal; from vllm_specplug.utils.metrics import publish; publish(); os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == -9 and not list(tmp_path.iterdir())


def test_counters_without_a_file_go_nowhere():
    counters = metrics.Counters(None)
    with counters.timed("draft_seconds"):
        counters.add("steps")
    assert counters.values() == [0.0] * len(metrics.COUNTERS)


def test_table(counters):
    lines = [line.split("│")[1:3] for line in shown(TEXT + generate_latest(REGISTRY).decode()).splitlines()]
    rows = {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}
    assert rows["tau (bonus token included)"] == "2.25"  # 1 + 50 / 40
    assert rows["nodes per tree"] == "8.00"
    assert (rows["accepted at depth 1"], rows["accepted at depth 2"]) == ("75.00 %", "50.00 %")
    assert "accepted at depth 3" not in rows
    assert (rows["draft time per step"], rows["verification time per step"]) == ("2.00 ms", "25.00 ms")
    assert rows["fallback: proposer failed"] == "4"


def test_before_the_first_draft():
    none = TEXT.replace("30.0", "0.0").replace("10.0", "0.0")
    assert "-" in shown(none)


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        text = TEXT

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.text.encode())

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", Handler
    http.shutdown()
    http.server_close()


def test_command(server, capsys):
    url, handler = server
    assert main(["top", url, "--once"]) == 0
    assert "2.25" in capsys.readouterr().out
    handler.text = "# TYPE up gauge\nup 1.0\n"
    assert main(["top", url, "--once"]) == 2
    assert "reports no speculation" in capsys.readouterr().err
    assert main(["top", url, "--interval", "0"]) == 2


def test_into_a_file_the_table_is_written_after_each_interval(server, tmp_path):
    """Also if it is terminated later."""
    out = tmp_path / "top.txt"
    program = [sys.executable, "-m", "vllm_specplug.cli.cli", "top", server[0], "--interval", "0.1"]
    with open(out, "w") as sink, subprocess.Popen(program, stdout=sink) as running:
        deadline = time.monotonic() + 60
        while out.read_text().count("drafted trees") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        running.terminate()
    assert out.read_text().count("drafted trees") >= 2
