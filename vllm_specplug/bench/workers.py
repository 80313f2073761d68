"""Worker processes with one engine per method, and the measurement that gives them questions in turn."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_specplug.bench.methods import Method, for_stock_vllm
from vllm_specplug.bench.questions import Question
from vllm_specplug.utils.environment import available_gib, end_of_log, engine_environment, process_group_gib
from vllm_specplug.utils.processes import terminate_like_interrupt

_NUM_WARM_UPS = 3
ENGINE_MODULE = "vllm_specplug.vllm.probes.bench_worker"
PROBE_MODULE = "vllm_specplug.vllm.probes.step_parts_probe"


@dataclass
class Measurement:
    """Measurement of one method on one batch of questions.

    Attributes:
        questions: names of the questions.
        category: category of the questions, or ``mixed``.
        seconds: time from the first request to the last answer.
        token_ids: tokens of each answer.
        drafts, accepted: numbers of verified drafts and of accepted drafted tokens.
        accepted_by_depth: number of drafts with at least 1, 2, ... accepted tokens; empty if unknown.
        first_token_s, inter_token_s: seconds to the first token of each answer, and mean seconds between its later
            tokens; empty if unknown.
        agree: for each answer, whether it has the baseline's tokens.
        agree_without_drafts: the same for the tokens of ``no-drafts``; empty if unknown.
        concurrency, repeat: the part of the run that it belongs to.
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
    agree_without_drafts: list[bool] = field(default_factory=list)
    concurrency: int = 1
    repeat: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Measured(Protocol):
    """A method to measure: a worker process or a running server."""

    method: Method

    def generate(
        self, questions: list[Question], max_tokens: int, temperature: float = 0.0, *, at_once: int | None = None
    ) -> Measurement: ...

    def close(self) -> int | None: ...

    def kill(self) -> None: ...


