"""Answers prompts in a process of its own: ``python -m tests.e2e.run_engine < request.json > answers.json``."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    request = json.loads(sys.stdin.read())
    # The engine core runs in a process of its own and logs to stdout: keep ours clean.
    results_fd = os.dup(1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**request["engine"])
    answers = {}
    for name, params in request["sampling"].items():
        seeds = range(len(request["conversations"]))
        each = [SamplingParams(**params, seed=seed) for seed in seeds]
        outputs = llm.chat(request["conversations"], each, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    answers["drafts"] = values.get("vllm:spec_decode_num_drafts", 0)
    answers["accepted"] = values.get("vllm:spec_decode_num_accepted_tokens", 0)
    with os.fdopen(results_fd, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
