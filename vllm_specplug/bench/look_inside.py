"""``specplug bench --look-inside``: measure one engine at a time from within its process."""

from __future__ import annotations

from typing import Any

from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import PROBE_MODULE, Worker, started

_STEP_NODES = (1, 2, 4, 8, 16, 32)
_NUM_TREES = 6


def look_inside(
    report: dict[str, Any],
    methods: list[Method],
    engine: dict[str, Any],
    kv_gib: int,
    questions: list[Question],
    max_tokens: int,
) -> None:
    """Add to the report time by stage, and for tree methods trees, calibration and step costs."""
    texts = [questions[i * len(questions) // 6].text for i in range(min(6, len(questions)))]
    request = {"texts": texts, "max_tokens": max_tokens}

    def ask(worker: Worker, message: dict) -> dict:
        worker.send(message)
        return worker.receive()

    for method in (method for method in methods if not method.by_transformers):
        with started([method], engine, kv_gib, PROBE_MODULE) as [worker]:
            entry = report["methods"][method.label]
            entry["stages"] = ask(worker, request)
            if not method.stock:
                entry |= ask(worker, request | {"count": _NUM_TREES})
            worker.close()
    trees = [(m.label, m.config) for m in methods if m.config and m.config["method"] in ("eagle2", "hass")]
    for label, config in trees[:1]:
        wide = Method(label, config | {"num_speculative_tokens": max(_STEP_NODES)})
        with started([wide], engine, kv_gib, PROBE_MODULE) as [worker]:
            steps = {"nodes": list(_STEP_NODES), "context": 256, "max_tokens": 24}
            ask(worker, steps)  # a warm-up
            report["step_cost"] = ask(worker, steps) | worker.machine
            worker.close()
