"""One engine of ``specplug bench``: JSON lines in on stdin, JSON lines out on what was stdout.

The first line holds the arguments of ``LLM``; then ``{"texts", "max_tokens"}`` asks for greedy answers, or for sampled
ones with ``"sampling"`` (arguments of ``SamplingParams``), and ``{"close"}`` for the peak memory and the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

_COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def _read_counters(llm: Any) -> dict[str, int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in _COUNTERS.values()}
    return {name: values.get(metric, 0) for name, metric in _COUNTERS.items()}


def answer(llm: Any, texts: list[str], max_tokens: int, sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answers to chat messages, greedy by default, the seconds they took and the draft counters they moved."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts = []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts.append({"prompt_token_ids": ids[: 2048 - max_tokens]})
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **(sampling or {})})
    before = _read_counters(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    after = _read_counters(llm)
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    return {"seconds": seconds, "token_ids": token_ids, **{name: after[name] - before[name] for name in after}}


def peak_rss_mib(pid: int) -> int:
    """Peak resident memory of a process and its living descendants (shared pages count in each)."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:  # ended meanwhile
            continue
        parents[int(folder.name)] = int(fields["PPid"])
        peaks[int(folder.name)] = int(fields.get("VmHWM", "0 kB").split()[0])
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return sum(peaks.get(member, 0) for member in family) // 1024


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until the pipe closes."""
    from vllm import LLM

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    llm = LLM(**json.loads(requests.readline()))
    reply({"ready": True})
    for line in requests:
        request = json.loads(line)
        if "close" in request:
            reply({"peak_rss_mib": peak_rss_mib(os.getpid())})
            return
        reply(answer(llm, request["texts"], request["max_tokens"], request.get("sampling")))


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the host prints goes to the log
    serve(sys.stdin, channel)
