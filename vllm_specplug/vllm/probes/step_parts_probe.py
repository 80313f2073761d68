"""Measures the parts of a decoding step, its drafted trees, and the time that more nodes cost.

A worker process with the engine in it.  The first message has the arguments of ``LLM`` and is answered with facts about
the machine.  The requests:

``{"texts", "max_tokens"}``: milliseconds of a step by part (see ``PartsClock``); with ``"together"``, of one batch.
``{"texts", "max_tokens", "count"}``: drafted trees with the text of their tokens, and the reliability bins.
``{"nodes": [..], "context", "max_tokens"}``: milliseconds of a step without drafting, by number of verified nodes.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from vllm_specplug.budget.calibration import Reliability
from vllm_specplug.utils.worker_pipe import Engine, Message, run_worker
from vllm_specplug.vllm.probes.bench_worker import prompts_of
from vllm_specplug.vllm.probes.in_process import runner_of, start_in_process
from vllm_specplug.vllm.trace import TreeTrace, source_shares

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


def read_bandwidth_gb_s(mib: int = 256, repeats: int = 5) -> float:
    """Measure how fast the engine's threads read memory, in GB/s: the best of ``repeats`` passes over ``mib`` MiB."""
    values = torch.ones(mib * 2**18)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - start)
    return round(values.numel() * values.element_size() / best / 1e9, 2)


def weight_bytes(model: str, element_size: int) -> int:
    """Return the bytes of weights that a decode step reads.

    They are read from the checkpoint, because vLLM may drop tensors that it has packed.

    Args:
        model: directory of ``.safetensors`` files.
        element_size: bytes of one weight in the engine.
    """
    sizes: dict[str, int] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as shard:
            sizes |= {name: math.prod(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    if "lm_head.weight" in sizes:  # of an embedding that is not also the head, a step reads single rows
        sizes = {name: size for name, size in sizes.items() if "embed_tokens" not in name}
    return sum(sizes.values()) * element_size


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


def traced_trees(llm: Any, clock: PartsClock, prompts: list[dict], max_tokens: int, count: int) -> dict[str, Any]:
    """Return drafted trees and how often their nodes were accepted.

    Returns:
        ``trees``: up to ``count`` branching trees, evenly spaced over all; ``calibration``: the reliability bins; with
        merged drafts also ``sources``: contribution of each proposer (``SourceShare``).
    """
    with tempfile.TemporaryDirectory() as folder:
        clock.runner._trace = TreeTrace(str(Path(folder) / "trees"))
        try:
            decode(llm, prompts, max_tokens)
            lines = [json.loads(line) for line in clock.runner._trace.path.read_text().splitlines()]
            _, shares = source_shares(clock.runner._trace.path)
        finally:
            clock.runner._trace = TreeTrace(None)
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


def step_costs(llm: Any, clock: PartsClock, nodes: list[int], context: int, max_tokens: int) -> list[dict[str, float]]:
    """Return the median milliseconds of a step without drafting, for each number of verified nodes."""
    draw, vocab_size = random.Random(0), llm.llm_engine.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(context)]}
    drafter, results = clock.runner.drafter, []
    options = drafter.options
    for count in nodes:
        drafter.options = replace(options, num_speculative_tokens=count, min_node_value=0.0, min_level_value=0.0)
        clock.steps.clear()
        decode(llm, [prompt], max_tokens, ignore_eos=True)
        seconds = [spent["step"] - spent["draft"] for spent in clock.steps]
        results.append({"nodes": count, "step_ms": round(statistics.median(seconds) * 1e3, 3)})
    drafter.options = options
    return results


def start(arguments: Message) -> Engine:
    """Start the engine and its clock, for ``run_worker``."""
    switches = arguments.pop("chat_template_kwargs", None)
    llm = start_in_process(arguments)
    clock = PartsClock(llm)
    config = llm.llm_engine.model_config
    machine = {"weight_bytes": weight_bytes(config.model, config.dtype.itemsize), "read_gb_s": read_bandwidth_gb_s()}

    def ask(request: Message) -> Message:
        if "nodes" in request:
            return {"steps": step_costs(llm, clock, request["nodes"], request["context"], request["max_tokens"])}
        prompts = prompts_of(llm, request["texts"], request["max_tokens"], switches)
        if request.get("together"):
            decode_together(llm, prompts, request["max_tokens"])
            clock.steps.clear()
            decode_together(llm, prompts, request["max_tokens"])
            return clock.mean_parts()
        if "count" in request:
            return traced_trees(llm, clock, prompts, request["max_tokens"], request["count"])
        decode(llm, prompts[:1], request["max_tokens"])
        clock.steps.clear()
        decode(llm, prompts, request["max_tokens"])
        return clock.mean_parts()

    return machine | {"threads": torch.get_num_threads()}, ask


if __name__ == "__main__":
    run_worker(start)
