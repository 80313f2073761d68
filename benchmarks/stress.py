"""Stress on a real server: mixed traffic, aborts, too little KV space; every finished answer equals plain decoding's.

    python benchmarks/stress.py --minutes 15 --output stress.json

Requests with random parameters come in at ``--concurrency`` at once, a fifth of them is aborted, and the KV space holds
a tenth of what they would fill.  Afterwards the server must be idle and empty, and the same requests are sent to a
plain server.  The command fails where an answer differs, blocks or requests are left, or memory has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from vllm_specplug.demo import Server, read_counter, wait_until_ready
from vllm_specplug.environment import provenance

TEXT = (
    "the a of river stone light code number list train apple green quick seven why how tell write count explain "
    "story python water moon first last question answer table name person city small old next"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ABORTED_SHARE, KV_SHARE = 0.2, 0.1
#: Memory that may come on top between a third of the traffic and its end, in MiB.
MAX_GROWTH_MIB = 150


@dataclass(frozen=True)
class Case:
    """One request: where it goes, what it says, and after how many chunks of its stream it is aborted (or None)."""

    path: str
    body: dict[str, Any]
    abort_after: int | None


def make_case(rng: random.Random, max_tokens: int) -> Case:
    """A request with random parameters; always seeded, so that its answer is known."""

    def maybe(share: float, **changes: Any) -> dict[str, Any]:
        return changes if rng.random() < share else {}

    words = TEXT.split()
    shared = " ".join(words[: rng.choice((0, 6, 20))])
    text = shared + " " + " ".join(rng.choices(words, k=rng.randrange(1, 12)))
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": rng.randrange(1, max_tokens),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "seed": rng.randrange(1 << 30),
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
    }
    body |= maybe(0.2, top_k=rng.randrange(2, 40)) | maybe(0.2, top_p=rng.uniform(0.5, 1.0)) | maybe(0.15, min_p=0.05)
    body |= maybe(0.1, repetition_penalty=1.2) | maybe(0.1, presence_penalty=0.6) | maybe(0.1, frequency_penalty=0.4)
    body |= maybe(0.1, logit_bias={str(rng.randrange(3, 150)): rng.uniform(-3, 3)}) | maybe(0.1, stop=["e", "a b"])
    body |= maybe(0.1, min_tokens=rng.randrange(0, body["max_tokens"])) | maybe(0.3, ignore_eos=True)
    body |= maybe(0.1, vllm_xargs={"speculation": 0})
    if body["temperature"] and rng.random() < 0.15:
        body["n"] = 3
    abort_after = rng.randrange(0, 12) if rng.random() < ABORTED_SHARE else None
    if abort_after is not None:
        body["stream"] = True
    if rng.random() < 0.5:
        if rng.random() < 0.15:
            body["logprobs"] = 2
        return Case("/v1/completions", {**body, "prompt": text}, abort_after)
    if rng.random() < 0.1 and "min_tokens" not in body:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return Case("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, abort_after)


async def send(session: aiohttp.ClientSession, url: str, case: Case) -> list[tuple[list[int], str]] | None:
    """The answer: token ids and how it ended, of each choice; None where the request was aborted.

    Raises:
        RuntimeError: the server refused the request or broke off.
    """
    body = case.body | ({"stream": True} if case.abort_after is not None else {})
    async with session.post(url + case.path, json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {(await reply.text())[:300]} to {json.dumps(body)}")
        if not body["stream"]:
            choices = (await reply.json())["choices"]
            return [(choice["token_ids"], choice["finish_reason"]) for choice in choices]
        found = [([], None) for _ in range(body.get("n", 1))]
        count = 0
        async for line in reply.content:
            if case.abort_after is not None and count >= case.abort_after:
                return None  # leaving closes the connection
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "choices" not in chunk:
                raise RuntimeError(f"in the stream: {chunk}")
            count += 1
            for choice in chunk["choices"]:
                token_ids, ended = found[choice["index"]]
                found[choice["index"]] = (
                    token_ids + (choice.get("token_ids") or []), choice.get("finish_reason") or ended
                )  # fmt: skip
        return None if case.abort_after is not None else found


async def traffic(
    url: str, cases: Any, concurrency: int, seconds: float | None = None
) -> tuple[list[tuple[Case, Any]], list[str]]:
    """Send cases, ``concurrency`` at once, until they or the time run out; cases with their answers, and errors."""
    answers, errors = [], []
    deadline = None if seconds is None else time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:

        async def worker() -> None:
            for case in cases:
                if deadline is not None and time.monotonic() > deadline:
                    return
                try:
                    answers.append((case, await send(session, url, case)))
                except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    if len(errors) > 20:
                        return

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return answers, errors


async def settle(url: str, seconds: float = 60) -> dict[str, float]:
    """What is left on the server once it is idle: requests and used KV space, which should both be 0."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/metrics") as reply:
                page = await reply.text()
            left = {name: read_counter(page, name) for name in names}
            if not any(left.values()) or time.monotonic() > deadline:
                counters = ("vllm:num_preemptions_total", "vllm:spec_decode_num_accepted_tokens_total")
                return left | {name: read_counter(page, name) for name in counters}
            await asyncio.sleep(0.5)


