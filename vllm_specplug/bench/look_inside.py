"""``specplug bench --look-inside``: measure one engine at a time from within its process."""

from __future__ import annotations

from typing import Any

from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import PROBE_MODULE, started


def look_inside(
    report: dict[str, Any],
    methods: list[Method],
    engine: dict[str, Any],
    kv_gib: int,
    questions: list[Question],
    max_tokens: int,
) -> None:
    """Add the time of a step by stage to the report."""
    texts = [questions[i * len(questions) // 6].text for i in range(min(6, len(questions)))]
    for method in methods:
        with started([method], engine, kv_gib, PROBE_MODULE) as [worker]:
            worker.send({"texts": texts, "max_tokens": max_tokens})
            report["methods"][method.label]["stages"] = worker.receive()
            worker.close()
