"""Runs the engine of ``specplug calibrate cost``: ``cost_probe TASK.json ANSWER.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_specplug.vllm.probes.bench_worker import answer


def probe(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the costs again, then answer the questions of each category, starting without values of drafts each time.

    Args:
        task: ``engine`` (arguments of ``LLM``), ``questions`` (texts by category), ``max_tokens`` (of an answer),
            ``batches`` (batch sizes to report choices for), ``chat_template_kwargs`` (the template's switches).

    Returns:
        ``facts``, ``costs`` (see ``StepCost.to_json``), ``choices`` (by category; without questions,
        ``first guess``), and ``reliability`` (by category: outcomes, mean prediction, share accepted).
    """
    from vllm import LLM

    llm = LLM(**task["engine"])
    result, *_ = llm.collective_rpc("measure_costs")
    result |= {"choices": {}, "reliability": {}}
    for category, texts in task["questions"].items():
        llm.collective_rpc("forget_worth")
        for text in texts:
            answer(llm, [text], task["max_tokens"], switches=task.get("chat_template_kwargs"))
        report, *_ = llm.collective_rpc("report_budget", args=(task["batches"],))
        result["choices"][category] = report["choices"]
        result["reliability"][category] = report["reliability"]
    report, *_ = llm.collective_rpc("report_budget", args=(task["batches"],))
    if not task["questions"]:
        result["choices"]["first guess"] = report["choices"]
    return result | {"costs": report["costs"]}


if __name__ == "__main__":
    answers = probe(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answers))
