"""A look inside decode rounds: where their time goes, what trees are drafted, what more nodes cost.

Served by ``bench.serving``, like ``bench_worker``, but the engine runs in this process, so that its runner is within
reach; with the threads that it has when it serves.  It is started with the arguments of ``LLM``, says facts about the
machine, and is asked by key:

``stages``   ``{"texts", "max_tokens"}``: milliseconds of a decode round by stage; with ``"together"``, of one batch.
``trees``    the same, with ``"count"``: drafted trees with their tokens' text, and predicted against real acceptance.
``nodes``    ``{"nodes": [..], "context", "max_tokens"}``: milliseconds of a step, drafting left out, by verified nodes.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from vllm_specplug.budget.calibration import Reliability
from vllm_specplug.hosts.probes.bench_worker import prompts_of
from vllm_specplug.hosts.probes.served_threads import use_served_threads
from vllm_specplug.hosts.v1.trace import TreeTrace, source_shares
from vllm_specplug.tools.bench.serving import Engine, Message, run_worker

_STAGES = ("verify", "draft", "draft_forward", "decide")
#: Of the measured budget.
_DECISIONS = ("begin", "plan", "wants_model_drafter", "select", "end")


class RoundClock:
    """Wraps an engine in this process: seconds of every decode round (no prompt in it), in all and by stage."""

    def __init__(self, llm: Any):
        self.rounds: list[dict[str, float]] = []
        self._spent = dict.fromkeys(_STAGES, 0.0)
        self._decoding = False
        engine = llm.llm_engine
        self.runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        drafter = getattr(self.runner, "drafter", None)
        self._wrap(self.runner, "_model_forward", "verify")
        self._wrap(self.runner.model, "compute_logits", "verify")
        if hasattr(self.runner, "propose_draft_token_ids"):
            self._wrap(self.runner, "propose_draft_token_ids", "draft")
        if hasattr(drafter, "model") and hasattr(drafter.model, "forward"):
            self._wrap(drafter.model, "forward", "draft_forward")
            self._wrap(*((drafter, "_score") if hasattr(drafter, "_score") else (drafter.model, "compute_logits")))
        elif hasattr(drafter, "heads"):  # Medusa's
            self._wrap(drafter.heads, "_logits", "draft_forward")
        if budget := getattr(self.runner, "serving_budget", None):
            for name in _DECISIONS:
                self._wrap(budget, name, "decide")
            self._wrap(budget.budget, "may_grow", "decide")
        execute, step = self.runner.execute_model, engine.step

        def noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            tokens = scheduler_output.num_scheduled_tokens
            self._decoding = all(count == 1 + len(drafts.get(request, ())) for request, count in tokens.items())
            return execute(scheduler_output, *args, **kwargs)

        def timed() -> Any:
            self._spent, self._decoding = dict.fromkeys(_STAGES, 0.0), False
            start = time.perf_counter()
            result = step()
            if self._decoding:
                self.rounds.append(self._spent | {"round": time.perf_counter() - start})
            return result

        self.runner.execute_model, engine.step = noted, timed

    def _wrap(self, owner: Any, name: str, stage: str = "draft_forward") -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[stage] += time.perf_counter() - start

        setattr(owner, name, timed)

    def stages(self) -> dict[str, float]:
        """Means in milliseconds over the rounds between the quartiles of their time, so that the stages add up."""
        if not self.rounds:
            raise RuntimeError("no round without a prompt was seen: ask for more tokens")
        ordered = sorted(self.rounds, key=lambda spent: spent["round"])
        middle = ordered[len(ordered) // 4 : max(3 * len(ordered) // 4, len(ordered) // 4 + 1)]
        mean = {name: statistics.fmean(spent[name] for spent in middle) * 1e3 for name in ("round", *_STAGES)}
        found = {
            "rounds": len(self.rounds),
            "round_ms": round(mean["round"], 3),
            "verify_ms": round(mean["verify"], 3),
            "draft_forward_ms": round(mean["draft_forward"], 3),
            "draft_other_ms": round(mean["draft"] - mean["draft_forward"], 3),
            "host_ms": round(mean["round"] - mean["verify"] - mean["draft"], 3),
        }
        # Within the other parts: the budget's own time.
        return found | ({"decide_ms": round(mean["decide"], 3)} if mean["decide"] else {})


def read_bandwidth_gb_s(mib: int = 256, repeats: int = 5) -> float:
    """Bytes per second that this process reads from memory with the engine's threads: the best of some passes."""
    import torch

    values = torch.ones(mib * 2**18)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - start)
    return round(values.numel() * values.element_size() / best / 1e9, 2)


