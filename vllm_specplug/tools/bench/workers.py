"""Engines to be measured: each method has one of its own, in a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_specplug.tools.bench.methods import Method, for_stock_host
from vllm_specplug.tools.bench.questions import Question
from vllm_specplug.utils.environment import end_of_log, engine_environment

_NUM_WARM_UPS = 3
ENGINE_MODULE = "vllm_specplug.hosts.probes.bench_worker"
PROBE_MODULE = "vllm_specplug.hosts.probes.step_parts_probe"


@dataclass
class Measurement:
    """What one method did with one batch of questions.

    Attributes:
        questions: their names.
        category: theirs, or ``mixed``.
        seconds: from the first request to the last answer.
        token_ids: of each answer.
        drafts, accepted: verified drafts and accepted drafted tokens.
        accepted_by_depth: drafts of which at least 1, 2, ... tokens were accepted; empty where not known.
        first_token_s, inter_token_s: of each answer, where known: seconds to its first token, and mean seconds from
            token to token after it.
        agree: of each answer, whether it has the baseline's tokens.
        concurrency, repeat: of which part of the run.
    """

    questions: list[str]
    category: str
    seconds: float
    token_ids: list[list[int]]
    drafts: int
    accepted: int
    accepted_by_depth: list[int] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    concurrency: int = 1
    repeat: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Engine(Protocol):
    """What is measured: a worker process or a running server."""

    method: Method

    def generate(
        self, questions: list[Question], max_tokens: int, temperature: float = 0.0, *, at_once: int | None = None
    ) -> Measurement: ...

    def close(self) -> int | None: ...

    def kill(self) -> None: ...


class Worker:
    """The parent's end of a worker process: one JSON line out, one JSON line back.

    Between its requests it is stopped (``SIGSTOP``): the threads of an idle engine wake up all the time, and would take
    a share of the cores that another one is measured on.
    """

    def __init__(
        self, method: Method, engine: dict[str, Any], kv_gib: int, log: Path, module: str = ENGINE_MODULE
    ) -> None:
        self.method, self.log, self.config = method, log, method.config
        self.machine: dict[str, Any] = {}  # what the worker said when it was ready
        # Intel's OpenMP runtime, which vLLM wants, makes transformers several times slower.
        environment = engine_environment(kv_gib=kv_gib, plugins=not method.stock)
        if method.by_transformers:
            environment = dict(os.environ, HF_HUB_OFFLINE="1")
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
                # So that its engine processes can be signalled with it.  The session stays: of a stopped group whose
                # parent has died the kernel makes an end (SIGHUP) in its own session only.
                process_group=0,
            )
        self.send(engine | ({} if method.config is None else {"speculative_config": method.config}))

    def send(self, message: dict) -> None:
        """Let it run, and write a request."""
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._obituary()) from None

    def receive(self) -> dict:
        """Wait for a reply, and stop it.

        Raises:
            RuntimeError: the worker died; the message carries the end of its log.
        """
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self._obituary())
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        """To the worker and its engine, if they live."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _obituary(self) -> str:
        return f"the engine of {self.method.label!r} has ended (code {self.process.wait()}); {end_of_log(self.log)}"

    def generate(
        self,
        questions: list[Question],
        max_tokens: int,
        temperature: float = 0.0,
        sampling: dict[str, Any] | None = None,
        at_once: int | None = None,
    ) -> Measurement:
        """Answer a batch, or as ``SamplingParams`` of ``sampling`` say; tokenisation is not timed."""
        sampling = sampling or ({"temperature": temperature, "seed": 0} if temperature else {})
        texts = [question.text for question in questions]
        lengths = [question.max_tokens or max_tokens for question in questions]
        self.send({"texts": texts, "max_tokens": lengths, "sampling": sampling, "at_once": at_once})
        return Measurement([question.name for question in questions], questions[0].category, **self.receive())

    def close(self) -> int | None:
        """Ask for the peak memory (MiB, the worker and its engine together) and end the worker."""
        self.send({"close": True})
        peak = self.receive()["peak_rss_mib"]
        self._signal(signal.SIGCONT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # all was said: an engine that is slow to leave is no failure
            self.kill()
        return peak

    def kill(self) -> None:
        """End the worker and its engine, whatever they do."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self._signal(signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Part:
    """One pass over the questions, ``concurrency`` of a batch under way at once."""

    concurrency: int
    repeat: int
    batches: list[list[Question]]


@contextlib.contextmanager
def started(methods: Sequence[Method], engine: dict[str, Any], kv_gib: int, module: str = ENGINE_MODULE):
    """Workers of all methods, ready; they are killed if anything fails inside, and their logs are kept then."""
    scratch = Path(tempfile.mkdtemp(prefix="specplug-bench-"))
    workers: list[Worker] = []
    try:
        for method in methods:
            log = scratch / f"{method.label.replace(':', '-')}.log"
            print(f"starting {method.label} (log: {log})", file=sys.stderr)
            own = "vllm_specplug.tools.bench.hf_worker" if method.by_transformers else module
            workers.append(Worker(for_stock_host(method, scratch), engine, kv_gib, log, own))
            workers[-1].machine = workers[-1].receive()  # one start at a time: compilers share the cores badly
        yield workers
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def measure(
    engines: Sequence[Engine], parts: list[Part], max_tokens: int, temperature: float = 0.0
) -> tuple[dict[str, list[Measurement]], dict[str, int | None]]:
    """Warm all engines up, and give every batch to one after the other.

    Returns:
        Measurements (in the same order for all) and peak memory in MiB, by method label.
    """
    engines = list(engines)
    results: dict[str, list[Measurement]] = {engine.method.label: [] for engine in engines}
    for engine in engines:
        for batch in (parts[0].batches * _NUM_WARM_UPS)[:_NUM_WARM_UPS]:
            engine.generate(batch, max_tokens, temperature)
    done, total = 0, sum(len(part.batches) for part in parts)
    for part in parts:
        for batch in part.batches:
            turn = done % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                found = engine.generate(batch, max_tokens, temperature, at_once=part.concurrency)
                found.concurrency, found.repeat = part.concurrency, part.repeat
                if len({question.category for question in batch}) > 1:
                    found.category = "mixed"
                results[engine.method.label].append(found)
            done += 1
            where = f"{done}/{total} at concurrency {part.concurrency}: {batch[0].category}"
            print(f"\r{where:<60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results, {engine.method.label: engine.close() for engine in engines}
