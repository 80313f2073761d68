"""Answers prompts in a process of its own: ``python -m tests.e2e.run_engine < request.json > answers.json``.

Answers and tau are by name of the sampling parameters; tau is 0 where nothing was drafted.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    request = json.loads(sys.stdin.read())
    # The engine core runs in a process of its own and logs to stdout: keep ours clean.
    results_fd = os.dup(1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(**request["engine"])
    answers, tau, before = {}, {}, Counter()
    for name, params in request["sampling"].items():
        conversations = request["conversations"][: params.pop("conversations", None)]
        if "logit_bias" in params:
            params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        each = [SamplingParams(**params, seed=seed) for seed in request["seeds"][: len(conversations)]]
        outputs = llm.chat(conversations, each, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
        now = Counter({metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")})
        drafts, accepted = (now[key] - before[key] for key in ("vllm:spec_decode_num_drafts", ACCEPTED))
        before, tau[name] = now, drafts and 1 + accepted / drafts
    with os.fdopen(results_fd, "w") as file:
        json.dump({"answers": answers, "tau": tau}, file)


if __name__ == "__main__":
    main()
