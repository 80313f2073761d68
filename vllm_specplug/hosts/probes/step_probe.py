"""Time of decoding steps in a real engine, verification and drafting apart: one JSON line in, one JSON line out.

The first line holds the arguments of ``LLM``; then ``{"context", "max_tokens"}`` decodes one random prompt of
``context`` tokens and answers ``seconds`` of every step that verified a full draft, and ``drafting``, what drafting
took in it.  ``batch`` decodes as many prompts at once; ``nodes`` cuts a Medusa tree to its first ones.  Without a
speculative configuration the steps are plain ones.  The stock chain's drafts are random ids, since only their number
matters to its verification.  The engine has the threads that it has when it serves.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import replace
from typing import Any

from vllm_specplug.hosts.probes.served_threads import use_served_threads


class _StepClock:
    """Wraps a model runner: seconds of each step without those of the drafting inside it, and those."""

    def __init__(self, runner: Any):
        self.expect(0, 1)
        self._drafting = self._running = 0.0
        self._full = False
        for name in ("execute_model", "sample_tokens", "propose_draft_token_ids"):
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def expect(self, num_drafts: int, batch: int) -> None:
        """Forget what was measured; from now on count the steps of that many requests with that many drafts each."""
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


def main() -> None:
    """Serve requests on the standard streams."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the host prints goes to the log
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runner must be within reach
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.stdin.readline())
    speculative = arguments.get("speculative_config") or {}
    llm = LLM(**arguments)
    use_served_threads(llm.llm_engine.vllm_config)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
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
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "nodes" in request:
            heads.options = replace(whole, tree=whole.tree[: request["nodes"]])
        batch = request.get("batch", 1)
        clock.expect(request.get("nodes", all_drafts), batch)
        prompts = [
            {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(request["context"])]} for _ in range(batch)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"seconds": clock.seconds, "drafting": clock.drafting}), file=replies, flush=True)


if __name__ == "__main__":
    main()
