"""Puts stress on a server with draft trees: each finished answer equals a plain server's, and no resource is left over.

    python -m benchmarks.end_to_end.stress --minutes 15 --out benchmarks/results/stress.json

Tiny random models in float32.  Requests with random parameters, all greedy or seeded, come in, ``--concurrency`` at
once; a fifth of them is aborted, and the KV space holds a tenth of what they need together.  A plain server beside
it answers the finished ones again.  Exit code 1 where an answer differs, a request fails, a request or block is
left on the server at rest, a drafter failed, or memory has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.doubles import tiny
from vllm_specplug.cli.server_process import Server, read_counter, wait_until_ready
from vllm_specplug.utils.environment import provenance

TEXT = "the a of river stone light code number list train 1 apple green 22 seven why how tell write count ab er e t! K"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
#: Share of the requests that are aborted, and share of their tokens that the KV cache has room for.
ABORTED_SHARE, KV_SHARE = 0.2, 0.1
MAX_MODEL_LEN, BLOCK_SIZE, LONGEST_ANSWER = 256, 32, 80
#: Requests at once on the plain server, so that it keeps up.
PLAIN_CONCURRENCY = 12
#: Growth of resident memory from the second third of the traffic to its last, in MiB.
MAX_GROWTH_MIB = 32.0
#: In a shorter run memory still grows by warm-up.
MIN_MINUTES = 5
MAX_PROBLEMS = 20

WHOLE = {"num_speculative_tokens": 12, "min_node_value": 0.0, "min_level_value": 0.0}
EAGLE2 = {"method": "eagle2", "draft_depth": 4, "draft_top_k": 4, **WHOLE}


@dataclass(frozen=True)
class Case:
    """One request: its path, its body, and when it is aborted.

    Attributes:
        path: of the API.
        body: its JSON, but for the model's name.
        abort_after: chunks of a streamed answer, or seconds of waiting for a whole one, or None.
    """

    path: str
    body: dict[str, Any]
    abort_after: float | None = None

    @property
    def asked_tokens(self) -> int:
        """KV slots that it may fill: one per character of its prompt, one per token of its answers."""
        text = self.body["prompt"] if "prompt" in self.body else self.body["messages"][0]["content"]
        return self.body.get("n", 1) * (len(text) + self.body["max_tokens"])


def make_case(rng: random.Random) -> Case:
    """Make a request with random parameters, greedy or seeded, so that its answer is determined."""

    def maybe(share: float, **changes: Any) -> dict[str, Any]:
        return changes if rng.random() < share else {}

    words = TEXT.split()
    text = " ".join(words[: rng.choice((0, 8, 16))] + rng.choices(words, k=rng.randrange(1, 14)))  # prefixes are shared
    tokens = rng.randrange(1, LONGEST_ANSWER)
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": rng.choice((0.0, 0.0, 0.7, 1.0))}
    body |= {"seed": rng.randrange(1 << 30), "stream": rng.random() < 0.5, "return_token_ids": True}
    body |= maybe(0.2, top_k=rng.randrange(2, 40)) | maybe(0.2, top_p=rng.uniform(0.5, 1.0)) | maybe(0.15, min_p=0.05)
    body |= maybe(0.1, repetition_penalty=1.2) | maybe(0.1, presence_penalty=0.6) | maybe(0.1, frequency_penalty=0.4)
    body |= maybe(0.1, logit_bias={str(rng.randrange(3, 150)): rng.uniform(-3, 3)}) | maybe(0.1, stop=["e", "a b"])
    body |= maybe(0.1, bad_words=["a", "t!"]) | maybe(0.1, stop_token_ids=rng.sample(range(3, 150), 5))
    body |= maybe(0.3, ignore_eos=True) | maybe(0.1, vllm_xargs={"speculation": 0})
    if body["temperature"] and rng.random() < 0.15:
        body["n"] = 3
    kind = rng.random()
    if kind < 0.1:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        # With a grammar these are an internal error on the plain server too.
        for name in ("ignore_eos", "stop_token_ids", "bad_words"):
            body.pop(name, None)
    elif kind < 0.2:
        body["min_tokens"] = rng.randrange(tokens)
    elif kind < 0.3:
        body["allowed_token_ids"] = rng.sample(range(3, 150), 60)
    chat = rng.random() < 0.5
    if not body["stream"] and rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    aborted = rng.random() < ABORTED_SHARE
    abort_after = None if not aborted else rng.randrange(12) if body["stream"] else rng.uniform(0.01, 0.5)
    if chat:
        return Case("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, abort_after)
    return Case("/v1/completions", {**body, "prompt": text}, abort_after)


def num_kv_blocks(concurrency: int) -> int:
    """Return the blocks for a tenth of what so many requests need on average, at least enough for the longest one.

    Raises:
        ValueError: too few requests for a tenth of them to hold one of full length.
    """
    rng = random.Random(0)
    load = concurrency * statistics.mean(make_case(rng).asked_tokens for _ in range(2000))
    blocks = round(KV_SHARE * load / BLOCK_SIZE)
    if blocks < MAX_MODEL_LEN // BLOCK_SIZE + 1:
        raise ValueError(f"a tenth of {concurrency} requests is less than the longest one: raise --concurrency")
    return 1 + blocks  # vLLM reserves one


def send(server: Server, case: Case, patience: float = 120) -> list[dict[str, Any]] | None:
    """Return the choices of an answer; None if it was aborted.

    Raises:
        RuntimeError: the server refused the request or broke off.
    """
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=patience)
    try:
        connection.request(
            "POST", case.path, json.dumps({"model": "demo", **case.body}), {"Content-Type": "application/json"}
        )
        if case.abort_after is not None and not case.body["stream"]:
            connection.sock.settimeout(case.abort_after)
            with contextlib.suppress(TimeoutError):
                connection.getresponse()
            return None  # closing the connection is the abort
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read().decode()[:300]} to {json.dumps(case.body)}")
        if case.body["stream"]:
            return _read_stream(reply, case)
        return [_choice(choice) for choice in json.load(reply)["choices"]]
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"{type(error).__name__}: {error} to {json.dumps(case.body)}") from error
    finally:
        connection.close()


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    values = list(numbers(choice["logprobs"]))
    return {"token_ids": choice["token_ids"], "text": text, "ended": choice["finish_reason"], "logprobs": values}


def numbers(value: Any) -> Iterator[float]:
    """Return all numbers in a JSON value, in order."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def _read_stream(reply: http.client.HTTPResponse, case: Case) -> list[dict[str, Any]] | None:
    found = [{"token_ids": [], "text": "", "ended": None, "logprobs": []} for _ in range(case.body.get("n", 1))]
    count = 0
    for line in reply:
        if case.abort_after is not None and count >= case.abort_after:
            return None
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "choices" not in chunk:
            raise RuntimeError(f"in the stream: {chunk} to {json.dumps(case.body)}")
        count += 1
        for choice in chunk["choices"]:
            one = found[choice["index"]]
            one["text"] += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
            one["token_ids"] += choice.get("token_ids") or []
            one["ended"] = choice.get("finish_reason") or one["ended"]
    return None if case.abort_after is not None else found