def differences(ours: list[tuple[Case, Any]], plain: list[tuple[Case, Any]]) -> list[str]:
    """What differs from plain decoding, one line per answer."""
    expected = {id(case): answer for case, answer in plain}
    found = []
    for case, answer in ours:
        if answer is not None and answer != expected.get(id(case)):
            found.append(json.dumps({"body": case.body, "answer": answer, "plain": expected.get(id(case))}))
    return found


def memory_mib(pid: int) -> float:
    """Resident memory of a server and its engine processes."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in processes) / 2**20


def kv_options(model: Path, concurrency: int, max_model_len: int, longest: int) -> list[str]:
    """Server options for KV space of a tenth of the load (float32), at least of one request of full length."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 4 * heads * head_dim * (config["num_hidden_layers"] + 1)
    tokens = max(KV_SHARE * concurrency * longest, 1.3 * max_model_len)
    return ["--kv-cache-memory-bytes", str(int(tokens * per_token)), "--block-size", "32"]


async def watch_memory(pid: int, seconds: float) -> tuple[float, float]:
    """Resident MiB after a third of the time, and the largest seen in its last third."""
    await asyncio.sleep(seconds / 3)
    early, late = memory_mib(pid), 0.0
    await asyncio.sleep(seconds / 3)
    for _ in range(10):
        late = max(late, memory_mib(pid))
        await asyncio.sleep(seconds / 30)
    return early, late


async def stress(server: Server, seed: int, concurrency: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    """Traffic for so long; what was answered and what is left."""
    rng = random.Random(seed)
    cases = iter(lambda: make_case(rng, max_tokens), None)
    (answers, errors), memory = await asyncio.gather(
        traffic(server.url, cases, concurrency, seconds), watch_memory(server.process.pid, seconds)
    )
    return {"answers": answers, "errors": errors, "left": await settle(server.url), "memory_mib": memory}


def verdict(result: dict[str, Any], different: list[str]) -> list[str]:
    """What went wrong; nothing, one hopes."""
    problems = [f"error: {error}" for error in result["errors"]] + [f"differs: {line}" for line in different]
    left = {name: value for name, value in result["left"].items() if value and not name.endswith("_total")}
    problems += [f"left on the idle server: {left}"] if left else []
    early, late = result["memory_mib"]
    if late - early > MAX_GROWTH_MIB:
        problems.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--speculative-config", default='{"method": "eagle2", "model": "smollm2-135m-instruct"}')
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    model = options.model
    if model is None:
        from vllm_specplug.smollm2 import prepare

        model = prepare()
    common = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    small = kv_options(model, options.concurrency, 512, 60 + options.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        ours = ["--speculative-config", options.speculative_config, "--max-num-seqs", "16", *common, *small]
        server = Server("stressed", model, ours, Path(folder) / "ours.log", plugins=True)
        try:
            wait_until_ready([server], 600)
            seconds = options.minutes * 60
            result = asyncio.run(stress(server, options.seed, options.concurrency, seconds, options.max_tokens))
        finally:
            server.stop()
        finished = [(case, answer) for case, answer in result["answers"] if answer is not None]
        plain = Server("plain", model, common, Path(folder) / "plain.log", plugins=False)
        try:
            wait_until_ready([plain], 600)
            print(f"  {len(finished)} answers to compare with plain decoding's", file=sys.stderr)
            expected, errors = asyncio.run(traffic(plain.url, iter([case for case, _ in finished]), 16))
        finally:
            plain.stop()
    result["errors"] += [f"plain server: {error}" for error in errors]
    different = differences(finished, expected)
    problems = verdict(result, different)
    report = {
        "minutes": options.minutes,
        "finished": len(finished),
        "aborted": len(result["answers"]) - len(finished),
        "kinds": Counter(key for case, _ in finished for key in case.body),
        "different": len(different),
        "left": result["left"],
        "memory_mib": result["memory_mib"],
        "problems": problems,
        "provenance": provenance("plain vLLM, float32"),
    }
    print(json.dumps({key: value for key, value in report.items() if key != "provenance"}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
