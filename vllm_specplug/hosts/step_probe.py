"""Time of verification steps in a real engine, drafting left out: one JSON line in, one JSON line out.

The first line holds the arguments of ``LLM``; then ``{"context", "max_tokens"}`` decodes one random prompt of
``context`` tokens and answers the seconds of every step that verified a full draft.  The stock chain's drafts
are random ids, since only their number matters to its verification.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


class _StepClock:
    """Wraps a model runner: seconds of each step without those of the drafting inside it."""

    def __init__(self, runner: Any, num_drafts: int):
        self.seconds: list[float] = []
        self._num_drafts = num_drafts
        self._drafting = self._running = 0.0
        self._full = False
        for name in ("execute_model", "sample_tokens", "propose_draft_token_ids"):
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_model":
                drafts = args[0].scheduled_spec_decode_tokens.values()
                self._full = [len(draft) for draft in drafts] == [self._num_drafts]
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
            return result

        return timed


def main() -> None:
    """Serve requests on the standard streams."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the host prints goes to the log
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runner must be within reach
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.stdin.readline())
    num_drafts = arguments["speculative_config"]["num_speculative_tokens"]
    llm = LLM(**arguments)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    draw = random.Random(0)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    if arguments["speculative_config"]["method"] == "ngram":
        runner.drafter.propose = lambda _num_speculative_tokens, sampled_token_ids, *_args, **_kwargs: [
            [draw.randrange(vocab_size) for _ in range(num_drafts)] for _ in sampled_token_ids
        ]
    clock = _StepClock(runner, num_drafts)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        clock.seconds.clear()
        prompt = {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(request["context"])]}
        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        llm.generate([prompt], sampling, use_tqdm=False)
        print(json.dumps({"seconds": clock.seconds}), file=replies, flush=True)


if __name__ == "__main__":
    main()