def weight_bytes(model: str, element_size: int) -> int:
    """Bytes of the weights that a decode step reads, from the checkpoint (the host may drop tensors that it packed).

    Args:
        model: directory of ``.safetensors`` files.
        element_size: bytes of one weight in the engine.
    """
    sizes: dict[str, int] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as shard:
            sizes |= {name: math.prod(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    if "lm_head.weight" in sizes:  # of an embedding that is no head as well, a step reads single rows
        sizes = {name: size for name, size in sizes.items() if "embed_tokens" not in name}
    return sum(sizes.values()) * element_size


def decode(llm: Any, prompts: list[dict], max_tokens: int, ignore_eos: bool = False) -> None:
    """Greedy answers, one prompt at a time."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    for prompt in prompts:
        llm.generate([prompt], sampling, use_tqdm=False)


def decode_together(llm: Any, prompts: list[dict], max_tokens: int) -> None:
    """Greedy answers of one length, all under way at once."""
    from vllm import SamplingParams

    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)


def traced_trees(llm: Any, clock: RoundClock, prompts: list[dict], max_tokens: int, count: int) -> dict[str, Any]:
    """``trees``: ``count`` trees of branching drafts, evenly spaced over all; ``calibration``: the reliability bins;
    and ``sources``, where drafts are merged: what each proposer earned (``SourceShare``)."""
    with tempfile.TemporaryDirectory() as folder:
        clock.runner._trace = TreeTrace.open(str(Path(folder) / "trees"))
        try:
            decode(llm, prompts, max_tokens)
            lines = [json.loads(line) for line in clock.runner._trace.path.read_text().splitlines()]
            _, shares = source_shares(clock.runner._trace.path)
        finally:
            clock.runner._trace = None
    reliability = Reliability(memory=float("inf"))
    for line in lines:
        if values := line.get("log_values"):
            accepted = set(line["accepted_rows"])
            reliability.add(np.exp(values), np.array([row in accepted for row in range(1, len(values) + 1)]))
    tokenizer = llm.get_tokenizer()
    shown = [line for line in lines if len(line["token_ids"]) > 2] or lines
    trees = [shown[i * len(shown) // count] for i in range(min(count, len(shown)))]
    for tree in trees:
        tree["tokens"] = [tokenizer.decode([token]) for token in tree.pop("token_ids")]
    bins = [{"outcomes": int(n), "predicted": round(p, 4), "accepted": round(y, 4)} for n, p, y in reliability.curve()]
    found = {"trees": trees, "calibration": {"error": round(reliability.error(), 4), "bins": bins}}
    return found | ({"sources": {name: asdict(share) for name, share in shares.items()}} if shares else {})


def step_costs(llm: Any, clock: RoundClock, nodes: list[int], context: int, max_tokens: int) -> list[dict[str, float]]:
    """Median milliseconds of a step that verifies exactly so many nodes, its drafting left out."""
    draw, vocab_size = random.Random(0), llm.llm_engine.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(context)]}
    drafter, results = clock.runner.drafter, []
    options = drafter.options
    for count in nodes:
        drafter.options = replace(options, num_speculative_tokens=count, min_node_value=0.0, min_level_value=0.0)
        clock.rounds.clear()
        decode(llm, [prompt], max_tokens, ignore_eos=True)
        seconds = [spent["round"] - spent["draft"] for spent in clock.rounds]
        results.append({"nodes": count, "step_ms": round(statistics.median(seconds) * 1e3, 3)})
    drafter.options = options
    return results


def start(arguments: Message) -> Engine:
    """The engine and its clock, for ``bench.serving``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runner must be within reach
    from vllm import LLM

    llm = LLM(**arguments)
    threads = use_served_threads(llm.llm_engine.vllm_config)
    clock = RoundClock(llm)
    config = llm.llm_engine.model_config
    machine = {"weight_bytes": weight_bytes(config.model, config.dtype.itemsize), "read_gb_s": read_bandwidth_gb_s()}

    def ask(request: Message) -> Message:
        if "nodes" in request:
            return {"steps": step_costs(llm, clock, request["nodes"], request["context"], request["max_tokens"])}
        prompts = prompts_of(llm, request["texts"], request["max_tokens"])
        if request.get("together"):
            decode_together(llm, prompts, request["max_tokens"])
            clock.rounds.clear()
            decode_together(llm, prompts, request["max_tokens"])
            return clock.stages()
        if "count" in request:
            return traced_trees(llm, clock, prompts, request["max_tokens"], request["count"])
        decode(llm, prompts[:1], request["max_tokens"])
        clock.rounds.clear()
        decode(llm, prompts, request["max_tokens"])
        return clock.stages()

    return machine | {"threads": threads}, ask


if __name__ == "__main__":
    run_worker(start)