class Worker:
    """The parent's end of a worker process: it writes one JSON line and reads one JSON line back.

    The process is stopped (``SIGSTOP``) between its requests.  Otherwise the threads of an idle engine would wake up
    all the time and take CPU time from the engine that is measured.
    """

    def __init__(
        self, method: Method, engine: dict[str, Any], kv_gib: int, log: Path, module: str = ENGINE_MODULE
    ) -> None:
        self.method, self.log = method, log
        environment = engine_environment(kv_gib=kv_gib, plugins=not method.stock)
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
                # A group of its own, so that signals reach its engine processes too, but in the same session: if the
                # parent dies, the kernel ends a stopped group (SIGHUP) only within the parent's session.
                preexec_fn=os.setpgrp,  # the argument process_group needs Python 3.11
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self.send(engine | ({} if method.config is None else {"speculative_config": method.config}))

    def send(self, message: dict) -> None:
        """Let the worker continue and send it a request."""
        self._signal(signal.SIGCONT)
        try:
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()
        except BrokenPipeError:
            raise RuntimeError(self._end_message()) from None

    def receive(self) -> dict:
        """Wait for a reply and stop the worker.

        Raises:
            RuntimeError: the worker has ended; the message holds the end of its log.
        """
        line = self._output.readline()
        if not line:
            raise RuntimeError(self._end_message())
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its engine if they are running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _end_message(self) -> str:
        return f"the engine of {self.method.label!r} has ended (code {self.process.wait()}); {end_of_log(self.log)}"

    def generate(
        self,
        questions: list[Question],
        max_tokens: int,
        temperature: float = 0.0,
        sampling: dict[str, Any] | None = None,
        at_once: int | None = None,
    ) -> Measurement:
        """Let the worker answer a batch, tokenisation not timed; ``sampling`` are arguments of ``SamplingParams``."""
        sampling = sampling or ({"temperature": temperature, "seed": 0} if temperature else {})
        if not self.method.drafts:
            sampling = sampling | {"extra_args": {"speculation": False}}
        texts = [question.text for question in questions]
        self.send({"texts": texts, "max_tokens": max_tokens, "sampling": sampling, "at_once": at_once})
        return Measurement([question.name for question in questions], questions[0].category, **self.receive())

    def close(self) -> int | None:
        """End the worker and return its peak memory in MiB, that of its engine included."""
        self.send({"close": True})
        peak = self.receive()["peak_rss_mib"]
        self._signal(signal.SIGCONT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # all replies were received: an engine that ends slowly is no failure
            self.kill()
        return peak

    def kill(self) -> None:
        """End the worker and its engine in any state."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self._signal(signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Part:
    """One pass over the questions, ``concurrency`` at a time."""

    concurrency: int
    repeat: int
    batches: list[list[Question]]


class MemoryCheck:
    """Ends a run whose engines will not fit into memory: later, the system would kill one of them without a word."""

    def __init__(self) -> None:
        self._largest = 0.0

    def started(self, used: float | None, available: float | None, num_left: int) -> None:
        """Note that one more engine has started.

        Args:
            used: GiB that it takes.
            available: GiB that are free.  None, of either: unknown, and nothing is checked.
            num_left: engines that will follow.

        Raises:
            RuntimeError: they need more than is free, if each takes as much as the largest one so far.
        """
        if used is None or available is None:
            return
        self._largest = max(self._largest, used)
        if num_left * self._largest > available:
            raise RuntimeError(
                f"not enough memory: {available:.1f} GiB are free for {num_left} more engines of up to "
                f"{self._largest:.1f} GiB each; compare fewer methods at once (--methods)"
            )


@contextlib.contextmanager
def started(
    methods: Sequence[Method], engine: dict[str, Any], kv_gib: int, module: str = ENGINE_MODULE
) -> Iterator[list[Worker]]:
    """Start workers for all methods; if the block fails, they are killed and their logs are kept.

    Within the block SIGTERM is an interrupt: engines would outlive this process otherwise.

    Raises:
        RuntimeError: an engine has ended, or there is no memory for all of them.
    """
    scratch = Path(tempfile.mkdtemp(prefix="specplug-bench-"))
    workers: list[Worker] = []
    memory = MemoryCheck()
    try:
        with terminate_like_interrupt():
            for method in methods:
                log = scratch / f"{method.label.replace(':', '-')}.log"
                print(f"starting {method.label} (log: {log})", file=sys.stderr)
                workers.append(Worker(for_stock_vllm(method, scratch), engine, kv_gib, log, module))
                # One start at a time, because two compilers slow each other down.
                workers[-1].receive()
                used = process_group_gib(workers[-1].process.pid)
                memory.started(used, available_gib(), len(methods) - len(workers))
            yield workers
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def measure(
    engines: Sequence[Measured], parts: list[Part], max_tokens: int, temperature: float = 0.0
) -> tuple[dict[str, list[Measurement]], dict[str, int | None]]:
    """Warm all engines up, then give each batch to one engine after the other.

    An interrupt (Ctrl-C) ends the run, and its measurements are kept.

    Returns:
        Measurements (in the same order for all engines) and peak memory in MiB, both by method label.
    """
    engines = list(engines)
    results: dict[str, list[Measurement]] = {engine.method.label: [] for engine in engines}
    for engine in engines:
        for batch in (parts[0].batches * _NUM_WARM_UPS)[:_NUM_WARM_UPS]:
            engine.generate(batch[: parts[0].concurrency], max_tokens, temperature)
    turns = [(part, batch) for part in parts for batch in part.batches]
    done, total = 0, len(turns)
    try:
        for part, batch in turns:
            turn = done % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                found = engine.generate(batch, max_tokens, temperature, at_once=part.concurrency)
                found.concurrency, found.repeat = part.concurrency, part.repeat
                if len({question.category for question in batch}) > 1:
                    found.category = "mixed"
                results[engine.method.label].append(found)
            done += 1
            where = f"{done}/{total} at concurrency {part.concurrency}: {found.category}"
            print(f"\r{where:<60}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return results, {engine.method.label: engine.close() for engine in engines}
    except KeyboardInterrupt:
        if not done:
            raise
        print(f"\ninterrupted: the result has {done} of {total} batches", file=sys.stderr)
        for engine in engines:
            del results[engine.method.label][done:]
            engine.kill()
        return results, {engine.method.label: None for engine in engines}