def same(answer: list[dict[str, Any]], plain: list[dict[str, Any]]) -> bool:
    """Whether tokens, texts and finish reasons are equal, and log-probabilities up to floating-point error."""
    return len(answer) == len(plain) and all(
        all(one[name] == other[name] for name in ("token_ids", "text", "ended"))
        and len(one["logprobs"]) == len(other["logprobs"])
        and all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
        for one, other in zip(answer, plain, strict=True)
    )


def resident_mib(server: Server) -> float:
    """Return the resident memory of a server and the processes it started."""
    total = 0
    for process in (psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20


@dataclass
class Traffic:
    """Requests on both servers, and their results so far.

    Attributes:
        cases: of which each worker takes the next.
        deadline: no request starts later (``time.monotonic``).
        problems: answers that differ and requests that failed; after ``MAX_PROBLEMS`` no request starts.
        kinds: how often each parameter was in a finished request.
    """

    trees: Server
    plain: Server
    cases: Iterator[Case]
    deadline: float
    finished: int = 0
    aborted: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    kinds: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: queue.Queue = queue.Queue(maxsize=64)

    def ask_trees(self) -> None:
        """Send cases until the deadline; the loop of a worker."""
        while time.monotonic() < self.deadline and len(self.problems) < MAX_PROBLEMS:
            with self._lock:
                case = next(self.cases)
            try:
                answer = send(self.trees, case)
            except (RuntimeError, ValueError, KeyError) as error:
                self._problem(f"failed: {error}")
                continue
            with self._lock:
                self.finished += answer is not None
                self.aborted += answer is None
                self.kinds.update([case.path, *case.body] if answer is not None else ())
            if answer is not None:
                self._answers.put((case, answer))

    def ask_plain(self) -> None:
        """Send finished cases to the plain server until a None arrives."""
        while (item := self._answers.get()) is not None:
            case, answer = item
            try:
                expected = send(self.plain, case)
            except (RuntimeError, ValueError, KeyError) as error:
                self._problem(f"failed on the plain server: {error}")
                continue
            with self._lock:
                self.compared += 1
            if not same(answer, expected):
                self._problem("differs: " + json.dumps({"body": case.body, "trees": answer, "plain": expected}))

    def run(self, concurrency: int, progress: float | None) -> dict[str, list[float]]:
        """Run until the deadline; return the resident MiB of both servers over time.

        Args:
            progress: seconds between lines of progress, or None.
        """
        asking = [threading.Thread(target=self.ask_trees, daemon=True) for _ in range(concurrency)]
        comparing = [threading.Thread(target=self.ask_plain, daemon=True) for _ in range(PLAIN_CONCURRENCY)]
        for thread in asking + comparing:
            thread.start()
        memory: dict[str, list[float]] = {"trees": [], "plain": []}
        begin = shown = time.monotonic()
        while any(thread.is_alive() for thread in asking):
            time.sleep(1)
            for name, server in (("trees", self.trees), ("plain", self.plain)):
                memory[name].append(resident_mib(server))
            if progress is not None and time.monotonic() - shown >= progress:
                shown = time.monotonic()
                print(
                    f"  {shown - begin:4.0f} s: {self.finished} finished, {self.compared} compared, {self.aborted} "
                    f"aborted, {len(self.problems)} problems, {memory['trees'][-1]:.0f} MiB (plain: "
                    f"{memory['plain'][-1]:.0f} MiB)",
                    file=sys.stderr,
                    flush=True,
                )
        for _ in comparing:
            self._answers.put(None)
        for thread in comparing:
            thread.join()
        return memory

    def _problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)


