"""One engine of ``specplug bench``, as a worker process.

The first message has the arguments of ``LLM`` and ``"chat_template_kwargs"``, the switches of the chat template.  A
request ``{"texts", "max_tokens"}`` returns greedy answers; ``"sampling"`` (arguments of ``SamplingParams``) makes them
sampled ones, ``"at_once"`` limits how many run at the same time.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_specplug.utils.chat_template import chat_ids
from vllm_specplug.utils.worker_pipe import Engine, Message, run_worker

_DRAFTS = "vllm:spec_decode_num_drafts"
_ARGUMENTS = ("texts", "max_tokens", "sampling", "at_once")
_BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"


def _read_counters(llm: Any) -> tuple[int, list[int]]:
    """Return the number of drafts so far, and of those with at least 1, 2, ... accepted tokens."""
    drafts, by_depth = 0, []
    for metric in llm.get_metrics():
        if metric.name == _DRAFTS:
            drafts = metric.value
        elif metric.name == _BY_DEPTH:
            by_depth = metric.values
    return drafts, by_depth


def prompts_of(
    llm: Any, texts: list[str], max_tokens: int, switches: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Tokenise chat messages, cut so that the answer fits into the context."""
    tokenizer, room = llm.get_tokenizer(), llm.llm_engine.model_config.max_model_len - max_tokens
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [{"prompt_token_ids": chat_ids(tokenizer, chat, switches)[:room]} for chat in chats]


def answer(
    llm: Any,
    texts: list[str],
    max_tokens: int,
    sampling: dict[str, Any] | None = None,
    at_once: int | None = None,
    switches: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Answer chat messages, greedy by default; return the answers, the seconds and the changes of the draft counters.

    ``at_once`` requests run at a time, as from so many clients: the next one starts when another has ended.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = prompts_of(llm, texts, max_tokens, switches)
    settings = {"temperature": 0, "max_tokens": max_tokens, **(sampling or {})}
    params = [SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY) for _ in prompts]
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
    """Return the final outputs, in the order of the prompts."""
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
    """Start the engine, for ``run_worker``."""
    switches = arguments.pop("chat_template_kwargs", None)
    from vllm import LLM

    llm = LLM(**arguments)

    def ask(request: Message) -> Message:
        return answer(llm, **{k: request[k] for k in _ARGUMENTS if k in request}, switches=switches)

    return {"ready": True}, ask


if __name__ == "__main__":
    run_worker(start)
