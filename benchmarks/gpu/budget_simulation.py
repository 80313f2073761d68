"""Simulates the V2 runner's measured budget over step times of GPUs that are not at hand.

    python -m benchmarks.gpu.budget_simulation --out benchmarks/results/budget_simulation.json

Decisions are those of the class that serves (``budget.choose.ShapeBudget``), with outcomes that arrive one round
after the next one was planned.  Step times are rooflines of an 8B model on one GPU and of a
70B model on four; acceptance is that of published drafters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from vllm_specplug.budget.choose import ShapeBudget
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.budget.shapes import Shape, shapes_of
from vllm_specplug.config import parse_options
from vllm_specplug.gpu.rounds import most_rows, with_defaults
from vllm_specplug.utils.environment import provenance

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Of the default configuration of the V2 runner.
DEFAULTS = parse_options(with_defaults({"method": "eagle2", "model": "drafter"}))
NODES, DEPTH, TOP_K = DEFAULTS.num_speculative_tokens, DEFAULTS.draft_depth, DEFAULTS.draft_top_k
MAX_ROWS = most_rows(DEFAULTS, 16384)
#: Rounds of a run, and tokens of context at its begin and end.
ROUNDS, FIRST_CONTEXT, LAST_CONTEXT = 1000, 512, 1536
#: Context at which the table is measured at start.
MEASURED_CONTEXT = 1024


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what of its peaks is reached.

    Attributes:
        bandwidth: bytes per second.
        flops: dense bfloat16 operations per second.
        of_bandwidth, of_flops: shares that kernels reach.
        launches: seconds of a step that are no kernel's work.
        level: the same for one draft level.
        sampling: the same for the choice of sampled children, beyond that of the likeliest.
    """

    bandwidth: float
    flops: float
    of_bandwidth: float = 0.8
    of_flops: float = 0.6
    launches: float = 150e-6
    level: float = 100e-6
    sampling: float = 60e-6

    def seconds(self, weights: float, rows: float, read: float = 0.0) -> float:
        """Return the seconds of a forward: ``weights`` parameters in bfloat16 over ``rows``, ``read`` more bytes."""
        memory = (2 * weights + read) / (self.bandwidth * self.of_bandwidth)
        return max(
            memory, 2 * weights * rows / (self.flops * self.of_flops) + read / (self.bandwidth * self.of_bandwidth)
        )


GPUS = {"H200": Gpu(4.8e12, 990e12), "A100": Gpu(2.0e12, 312e12), "B200": Gpu(8.0e12, 2250e12)}


@dataclass(frozen=True)
class Model:
    """A target and its drafter (one layer and its input projection), by GPU.

    Attributes:
        target: parameters with the LM head.
        layers: of the target.
        kv_bytes: of key/value per token, in all layers.
        head: parameters of the LM head.
        drafter, kept_up: parameters of the drafter; those that a plain step reads, for key/value only.
        reduce: seconds of the all-reduces of a layer, two of them, without the bytes of its rows.
    """

    target: float
    layers: int
    kv_bytes: float
    head: float
    drafter: float
    kept_up: float
    reduce: float = 0.0


