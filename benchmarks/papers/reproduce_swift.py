"""Reproduces SWIFT's ablation at this scale: layer search, early stop, dynamic verification, number of skipped layers.

    python -m benchmarks.papers.reproduce_swift --questions spec_bench_dev.jsonl --out claims.json

SmolLM2-135M-Instruct drafts for itself in the real engine.  A layer set is searched for each skip ratio on the first
questions, or taken from a file of ``benchmarks/end_to_end/swift.py`` (``--searched``).  Everything is measured on the
last questions, which the search has not seen; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.end_to_end.swift import TASKS, Engine, expected_speedup
from benchmarks.papers.reproductions import Figures, gain, gain_text, run_script, write
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.proposers.swift import drafting
from vllm_specplug.proposers.swift.layer_set import LayerSet
from vllm_specplug.proposers.swift.options import SwiftOptions
from vllm_specplug.proposers.swift.search import LayerSearch, SearchOptions

NODES, DEPTH = 128, SwiftOptions.draft_depth
SOURCE = "SWIFT (arXiv 2410.06916, {})"


@dataclass(frozen=True)
class Drafts:
    """Outcomes of drafts, question by question.

    Attributes:
        rounds, steps, accepted: drafts verified, forwards of their chains, tokens accepted.
    """

    rounds: list[int]
    steps: list[int]
    accepted: list[int]

    @property
    def length(self) -> float:
        """``M``: tokens per verification, the bonus token counted."""
        return 1 + sum(self.accepted) / sum(self.rounds)

    @property
    def alpha(self) -> float:
        """Accepted tokens per forward of a draft."""
        return sum(self.accepted) / sum(self.steps)

    @property
    def cycles(self) -> list[tuple[int, int]]:
        """Tokens and verifications."""
        return [(rounds + accepted, rounds) for rounds, accepted in zip(self.rounds, self.accepted, strict=True)]

    @property
    def per_forward(self) -> list[tuple[int, int]]:
        """Accepted tokens and forwards, whose quotient is ``alpha``."""
        return list(zip(self.accepted, self.steps, strict=True))

    def cells(self, skip_ratio: float) -> list[str]:
        """Forwards per draft, alpha, M, and the speedup of the paper's equation 6."""
        expected = expected_speedup(self.length, self.alpha, skip_ratio)
        forwards = sum(self.steps) / sum(self.rounds)
        return [f"{forwards:.2f}", f"{self.alpha:.3f}", f"{self.length:.3f}", f"{expected:.3f}x"]


#: Headers of ``Drafts.cells``.
HEADERS = ["forwards per draft", "alpha", "M (tau)", "expected speedup"]


@contextmanager
def no_siblings() -> Iterator[None]:
    """Make drafts chains: no position contributes more than its best token."""
    bands, drafting.BANDS = drafting.BANDS, ()
    try:
        yield
    finally:
        drafting.BANDS = bands


def measure(engine: Engine, texts: Sequence[str], layer_set: LayerSet, ratio: float, min_confidence: float) -> Drafts:
    """Answer every question with that layer set, without searching."""
    engine.drafter.options = replace(engine.drafter.options, min_confidence=min_confidence, skip_ratio=ratio)
    engine.restart(SearchOptions(layer_set.num_layers, ratio), share=0.0).best = layer_set
    found, counts = Drafts([], [], []), engine.drafter.state.acceptance
    for text in texts:
        before = (counts.rounds, counts.draft_steps, counts.accepted)
        engine.answer(text)
        after = (counts.rounds, counts.draft_steps, counts.accepted)
        for values, old, new in zip((found.rounds, found.steps, found.accepted), before, after, strict=True):
            values.append(new - old)
    return found


def search(engine: Engine, texts: Sequence[str], layers: int, ratio: float, steps: int) -> LayerSearch:
    """Run the search alone, on plain answers."""
    options = SearchOptions(layers, ratio, max_steps=steps, patience=steps, goal=1.0)
    engine.drafter.options = replace(engine.drafter.options, skip_ratio=ratio)
    found = engine.restart(options)
    engine.drafting(False)
    while not found.stopped:
        for text in texts:
            engine.answer(text)
            if found.stopped:
                break
    engine.drafting(True)
    return found


def searched_set(engine: Engine, texts: Sequence[str], layers: int, ratio: float, steps: int) -> dict:
    """Search a layer set; return it and its matchness."""
    found = search(engine, texts, layers, ratio, steps)
    return {"set": [found.best.attention, found.best.mlp], "matchness": found.matchness or 0.0}


def ablation(found: dict[str, Drafts], ratio: float) -> dict:
    """Reproduce table 8 of the paper."""
    whole = found["SWIFT"]
    early, _, _ = gain(whole.per_forward, found["no early stop"].per_forward)
    tree, _, _ = gain(whole.cycles, found["no dynamic verification"].cycles)
    searched = expected_speedup(whole.length, whole.alpha, ratio)
    uniform = found["no optimisation"]
    uniform_speedup = expected_speedup(uniform.length, uniform.alpha, ratio)
    verdict = (
        f"early stop multiplies alpha by {early:.2f}; dynamic verification multiplies M by {tree:.2f}; the search "
        f"multiplies the expected speedup by {searched / uniform_speedup:.2f}. With all of them alpha is "
        f"{whole.alpha:.2f} and M {whole.length:.2f}, for an expected speedup of {searched:.2f}x before any overhead."
    )
    rows = [
        [name, *drafts.cells(ratio), "-" if drafts is whole else gain_text(whole.cycles, drafts.cycles)]
        for name, drafts in found.items()
    ]
    return {
        "title": f"Each part switched off, {ratio:.0%} of the sub-layers skipped",
        "source": SOURCE.format("section D.1 and tables 4 and 8, LLaMA-2-13B"),
        "claim": "early stop raises alpha by 55%, dynamic verification raises M and the speedup, the search raises the "
        "speedup by 34% over uniform skipping; alpha is 0.90 to 1.00, M 2.99 to 8.21, the speedup 1.3x to 1.6x.",
        "verdict": verdict,
        "headers": ["drafts", *HEADERS, "SWIFT's M over it (95%)"],
        "rows": rows,
    }


