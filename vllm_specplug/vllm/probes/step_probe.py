"""Times decoding steps of a real engine, verification and drafting apart.

A worker process.  The first message has the arguments of ``LLM``; without a speculative configuration the steps are
plain ones.  A request ``{"context", "max_tokens"}`` decodes one random prompt of ``context`` tokens; it returns, for
steps that verified a full draft, ``seconds`` without drafting, and ``drafting``, the seconds of drafting.  ``batch``
decodes so many prompts at once; ``nodes`` reduces a Medusa tree to its first nodes.  The drafts of vLLM's own ``ngram``
method are replaced by random ids, because its verification time depends on their number only.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from vllm_specplug.utils.worker_pipe import Engine, Message, run_worker
from vllm_specplug.vllm.probes.in_process import runner_of, start_in_process


class _StepClock:
    """Wraps a model runner; measures each step without its drafting, and its drafting."""

    def __init__(self, runner: Any):
        self.expect(0, 1)
        self._drafting = self._running = 0.0
        self._full = False
        for name in ("execute_model", "sample_tokens", "propose_draft_token_ids"):
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def expect(self, num_drafts: int, batch: int) -> None:
        """Discard all times; from now on measure steps of ``batch`` requests with ``num_drafts`` drafts each."""
        self.seconds: list[float] = []
        self.drafting: list[float] = []
        self._num_drafts, self._batch = num_drafts, batch

    def _is_full(self, scheduled: Any) -> bool:
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        rows = list(scheduled.num_scheduled_tokens.values())
        return rows == [1 + self._num_drafts] * self._batch and drafts == self._num_drafts * self._batch

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_model":
                self._full = self._is_full(args[0])
                self._drafting = self._running = 0.0
            start = time.perf_counter()
            result = call(*args, **kwargs)
            elapsed = time.perf_counter() - start
            if name == "propose_draft_token_ids":
                self._drafting += elapsed
            else:
                self._running += elapsed
            if name == "sample_tokens" and self._full:
                self.seconds.append(self._running - self._drafting)
                self.drafting.append(self._drafting)
            return result

        return timed


def start(arguments: Message) -> Engine:
    """Start the engine and its clock, for ``run_worker``."""
    from vllm import SamplingParams

    speculative = arguments.get("speculative_config") or {}
    llm = start_in_process(arguments)
    runner = runner_of(llm)
    draw = random.Random(0)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    all_drafts = speculative.get("num_speculative_tokens", 0)
    if speculative.get("method") == "ngram":
        runner.drafter.propose = lambda _num_speculative_tokens, sampled_token_ids, *_args, **_kwargs: [
            [draw.randrange(vocab_size) for _ in range(all_drafts)] for _ in sampled_token_ids
        ]
    clock = _StepClock(runner)
    heads = getattr(getattr(runner, "drafter", None), "heads", None)
    whole = getattr(heads, "options", None)

    def measure(request: Message) -> Message:
        if "nodes" in request:
            heads.options = replace(whole, tree=whole.tree[: request["nodes"]])
        batch = request.get("batch", 1)
        clock.expect(request.get("nodes", all_drafts), batch)
        prompts = [
            {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(request["context"])]} for _ in range(batch)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)
        return {"seconds": clock.seconds, "drafting": clock.drafting}

    return {"ready": True}, measure


if __name__ == "__main__":
    run_worker(start)