#: Counters that are zero on a server at rest.
AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_COUNTED = ("vllm:num_preemptions_total", "vllm:spec_decode_num_drafts_total")
_COUNTED += ("vllm:spec_decode_num_accepted_tokens_total",)
FAILED = 'specplug:fallbacks_total{reason="proposer failed"}'


def settle(server: Server, seconds: float = 30) -> dict[str, float]:
    """Return the server's figures once it is at rest, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        figures = {name: read_counter(page, name) for name in (*AT_REST, *_COUNTED)}
        figures[FAILED] = sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(FAILED))
        if not any(figures[name] for name in AT_REST) or time.monotonic() > deadline:
            return figures
        time.sleep(0.5)


def growth(samples: list[float]) -> float:
    """Return the MiB by which the last third of the samples lies above the second; the first is warm-up."""
    third = len(samples) // 3
    return statistics.median(samples[2 * third :]) - statistics.median(samples[third : 2 * third])


def left_behind(figures: dict[str, float]) -> list[str]:
    """Return the faults that a server at rest shows."""
    left = {name: figures[name] for name in AT_REST if figures[name]}
    found = [f"left on the server at rest: {left}"] if left else []
    return found + ([f"the drafter failed {figures[FAILED]:.0f} times"] if figures[FAILED] else [])


def grown(memory: dict[str, list[float]]) -> list[str]:
    """Report memory that has grown, unless it has on the plain server too."""
    trees, plain = growth(memory["trees"]), max(growth(memory["plain"]), 0.0)
    if trees - plain <= MAX_GROWTH_MIB:
        return []
    return [f"memory grew by {trees:.0f} MiB, the plain server's by {plain:.0f}"]


def stress(
    trees: Server, plain: Server, seconds: float, concurrency: int, seed: int = 0, progress: float | None = None
) -> dict[str, Any]:
    """Run traffic for so long and return the results; resident memory is reported, not judged."""
    rng = random.Random(seed)
    traffic = Traffic(trees, plain, iter(lambda: make_case(rng), None), time.monotonic() + seconds)
    memory = traffic.run(concurrency, progress)
    figures = settle(trees)
    return {
        "problems": traffic.problems + left_behind(figures),
        **{name: getattr(traffic, name) for name in ("finished", "aborted", "compared")},
        "figures": figures,
        "finished_with": dict(sorted(traffic.kinds.items())),
        "resident_mib": {name: [round(value, 1) for value in samples] for name, samples in memory.items()},
    }


@contextlib.contextmanager
def pair_of_servers(
    folder: Path, speculative: dict[str, Any], concurrency: int, options: tuple[str, ...] = ()
) -> Iterator[tuple[Server, Server]]:
    """Start a server with trees and little KV space and a plain one with enough, of the tiny model in ``folder``."""
    common = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", *options]
    small = ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(num_kv_blocks(concurrency))]
    small += ["--max-num-seqs", "16", "--speculative-config", json.dumps(speculative)]
    servers: list[Server] = []
    # Otherwise each server binds itself to the same cores.
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in threads}
    os.environ.update(threads)
    try:
        servers.append(Server("trees", folder / "target", [*common, *small], folder / "trees.log", plugins=True))
        servers.append(Server("plain", folder / "target", common, folder / "plain.log", plugins=False))
        wait_until_ready(servers, 900)
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def write_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the tiny target with its tokenizer; return a speculative config for each method without training."""
    tiny.write_tokenizer(tiny.write_target(folder / "target"))
    eagle2 = {**EAGLE2, "model": str(tiny.write_drafter(folder / "eagle"))}
    union = {"method": "union", "num_speculative_tokens": 12, "sources": [eagle2, {"method": "lookup"}]}
    return {"eagle2": eagle2, "union": union, "lookup": {"method": "lookup", "num_speculative_tokens": 12}}


def main(argv: list[str] | None = None) -> int:
    """Run it; return 0 if there is no fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15, help=f"memory is judged from {MIN_MINUTES} on")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once (default: %(default)s)")
    parser.add_argument("--method", default="eagle2", choices=["eagle2", "union", "lookup"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        speculative = write_models(Path(name))[options.method]
        with pair_of_servers(Path(name), speculative, options.concurrency) as servers:
            result = stress(*servers, options.minutes * 60, options.concurrency, options.seed, progress=15)
    if options.minutes >= MIN_MINUTES:
        result["problems"] += grown(result["resident_mib"])
    # One sample per half minute is enough in the file.
    growths = {name: round(growth(samples), 1) for name, samples in result["resident_mib"].items()}
    result["resident_mib"] = {name: samples[::30] for name, samples in result["resident_mib"].items()}
    result["growth_mib"] = growths
    report = {
        "settings": {"method": options.method, "minutes": options.minutes, "concurrency": options.concurrency,
                     "kv_blocks": num_kv_blocks(options.concurrency), "block_size": BLOCK_SIZE},
        **result,
        "provenance": provenance("a plain server beside it, same requests"),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
