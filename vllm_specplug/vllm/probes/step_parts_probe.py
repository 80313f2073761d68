"""Measures the parts of a decoding step.

A worker process with the engine in it.  The first message has the arguments of ``LLM``.  A request ``{"texts",
"max_tokens"}`` is answered with the milliseconds of a step by part (see ``PartsClock``), one text at a time; with
``"together"`` of one batch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from vllm_specplug.utils.worker_pipe import Engine, Message, run_worker
from vllm_specplug.vllm.probes.bench_worker import prompts_of
from vllm_specplug.vllm.probes.in_process import runner_of, start_in_process

_PARTS = ("verify", "draft", "draft_forward", "decide")
#: Methods of the measured budget that decide or learn something.
_DECISIONS = ("begin", "plan", "wants_model", "select")


class PartsClock:
    """Wraps an engine in this process; measures each step without a prompt in it: seconds in total and by part."""

    def __init__(self, llm: Any):
        self.steps: list[dict[str, float]] = []
        self._spent = dict.fromkeys(_PARTS, 0.0)
        self._decoding = False
        engine = llm.llm_engine
        self.runner = runner_of(llm)
        drafter = getattr(self.runner, "drafter", None)
        self._wrap(self.runner, "_model_forward", "verify")
        self._wrap(self.runner.model, "compute_logits", "verify")
        if hasattr(self.runner, "propose_draft_token_ids"):
            self._wrap(self.runner, "propose_draft_token_ids", "draft")
        if hasattr(drafter, "model") and hasattr(drafter.model, "forward"):
            self._wrap(drafter.model, "forward", "draft_forward")
            if (operator := getattr(drafter, "operator", None)) is not None:
                self._wrap(operator, "first")
                self._wrap(operator, "forward")
                self._wrap(operator, "grow")
            self._wrap(*((drafter, "_score") if hasattr(drafter, "_score") else (drafter.model, "compute_logits")))
        elif hasattr(drafter, "heads"):  # Medusa's
            self._wrap(drafter.heads, "_logits", "draft_forward")
        budget = getattr(self.runner, "serving_budget", None)
        if budget is not None:
            for name in _DECISIONS:
                self._wrap(budget, name, "decide")
        execute, step = self.runner.execute_model, engine.step

        def noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            tokens = scheduler_output.num_scheduled_tokens
            self._decoding = all(count == 1 + len(drafts.get(request, ())) for request, count in tokens.items())
            return execute(scheduler_output, *args, **kwargs)

        def timed() -> Any:
            self._spent, self._decoding = dict.fromkeys(_PARTS, 0.0), False
            start = time.perf_counter()
            result = step()
            if self._decoding:
                self.steps.append(self._spent | {"step": time.perf_counter() - start})
            return result

        self.runner.execute_model, engine.step = noted, timed

    def _wrap(self, owner: Any, name: str, part: str = "draft_forward") -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    def mean_parts(self) -> dict[str, float]:
        """Average the steps between the quartiles of the total time, in milliseconds; the parts add up to the total."""
        if not self.steps:
            raise RuntimeError("no step without a prompt was measured: increase max_tokens")
        ordered = sorted(self.steps, key=lambda spent: spent["step"])
        middle = ordered[len(ordered) // 4 : max(3 * len(ordered) // 4, len(ordered) // 4 + 1)]
        mean = {name: statistics.fmean(spent[name] for spent in middle) * 1e3 for name in ("step", *_PARTS)}
        found = {
            "rounds": len(self.steps),
            "round_ms": round(mean["step"], 3),
            "verify_ms": round(mean["verify"], 3),
            "draft_forward_ms": round(mean["draft_forward"], 3),
            "draft_other_ms": round(mean["draft"] - mean["draft_forward"], 3),
            "host_ms": round(mean["step"] - mean["verify"] - mean["draft"], 3),
        }
        # The budget decides inside the other parts.
        return found | ({"decide_ms": round(mean["decide"], 3)} if mean["decide"] else {})


def decode(llm: Any, prompts: list[dict], max_tokens: int, ignore_eos: bool = False) -> None:
    """Generate greedy answers, one prompt at a time."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    for prompt in prompts:
        llm.generate([prompt], sampling, use_tqdm=False)


def decode_together(llm: Any, prompts: list[dict], max_tokens: int) -> None:
    """Generate greedy answers of one length, all in one batch."""
    from vllm import SamplingParams

    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)


def start(arguments: Message) -> Engine:
    """Start the engine and its clock, for ``run_worker``."""
    switches = arguments.pop("chat_template_kwargs", None)
    llm = start_in_process(arguments)
    clock = PartsClock(llm)

    def ask(request: Message) -> Message:
        prompts = prompts_of(llm, request["texts"], request["max_tokens"], switches)
        if request.get("together"):
            decode_together(llm, prompts, request["max_tokens"])
            clock.steps.clear()
            decode_together(llm, prompts, request["max_tokens"])
            return clock.mean_parts()
        decode(llm, prompts[:1], request["max_tokens"])
        clock.steps.clear()
        decode(llm, prompts, request["max_tokens"])
        return clock.mean_parts()

    return {"ready": True}, ask


if __name__ == "__main__":
    run_worker(start)