#: Llama-3.1-8B, and Llama-3.1-70B on four GPUs.
MODELS = {
    "8B": Model(8.0e9, 32, 2 * 32 * 8 * 128 * 2, 128256 * 4096, 0.25e9, 0.06e9),
    "70B TP4": Model(
        70.6e9 / 4, 80, 2 * 80 * 8 * 128 * 2 / 4, 128256 * 8192 / 4, 1.0e9 / 4, 0.24e9 / 4, 2 * 8e-6
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Drafter:
    """A published drafter.

    Attributes:
        tau: tokens per round of a request with a tree of 60 nodes and six levels.
        first: acceptance of the likeliest child alone.
        vocabulary: tokens that its LM head scores.
    """

    tau: float
    first: float
    vocabulary: int = 128256


@cache
def acceptance_of(drafter: Drafter, nodes: int) -> float:
    """Return the acceptance of one level: from ``first`` for one node, by doublings, to what gives ``tau``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_of(middle, DEPTH) < drafter.tau - 1 else (low, middle)
    first = min(drafter.first, low)
    return first + (low - first) * min(np.log2(nodes + 1) / np.log2(64), 1.0)


@cache
def accepted_of(acceptance: float, depth: int) -> float:
    """Return the accepted nodes of a path of so many levels."""
    return sum(acceptance**level for level in range(1, depth + 1))


#: Acceptance of a level at temperature 1 over that at 0: EAGLE-2 (Li et al. 2024, table 1) loses a tenth of its tokens.
SAMPLED = 0.93
#: EAGLE-2 (Li et al. 2024): 4 to 5.5; HASS's table has 4.40 for Llama-3-8B.  EAGLE-3 (Li et al. 2025): 6.1 to 6.7.
DRAFTERS = {
    "EAGLE-2": Drafter(4.4, 0.7),
    "EAGLE-3": Drafter(6.1, 0.8, 32000),
    "worth nothing": Drafter(1.03, 0.01),
}


@dataclass(frozen=True)
class Setting:
    """What is simulated: GPU, model, and whether the requests sample."""

    gpu: Gpu
    model: Model
    sampled: bool = False

    def step(self, rows: float, num_reqs: int, context: float) -> float:
        """Return the seconds of a step of stock vLLM, which keeps no drafter up to date."""
        model = self.model
        read = num_reqs * context * model.kv_bytes
        return self.gpu.launches + model.layers * model.reduce + self.gpu.seconds(model.target, rows, read)

    def round(self, drafter: Drafter, shape: Shape | None, num_reqs: int, context: float) -> float:
        """Return the seconds of a round: verification, and the draft phase after it."""
        gpu, model, rows = self.gpu, self.model, num_reqs * (1 if shape is None else shape.nodes + 1)
        seconds = self.step(rows, num_reqs, context)
        if shape is None:
            return seconds + gpu.seconds(model.kept_up, num_reqs) + 10e-6
        head, read = model.head * drafter.vocabulary / 128256, num_reqs * context * model.kv_bytes / model.layers
        level = gpu.level + model.reduce + self.sampled * gpu.sampling
        seconds += level + gpu.seconds(model.drafter, rows, read) + gpu.seconds(head, num_reqs)
        width = num_reqs * TOP_K
        level += gpu.seconds(model.drafter, width, read) + gpu.seconds(head, width)
        return seconds + (shape.depth - 1) * level

    def acceptance(self, drafter: Drafter, nodes: int) -> float:
        """Return the acceptance of one level; sampled tokens agree less often."""
        return acceptance_of(drafter, nodes) * (SAMPLED if self.sampled else 1.0)


@dataclass(frozen=True)
class Scenario:
    """What happens in a run.

    Attributes:
        phases: the drafter's quality, in equal parts of the run.
        wrong_times: factor on the measured seconds of rounds with drafts, and of plain rounds.
    """

    phases: tuple[str, ...]
    wrong_times: tuple[float, float] = (1.0, 1.0)


SCENARIOS = {
    "EAGLE-2": Scenario(("EAGLE-2",)),
    "EAGLE-3": Scenario(("EAGLE-3",)),
    "worth nothing": Scenario(("worth nothing",)),
    "drift: EAGLE-2, worth nothing, EAGLE-2": Scenario(("EAGLE-2", "worth nothing", "EAGLE-2")),
    "drift: worth nothing, EAGLE-2": Scenario(("worth nothing", "EAGLE-2")),
    "EAGLE-2, drafts measured 20% too cheap": Scenario(("EAGLE-2",), (0.8, 1.0)),
    "EAGLE-2, drafts measured 20% too expensive": Scenario(("EAGLE-2",), (1.2, 1.0)),
}


def simulate(setting: Setting, scenario: Scenario, num_reqs: int, rounds: int, seed: int) -> dict[str, float]:
    """Run one batch and return its speed in units of plain decoding, with that of the best shapes."""
    rng = np.random.default_rng(seed)
    shapes = shapes_of(NODES, DEPTH, TOP_K)
    by_nodes: dict[int, Shape | None] = {0: None} | {shape.nodes: shape for shape in shapes}
    drafter = DRAFTERS[scenario.phases[0]]
    with_drafts, plain = scenario.wrong_times
    measured = {
        nodes: {
            count: (with_drafts if nodes else plain) * setting.round(drafter, shape, count, MEASURED_CONTEXT)
            for count in REQUESTS
        }
        for nodes, shape in by_nodes.items()
    }
    budget = ShapeBudget(RoundCost(measured, max(REQUESTS)), shapes, MAX_ROWS)
    seconds = plain_seconds = best_seconds = 0.0
    late: deque[tuple[int, int, float]] = deque()
    chosen: dict[int, int] = {}
    nodes = 0
    for step in range(rounds):
        context = FIRST_CONTEXT + (LAST_CONTEXT - FIRST_CONTEXT) * step / rounds
        drafter = DRAFTERS[scenario.phases[step * len(scenario.phases) // rounds]]
        # vLLM schedules this round's drafts before it has the output of the round.
        upcoming = budget.plan(num_reqs)
        while late:
            known, accepted, took = late.popleft()
            budget.learn(known, accepted, num_reqs)
            budget.cost.observe(known, num_reqs, took)
        shape = by_nodes[nodes]
        accepted = 0
        if shape is not None:
            chance = setting.acceptance(drafter, shape.nodes)
            levels = np.minimum(rng.geometric(1 - chance, num_reqs) - 1, shape.depth)
            accepted = int(levels.sum())
        took = setting.round(drafter, shape, num_reqs, context) * rng.normal(1, 0.02)
        late.append((nodes, accepted, took))
        seconds += took
        stock = setting.step(num_reqs, num_reqs, context)
        plain_seconds += stock * (1 + accepted / num_reqs)  # for as many tokens
        per_token = [stock / num_reqs]
        for one in shapes:
            if num_reqs * (one.nodes + 1) <= MAX_ROWS:
                expected = 1 + accepted_of(setting.acceptance(drafter, one.nodes), one.depth)
                per_token.append(setting.round(drafter, one, num_reqs, context) / num_reqs / expected)
        best_seconds += min(per_token) * (num_reqs + accepted)
        chosen[nodes] = chosen.get(nodes, 0) + 1
        nodes = upcoming
    usual = max(chosen, key=lambda count: chosen[count])
    return {
        "speedup": plain_seconds / seconds,
        "best": plain_seconds / best_seconds,
        "usual_nodes": usual,
        "share": chosen[usual] / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    began, found = time.perf_counter(), []
    for names in product(GPUS, MODELS, ("greedy", "sampled"), SCENARIOS):
        gpu, model, how, title = names
        setting = Setting(GPUS[gpu], MODELS[model], how == "sampled")
        for num_reqs in REQUESTS:
            runs = [simulate(setting, SCENARIOS[title], num_reqs, args.rounds, seed) for seed in range(args.seeds)]
            slowest = min(runs, key=lambda run: run["speedup"])
            named = {"gpu": gpu, "model": model, "requests_are": how, "scenario": title}
            found.append({**named, "requests": num_reqs, **slowest})
        line = " ".join(f"{run['speedup']:.2f}/{run['best']:.2f}({run['usual_nodes']})" for run in found[-9:])
        print(f"{', '.join(names)}: {line}", flush=True)
    least = min(run["speedup"] for run in found)
    print(f"slowest: {least:.3f} of plain decoding; {time.perf_counter() - began:.0f} s")
    if args.out is not None:
        content = {
            "provenance": provenance("plain decoding without a drafter, same roofline"),
            "assumptions": {name: vars(gpu) for name, gpu in GPUS.items()}
            | {name: vars(model) for name, model in MODELS.items()}
            | {name: vars(drafter) for name, drafter in DRAFTERS.items()}
            | {"rounds": args.rounds, "nodes": NODES, "depth": DEPTH, "top_k": TOP_K},
            "slowest": least,
            "runs": found,
        }
        args.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
