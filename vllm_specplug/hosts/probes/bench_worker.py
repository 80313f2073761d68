"""One engine of ``specplug bench``, served by ``bench.serving``.

It is started with the arguments of ``LLM`` and ``"in_process"`` (true: neither its scheduler nor its worker has a
process of its own; as many threads as a served worker has).  ``{"texts", "max_tokens"}`` asks for greedy answers
(``max_tokens`` is one number, or one for each text), or for sampled ones with ``"sampling"`` (arguments of
``SamplingParams``), as many under way at once as ``"at_once"`` says (default: all).
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm_specplug.tools.bench.serving import Engine, Message, run_worker

_DRAFTS = "vllm:spec_decode_num_drafts"
_ARGUMENTS = ("texts", "max_tokens", "sampling", "at_once")
_BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"


def _read_counters(llm: Any) -> tuple[int, list[int]]:
    """Drafts so far, and those of which at least 1, 2, ... tokens were accepted."""
    drafts, by_depth = 0, []
    for metric in llm.get_metrics():
        if metric.name == _DRAFTS:
            drafts = metric.value
        elif metric.name == _BY_DEPTH:
            by_depth = metric.values
    return drafts, by_depth


def prompts_of(llm: Any, texts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """Chat messages as token ids, cut so that the answer fits."""
    tokenizer, room = llm.get_tokenizer(), llm.llm_engine.model_config.max_model_len - max_tokens
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [
        {"prompt_token_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)[:room]}
        for chat in chats
    ]


def answer(
    llm: Any,
    texts: list[str],
    max_tokens: int | list[int],
    sampling: dict[str, Any] | None = None,
    at_once: int | None = None,
) -> dict[str, Any]:
    """Answers to chat messages, greedy by default, the seconds they took and the draft counters they moved.

    With ``at_once`` a request comes in when another has ended, as from so many clients, until there are no more.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    lengths = [max_tokens] * len(texts) if isinstance(max_tokens, int) else max_tokens
    prompts = prompts_of(llm, texts, max(lengths))
    params = [SamplingParams(**{"temperature": 0, "max_tokens": length, **(sampling or {})}) for length in lengths]
    for one in params:
        one.output_kind = RequestOutputKind.FINAL_ONLY
    drafts, by_depth = _read_counters(llm)
    start = time.perf_counter()
    outputs = _generate(llm.llm_engine, prompts, params, at_once or len(prompts))
    seconds = time.perf_counter() - start
    new_drafts, new_by_depth = _read_counters(llm)
    accepted = [new - old for new, old in zip(new_by_depth, by_depth or [0] * len(new_by_depth), strict=True)]
    stats = [output.metrics for output in outputs]
    return {
        "seconds": seconds,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": new_drafts - drafts,
        "accepted": sum(accepted),
        "accepted_by_depth": accepted,
        "first_token_s": [s.first_token_latency for s in stats],
        "inter_token_s": [
            (s.last_token_ts - s.first_token_ts) / (s.num_generation_tokens - 1)
            for s in stats
            if s.num_generation_tokens > 1
        ],
    }


def _generate(engine: Any, prompts: list[dict[str, Any]], params: list[Any], at_once: int) -> list[Any]:
    """The final outputs, in the order of the prompts."""
    begin = time.monotonic_ns()
    requests = enumerate(zip(prompts, params, strict=True))
    waiting = {f"{begin}-{number}": request for number, request in requests}
    names, done = list(waiting), {}
    for name in names[:at_once]:
        engine.add_request(name, *waiting.pop(name))
    while len(done) < len(names):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
                if waiting:
                    name = next(iter(waiting))
                    engine.add_request(name, *waiting.pop(name))
    return [done[name] for name in names]


def start(arguments: Message) -> Engine:
    """The engine, for ``bench.serving``."""
    if in_process := arguments.pop("in_process", False):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(**arguments)
    if in_process:
        from vllm_specplug.hosts.probes.served_threads import use_served_threads

        use_served_threads(llm.llm_engine.vllm_config)
    return {"ready": True}, lambda request: answer(llm, **{k: request[k] for k in _ARGUMENTS if k in request})


if __name__ == "__main__":
    run_worker(start)
