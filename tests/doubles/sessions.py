"""Sessions with streamed input on an engine of this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

_NUMBERS = itertools.count()


def run_sessions(
    llm: Any, sessions: Sequence[Sequence[list[int]]], params: Any, at_once: bool = True, **prompt: Any
) -> list[list[list[int]]]:
    """Run sessions at the same time and return the answer of each turn.

    Args:
        llm: the engine.
        sessions: the inputs of each.
        params: sampling parameters of all turns.
        at_once: all inputs wait in the engine from the start on; else each is sent when the turn before it has ended.
        prompt: further keys of each prompt.
    """
    names = [f"session-{next(_NUMBERS)}" for _ in sessions]
    waiting = {name: list(inputs) for name, inputs in zip(names, sessions, strict=True)}
    answers: dict[str, list[list[int]]] = {name: [[]] for name in names}

    def send(name: str) -> None:
        tokens = list(waiting[name].pop(0)) if waiting[name] else None  # vLLM appends to it
        request = llm.llm_engine.input_processor.process_inputs(
            name, {"prompt_token_ids": tokens or [3], **prompt}, params, ("generate",), resumable=tokens is not None
        )
        llm.llm_engine.engine_core.add_request(request)

    for name in names:
        for _ in range(len(waiting[name]) + 1 if at_once else 1):
            send(name)
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, 0
    while scheduler.has_unfinished_requests():
        assert (steps := steps + 1) < 9999, "a session is longer than max_model_len"
        for output in llm.llm_engine.engine_core.get_output().outputs:
            answers[output.request_id][-1] += output.new_token_ids
            if output.finish_reason is not None:
                answers[output.request_id].append([])
                if not at_once:
                    send(output.request_id)
    llm.llm_engine.engine_core.get_output()  # the workers learn which requests have ended
    return [answers[name][: len(inputs)] for name, inputs in zip(names, sessions, strict=True)]
