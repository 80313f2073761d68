"""Measures a trace that changes its kind of text: the loss of a measured budget against the best fixed choice.

    python benchmarks/end_to_end/trace.py --segment translation=spec_bench.jsonl --segment code=human_eval.jsonl
        --out trace.json

Every method has its own engine and answers the whole trace; the methods take turns, block by block.  Within a segment,
regret is how much slower the measured union is than the fastest method with a fixed budget (plain decoding included),
in tokens per second, prompts included.  Each question comes once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_specplug.tools.bench.methods import METHODS, Method
from vllm_specplug.tools.bench.questions import Question, read_questions
from vllm_specplug.tools.bench.workers import Measurement, started
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.utils.tables import format_table

ADAPTIVE = "union, measured"
BLOCK, WARM_UPS = 10, 3


def segment_of(text: str, size: int) -> tuple[str, list[Question]]:
    """Read ``CATEGORY=FILE``: the questions of that category, or all of a file that has one category only."""
    name, separator, file = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: expected CATEGORY=FILE")
    questions = read_questions(Path(file))
    own = [question for question in questions if question.category == name]
    return name, (own or questions)[:size]


def run(segments: dict[str, list[Question]], methods: list[Method], max_tokens: int, kv_gib: int) -> dict[str, Any]:
    """Measure blocks of requests, by method and segment."""
    engine = {"model": str(prepare()), "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8}
    engine |= {"enable_prefix_caching": False, "disable_log_stats": False}
    found: dict[str, Any] = {method.label: {name: [] for name in segments} for method in methods}
    with started(methods, engine, kv_gib) as workers:
        for worker in workers:
            for question in next(iter(segments.values()))[-WARM_UPS:]:
                worker.generate([question], max_tokens)
        turn = 0
        for name, questions in segments.items():
            for first in range(0, len(questions), BLOCK):
                block, turn = questions[first : first + BLOCK], turn + 1
                for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                    found[worker.method.label][name].append(worker.generate(block, max_tokens, at_once=1))
                print(f"{name}: {first + len(block)} of {len(questions)}", file=sys.stderr, flush=True)
        for worker in workers:
            worker.close()
    return found


def rate(blocks: list[Measurement]) -> float:
    """Return tokens per second."""
    return sum(block.tokens for block in blocks) / sum(block.seconds for block in blocks)


def summary(found: dict[str, dict[str, list[Measurement]]]) -> dict[str, Any]:
    """Return by segment: rates of all methods, the best fixed one, the regret."""
    result = {}
    for name in found[ADAPTIVE]:
        rates = {label: round(rate(by_segment[name]), 2) for label, by_segment in found.items()}
        best = max((label for label in rates if label != ADAPTIVE), key=rates.__getitem__)
        result[name] = {
            "requests": sum(len(block.questions) for block in found[ADAPTIVE][name]),
            "tokens per second": rates,
            "best fixed": best,
            "regret": round(1 - rates[ADAPTIVE] / rates[best], 4),
            "by block": {label: [round(b.rate, 1) for b in by_segment[name]] for label, by_segment in found.items()},
        }
    return result


def table(result: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    labels = list(next(iter(result.values()))["tokens per second"])
    rows = [
        [name, *(f"{s['tokens per second'][label]:.1f}" for label in labels), f"{100 * s['regret']:.1f}%"]
        for name, s in result.items()
    ]
    return format_table(["tokens/s", *labels, "regret"], rows, markdown=True)


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw tokens per second over the trace."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes, start = figure.subplots(), 0
    colours = {label: f"C{i}" for i, label in enumerate(next(iter(result.values()))["by block"])}
    for name, segment in result.items():
        for label, rates in segment["by block"].items():
            width = 2.5 if label == ADAPTIVE else 1.0
            places = [start + BLOCK * (i + 0.5) for i in range(len(rates))]
            axes.plot(places, rates, ".-", color=colours[label], linewidth=width, label=label if not start else None)
        axes.annotate(name, (start, 1.01), xycoords=("data", "axes fraction"), fontsize="small")
        start += segment["requests"]
        axes.axvline(start, color="grey", linewidth=0.6)
    axes.set(xlabel="requests", ylabel="tokens/s, prompts included", ylim=(0, None))
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_figure(str(file), dpi=120)


def main() -> None:
    """Run the trace, print the table, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segment", action="append", required=True, metavar="CATEGORY=FILE")
    parser.add_argument("--size", type=int, default=50, help="requests of a segment, if there are so many")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--kv-gib", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON; a picture is written beside it")
    args = parser.parse_args()
    segments = dict(segment_of(text, args.size) for text in args.segment)
    methods = [
        Method("plain", None),
        Method("eagle2", METHODS["eagle2"]),
        Method("lookup", METHODS["lookup"]),
    ]
    methods += [Method("union", METHODS["union"]), Method(ADAPTIVE, METHODS["union"] | {"budget": "measured"})]
    result = summary(run(segments, methods, args.max_tokens, args.kv_gib))
    about = provenance("the fastest method with a fixed budget in each segment, same run")
    args.out.write_text(json.dumps({"provenance": about, "segments": result}, indent=1) + "\n")
    plot(result, args.out.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main()
