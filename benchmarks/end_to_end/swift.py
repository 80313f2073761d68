"""Measures SWIFT on SmolLM2-135M-Instruct: its search against uniform and random skipping, speed, cost, drift.

python benchmarks/end_to_end/swift.py --questions spec_bench_dev.jsonl --out swift.json [--part search speed drift cost]

The engine runs in this process.  Each part takes some minutes on two cores; timings are ratios inside one run.
``drift``: the search first ends on tasks like those of the first segment (``--patience``), then five kinds of tasks
come, with ``adapt`` and without.  ``cost``: ``--requests`` answers, eight at once, with the method's defaults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_specplug.bench.questions import read_questions
from vllm_specplug.proposers.swift.layer_set import LayerSet
from vllm_specplug.proposers.swift.ledger import Ledger
from vllm_specplug.proposers.swift.search import LayerSearch, SearchOptions
from vllm_specplug.proposers.swift.state import SwiftState
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.vllm.probes.bench_worker import prompts_of

TASKS = (
    "summarization",
    "math_reasoning",
    "qa",
    "translation",
    "rag",
)  # the five kinds of the paper (SWIFT), in its order


class Engine:
    """SmolLM2 with SWIFT; drafting can be switched off and the layer set given."""

    def __init__(self, max_tokens: int, eager: bool, **options: Any):
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
        from vllm import LLM, SamplingParams

        swift = {"method": "swift", "budget": "fixed", "num_speculative_tokens": 16, **options}
        self.llm = LLM(
            str(prepare()),
            dtype="bfloat16",
            max_model_len=1536,
            max_num_seqs=8,
            enforce_eager=eager,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            speculative_config=swift,
        )
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.drafter, self.sampling = self.runner.drafter, SamplingParams(temperature=0, max_tokens=max_tokens)
        self._max_tokens, self._draft = max_tokens, self.drafter._draft

    def drafting(self, on: bool) -> None:
        """Switch drafting on or off; without it steps are plain ones."""
        self.drafter._draft = self._draft if on else lambda *_: []

    def answer(self, text: str) -> int:
        """Return the number of tokens of a greedy answer."""
        prompt = prompts_of(self.llm, [text], self._max_tokens)
        return len(self.llm.generate(prompt, self.sampling, use_tqdm=False)[0].outputs[0].token_ids)

    def restart(self, options: SearchOptions, share: float = 1.0, seed: int = 0) -> LayerSearch:
        """Start a search without results so far, which may take that share of the time."""
        drafter = self.drafter
        drafter.state, drafter._window = SwiftState(options, LayerSearch(options, seed)), None
        drafter.ledger = Ledger(share, share)
        drafter.options = replace(drafter.options, optimise_share=share)
        return drafter.state.search

    def score(self, sets: dict[str, LayerSet], texts: list[str]) -> dict[str, list[float]]:
        """Return the matchness of each set on every window of plain answers."""
        drafter, found = self.drafter, {name: [] for name in sets}
        gamma, seen, honest = drafter.options.context_window, Counter(), drafter._optimise
        batch = self.runner.input_batch

        def score(request_ids: list[str], _seconds: float) -> None:
            new = int(batch.num_tokens_no_spec[0] - batch.num_prompt_tokens[0])
            if drafter._wanted[0] and new // gamma > seen[request_ids[0]]:
                seen[request_ids[0]] = new // gamma
                start = int(batch.num_tokens_no_spec[0]) - 1 - gamma
                for name, layer_set in sets.items():
                    found[name].append(drafter._matchness(layer_set, 0, start))

        drafter._optimise = score
        self.drafting(False)
        try:
            for text in texts:
                self.answer(text)
        finally:
            drafter._optimise = honest
            self.drafting(True)
        return found


def expected_speedup(tokens_per_step: float, acceptance: float, skip_ratio: float) -> float:
    """Return ``M alpha / ((M - 1) c + alpha)`` with ``c = 1 - r``, the relative cost of a draft (SWIFT, equation 6).

    Args:
        tokens_per_step: ``M``, including the bonus token.
        acceptance: ``alpha``, accepted tokens per drafting forward.
        skip_ratio: ``r``.
    """
    return tokens_per_step * acceptance / ((tokens_per_step - 1) * (1 - skip_ratio) + acceptance)


def search_part(engine: Engine, texts: list[str], held_out: list[str], steps: int) -> dict[str, Any]:
    """Compare the search with random sets at equal steps, then all sets on questions that neither has seen."""
    found: dict[str, Any] = {}
    ratio, layers = engine.drafter.options.skip_ratio, engine.drafter.state.options.num_layers
    sets = {"uniform": LayerSet.uniform(layers, ratio)}
    for name, changes in {"ours": {}, "pure chance": {"bayes_every": 0, "fresh": 1.0}}.items():
        options = SearchOptions(layers, ratio, max_steps=steps, patience=steps, goal=1.0, **changes)
        search = engine.restart(options)
        engine.drafting(False)
        begin = time.perf_counter()
        while not search.stopped:
            for text in texts:
                engine.answer(text)
                if search.stopped:
                    break
        sets[name] = search.best
        found[name] = {
            "seconds": round(time.perf_counter() - begin, 1),
            "curve": [[s, round(m, 4)] for s, m, _ in search.history],
            "phases": {k: round(v, 2) for k, v in engine.drafter.state.seconds.items()},
            "set": [list(search.best.attention), list(search.best.mlp)],
        }
        engine.drafting(True)
    scores = engine.score(sets, held_out)
    found["held out"] = {
        name: {"matchness": round(float(np.mean(s)), 4), "windows": len(s)} for name, s in scores.items()
    }
    against = np.subtract(scores["ours"], scores["uniform"]), np.subtract(scores["ours"], scores["pure chance"])
    found["held out"]["ours ahead of (uniform, pure chance)"] = [
        {"mean": round(float(d.mean()), 4), "standard error": round(float(d.std() / len(d) ** 0.5), 4)} for d in against
    ]
    return found


def speed_part(engine: Engine, texts: list[str], layer_set: LayerSet, min_confidence: float) -> dict[str, Any]:
    """Answer each question with and without drafts: acceptance, expected speedup, measured speedup."""
    options = engine.drafter.state.options
    engine.restart(options, share=0.0).best = layer_set
    engine.drafter.options = replace(engine.drafter.options, min_confidence=min_confidence)
    engine.answer(texts[0])
    engine.restart(options, share=0.0).best = layer_set
    ratios, tokens, seconds = [], [0, 0], [0.0, 0.0]
    for text in texts:
        rates = []
        for number, drafting in enumerate((True, False)):
            engine.drafting(drafting)
            kept = dict(vars(engine.drafter.state.acceptance))
            begin = time.perf_counter()
            count = engine.answer(text)
            seconds[number] += time.perf_counter() - begin
            tokens[number] += count
            rates.append(count / (time.perf_counter() - begin))
            if not drafting:  # the counts are of steps with drafts only
                vars(engine.drafter.state.acceptance).update(kept)
        ratios.append(rates[0] / rates[1])
    engine.drafting(True)
    accepted = engine.drafter.state.acceptance
    return {
        "skip_ratio": options.skip_ratio,
        "min_confidence": min_confidence,
        "M": round(accepted.tokens_per_step, 3),
        "alpha": round(accepted.alpha, 3),
        "expected speedup": round(expected_speedup(accepted.tokens_per_step, accepted.alpha, options.skip_ratio), 3),
        "real speedup": round(tokens[0] / seconds[0] / (tokens[1] / seconds[1]), 3),
        "median speedup of a question": round(statistics.median(ratios), 3),
    }


def drift_part(
    engine: Engine, by_task: dict[str, list[str]], warm_up: list[str], steps: int, patience: int, share: float
) -> dict[str, Any]:
    """Finish a search, then run a stream of tasks: acceptance of each kind, with adaptation and without."""
    old = engine.drafter.state.options
    found: dict[str, Any] = {"most candidates": steps, "patience": patience, "share of the time": share}
    options = SearchOptions(old.num_layers, old.skip_ratio, max_steps=steps, patience=patience, goal=0.95)
    search = engine.restart(options, share)
    engine.drafting(False)
    for number in itertools.count():
        if search.stopped:
            break
        engine.answer(warm_up[number % len(warm_up)])
    engine.drafting(True)
    ended = search.to_json()
    found["warm-up"] = {"ended after": search.stopped, "candidates": search.all_steps, "matchness": search.matchness}
    for name, adapt in (("adaptation", True), ("no adaptation", False)):
        engine.restart(options, share)
        search = LayerSearch.from_json(replace(options, adapt=adapt), ended)
        engine.drafter.state.search = search
        segments = {}
        for task, texts in by_task.items():
            before, candidates = dict(vars(engine.drafter.state.acceptance)), search.all_steps
            for text in texts:
                engine.answer(text)
            now = vars(engine.drafter.state.acceptance)
            rounds, steps, accepted = (now[key] - before[key] for key in ("rounds", "draft_steps", "accepted"))
            segments[task] = {
                "alpha": round(accepted / max(steps, 1), 4),
                "M": round(1 + accepted / max(rounds, 1), 3),
                "rounds": rounds,
                "matchness at its end": round(search.matchness or 0.0, 4),
                "candidates": search.all_steps - candidates,
                "restarts": search.restarts,
            }
            print(f"drift, {name}: {task} {segments[task]}", file=sys.stderr)
        found[name] = {"segments": segments, "restarts": search.restarts}
    return found


def cost_part(texts: list[str], requests: int, max_tokens: int) -> dict[str, Any]:
    """Measure the search's share of the time with the method's defaults (so it also ends by itself)."""
    engine = Engine(max_tokens, eager=False, budget="measured")
    prompts = prompts_of(engine.llm, texts, max_tokens)
    begin, tokens = time.perf_counter(), 0
    curve = []
    for first in tqdm(range(0, requests, 100), unit="00 requests"):
        batch = [prompts[i % len(prompts)] for i in range(first, min(first + 100, requests))]
        outputs = engine.llm.generate(batch, engine.sampling, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        seconds, search = engine.drafter.state.seconds, engine.drafter.state.search
        spent = seconds["optimise"] + seconds["propose"]
        curve.append([first + len(batch), round(spent / (time.perf_counter() - begin), 5), search.all_steps])
    return {
        "requests": requests,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - begin, 1),
        "share of the time": curve[-1][1],
        "by requests (requests, share so far, candidates so far)": curve,
        "ended": search.stopped,
        "drafting": round(seconds["draft"] / (time.perf_counter() - begin), 5),
    }


def main() -> None:
    """Run the parts and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--part", nargs="+", choices=("search", "speed", "drift", "cost"), default=["search", "speed", "drift"]
    )
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.45])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--count", type=int, default=10, help="questions of each part (drift: of each task)")
    parser.add_argument("--patience", type=int, default=60, help="of the search of drift")
    parser.add_argument("--share", type=float, default=0.2, help="of the time that the search of drift may take")
    parser.add_argument("--requests", type=int, default=1000, help="of cost")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    questions = read_questions(args.questions)
    by_task = {task: [q.text for q in questions if q.category == task] for task in args.tasks}
    mixed = [text for group in zip(*by_task.values(), strict=False) for text in group]
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    baseline = "none: shares of one run" if args.part == ["cost"] else "uniform skipping and pure chance, same run"
    results["provenance"] = provenance(baseline)
    if args.part == ["cost"]:
        results["cost"] = cost_part([question.text for question in questions], args.requests, args.max_tokens)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results, indent=1))
        return
    engine = Engine(args.max_tokens, args.eager)
    for ratio in args.ratio:
        layers = engine.drafter.state.options.num_layers
        engine.drafter.options = replace(engine.drafter.options, skip_ratio=ratio)
        engine.restart(SearchOptions(layers, ratio))
        found = results.setdefault(str(ratio), {})
        best = LayerSet.uniform(layers, ratio)
        if "search" in args.part:
            found["search"] = search_part(engine, mixed[: 4 * args.count], mixed[-args.count :], args.steps)
            args.out.write_text(json.dumps(results, indent=1))
        if "search" in found:
            best = LayerSet(layers, *map(tuple, found["search"]["ours"]["set"]))
        if "speed" in args.part:
            engine.restart(SearchOptions(layers, ratio))
            sets = {"uniform": LayerSet.uniform(layers, ratio), "searched": best}
            found["speed"] = {name: speed_part(engine, mixed[-args.count :], s, 0.8) for name, s in sets.items()}
            args.out.write_text(json.dumps(results, indent=1))
        if "drift" in args.part:
            engine.restart(SearchOptions(layers, ratio))
            warm_up = by_task[TASKS[0]][args.count :] or by_task[TASKS[0]]
            stream = {task: texts[: args.count] for task, texts in by_task.items()}
            found["drift"] = drift_part(engine, stream, warm_up, args.steps, args.patience, args.share)
            args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