def by_ratio(found: dict[float, dict[str, Drafts]], matchness: dict[float, float]) -> dict:
    """Measure how much of this target can be skipped."""
    speedups = {
        (ratio, name): expected_speedup(drafts.length, drafts.alpha, ratio)
        for ratio, sets in found.items()
        for name, drafts in sets.items()
    }
    best = max(speedups, key=speedups.__getitem__)
    alphas = ", ".join(f"{sets['searched'].alpha:.2f} at {ratio}" for ratio, sets in found.items())
    return {
        "title": "Skip ratio",
        "source": SOURCE.format("section 5.3, figure 8b"),
        "claim": "the best skip ratio and the speedup grow with the model: 0.45 for 13B, 0.5 for 70B.",
        "verdict": f"the expected speedup is largest at a ratio of {best[0]}, {best[1]} set ({speedups[best]:.2f}x); "
        f"alpha of the searched sets: {alphas}.",
        "headers": ["skip ratio", "layer set", "matchness at the end of the search", *HEADERS],
        "rows": [
            [ratio, name, f"{matchness[ratio]:.3f}" if name == "searched" else "-", *drafts.cells(ratio)]
            for ratio, sets in found.items()
            for name, drafts in sets.items()
        ],
    }


def main() -> None:
    """Run the command (see the module's docstring)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", required=True, type=Path, metavar="FILE", help="JSONL in Spec-Bench's layout")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.45], help="the last: the ablation")
    parser.add_argument("--searched", type=Path, help="take the sets from this file of benchmarks/end_to_end/swift.py")
    parser.add_argument("--steps", type=int, default=300, help="candidates of each search")
    parser.add_argument("--count", type=int, default=15, help="questions to measure on")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    questions = read_questions(args.questions)
    by_task = [[q.text for q in questions if q.category == task] for task in TASKS]
    mixed = [text for group in zip(*by_task, strict=False) for text in group]
    if len(mixed) < args.count + (args.searched is None):
        parser.error(f"--questions: too few; --count {args.count} needs more of each category: {', '.join(TASKS)}")
    texts, held_out = mixed[: -args.count], mixed[-args.count :]
    engine = Engine(args.max_tokens, eager=True, num_speculative_tokens=NODES)
    layers, threshold = engine.drafter.state.options.num_layers, engine.drafter.options.min_confidence
    inputs = {name: value for name, value in vars(args).items() if name != "out"}
    figures = Figures(args.out, (2 + (args.searched is None)) * len(args.ratios) + 3, inputs)

    def drafts_of(name: str, layer_set: LayerSet, ratio: float, min_confidence: float) -> Drafts:
        return Drafts(**figures(name, lambda: asdict(measure(engine, held_out, layer_set, ratio, min_confidence))))

    found: dict[float, dict[str, Drafts]] = {}
    searched: dict[float, LayerSet] = {}
    matchness: dict[float, float] = {}
    for ratio in args.ratios:
        if args.searched is None:
            result = figures(f"search {ratio}", partial(searched_set, engine, texts, layers, ratio, args.steps))
            searched[ratio], matchness[ratio] = LayerSet(layers, *map(tuple, result["set"])), result["matchness"]
        else:
            ours = json.loads(args.searched.read_text())[str(ratio)]["search"]["ours"]
            searched[ratio] = LayerSet(layers, *map(tuple, ours["set"]))
            matchness[ratio] = ours["curve"][-1][1]
        sets = {"uniform": LayerSet.uniform(layers, ratio), "searched": searched[ratio]}
        found[ratio] = {name: drafts_of(f"{ratio}, {name}", s, ratio, threshold) for name, s in sets.items()}

    ratio = args.ratios[-1]
    best = searched[ratio]
    parts = {"SWIFT": found[ratio]["searched"], "no optimisation": found[ratio]["uniform"]}
    with no_siblings():
        for name, layer_set in (("no dynamic verification", best), ("neither of the two", sets["uniform"])):
            parts[name] = drafts_of(name, layer_set, ratio, threshold)
    parts["no early stop"] = drafts_of("no early stop", best, ratio, 0.0)
    origin = f"of {args.searched.name}" if args.searched else f"of {args.steps} candidates on {len(texts)} others"
    note = (
        f"not timed; {len(held_out)} questions of {args.questions.name}, greedy, at most {args.max_tokens} tokens; "
        f"searches {origin}; drafts of at most {DEPTH} forwards and {NODES} "
        f"nodes, early stop below a confidence of {threshold}; expected speedup by the paper's equation 6"
    )
    tables = [ablation(parts, ratio), *([by_ratio(found, matchness)] if len(found) > 1 else [])]
    write(
        args.out,
        [table | {"note": note} for table in tables],
        "drafts without a part, same questions",
        sets={str(r): [list(s.attention), list(s.mlp)] for r, s in searched.items()},
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
