"""Answers prompts, in a process of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def answer(engine: dict[str, Any], conversations: list, seeds: list[int], sampling: dict[str, dict]) -> dict[str, dict]:
    """Answer the conversations with each of the sampling parameters.

    Args:
        engine: options of ``LLM``.
        conversations: chats without answers.
        seeds: one for each conversation.
        sampling: by name; ``conversations`` among them is the number to be answered, instead of all.

    Returns:
        ``answers``: token ids, and ``tau``, 0 where nothing was drafted; both by name of the sampling parameters.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(**engine)
    answers, tau, before = {}, {}, Counter()
    for name, all_params in sampling.items():
        params = dict(all_params)
        chosen = conversations[: params.pop("conversations", None)]
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        each = [SamplingParams(**params, seed=seed) for seed in seeds[: len(chosen)]]
        outputs = llm.chat(chosen, each, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
        now = Counter({metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")})
        drafts, accepted = (now[key] - before[key] for key in ("vllm:spec_decode_num_drafts", ACCEPTED))
        before, tau[name] = now, drafts and 1 + accepted / drafts
    return {"answers": answers, "tau": tau}
