"""``specplug bench``: methods against each other on the same questions, in one run.

Every method has an engine of its own in a worker process (``vllm_specplug.hosts.probes.bench_worker``), all alive at
once; each batch of questions goes to one method after the other, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_specplug.tools.bench.methods import BASELINE, METHODS, Method, full_vocabulary_copy, parse_methods
from vllm_specplug.tools.bench.questions import Question, make_batches, read_questions, spread_lengths
from vllm_specplug.tools.bench.results import (
    CONCURRENCY_MARKS,
    MARKS,
    build_report,
    render,
    render_concurrency,
    write_table,
)
from vllm_specplug.tools.bench.server import Server
from vllm_specplug.tools.bench.workers import PROBE_MODULE, Measurement, Part, Worker, measure, started

__all__ = [
    "METHODS",
    "Measurement",
    "Method",
    "Question",
    "Worker",
    "build_report",
    "full_vocabulary_copy",
    "make_batches",
    "parse_methods",
    "read_questions",
    "render",
    "spread_lengths",
]

_STEP_NODES = (1, 2, 4, 8, 16, 32)
_NUM_TREES = 6


def parse_levels(text: str) -> list[int]:
    """``1,4,16`` -> numbers, each at least 1 and named once."""
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1 or len(set(levels)) != len(levels):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1, each once, like 1,4,16")
    return levels


def parse_server(text: str) -> tuple[str, str]:
    """``LABEL=URL`` or ``URL``."""
    label, separator, url = text.partition("=")
    label, url = (label, url) if separator and not label.startswith("http") else (BASELINE, text)
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected URL or LABEL=URL, with http:// or https://")
    return label, url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``specplug bench``."""
    parser.add_argument("--model", metavar="DIR", help="the target (default: SmolLM2-135M-Instruct, prepared here)")
    parser.add_argument("--methods", default="plain,ngram,eagle-chain,eagle2", metavar="A,B:LABEL", help="%(default)s")
    parser.add_argument(
        "--method-config", action="append", default=[], metavar="NAME=JSON", help="change a method's configuration"
    )
    parser.add_argument("--questions", type=Path, metavar="FILE", help="JSONL: Spec-Bench, HumanEval or GSM8K layout")
    parser.add_argument("--limit", type=int, metavar="N", help="take N questions at even distances")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="M")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="S",
        help="answers of at most M (1 - S) to M (1 + S) tokens, by the question, so that they do not all end together",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0: seeded sampling")
    parser.add_argument(
        "--concurrency",
        type=parse_levels,
        default=[1],
        metavar="C,..",
        help="questions under way at once (a new one comes when one has ended); categories at the first",
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="R", help="passes over the questions")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=parse_server,
        metavar="LABEL=URL",
        help="measure running servers instead of own engines; one must be labelled 'plain', as a URL alone is",
    )
    parser.add_argument(
        "--look-inside",
        action="store_true",
        help="then start each engine once more, in one process: time by stage, trees, calibration, step costs",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="engines without processes of their own for scheduler and worker: no messages between them, so less noise",
    )
    parser.add_argument("--kv-gib", type=int, default=1, metavar="G", help="key/value cache of each engine")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the Markdown table of such a file")
    parser.add_argument(
        "--concurrency-table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only print the speedups under load of such files",
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with a table: write it there, between its marks")


def batch_size(concurrency: int) -> int:
    """Questions that one method answers before the next has its turn; many, where the last ones leave places free."""
    return 1 if concurrency == 1 else 8 * concurrency


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments ask for and return the report."""
    if args.questions is None:
        raise ValueError("--questions FILE is needed (or --table FILE to print earlier results)")
    for name in ("max_tokens", "kv_gib", "limit", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.spread < 1:
        raise ValueError("--spread must be from 0 to below 1")
    if not 0 <= args.temperature <= 2:
        raise ValueError("--temperature must be from 0 to 2")
    labels = [label for label, _ in args.server]
    if labels and (BASELINE not in labels or len(set(labels)) != len(labels)):
        raise ValueError("--server: one must be labelled 'plain' (the baseline), and every label be given once")
    for name in ("look_inside", "in_process"):
        if labels and getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} needs engines of its own: leave out --server")
    methods = [] if labels else parse_methods(args.methods, args.method_config)
    questions = read_questions(args.questions, args.limit)
    if args.spread:
        questions = spread_lengths(questions, args.max_tokens, args.spread)
    first, *more = args.concurrency
    parts = [Part(first, repeat, make_batches(questions, batch_size(first))) for repeat in range(args.repeats)]
    for c in more:
        batches = make_batches(questions, batch_size(c), mixed=True)
        parts += [Part(c, repeat, batches) for repeat in range(args.repeats)]
    settings = {"questions": args.questions.name, "num_questions": len(questions), "max_tokens": args.max_tokens}
    settings |= {"concurrency": ",".join(map(str, args.concurrency)), "repeats": args.repeats}
    settings |= {"temperature": args.temperature, "spread": args.spread}
    if labels:
        servers = [Server(label, url) for label, url in args.server]
        settings |= {"dtype": "dtype of the server", "model": servers[0].model}
        results, peaks = measure(servers, parts, args.max_tokens, args.temperature)
        return build_report([server.method for server in servers], results, peaks, settings)
    from vllm_specplug.utils.smollm2 import prepare

    engine = {
        "model": str(args.model or prepare()),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(8, *args.concurrency),
        "enable_prefix_caching": False,  # every answer pays for its own prompt
        "disable_log_stats": False,
    }
    settings |= {key: engine[key] for key in ("dtype", "max_model_len", "max_num_seqs", "enable_prefix_caching")}
    settings |= {"kv_gib": args.kv_gib, "model": Path(engine["model"]).name, "in_process": args.in_process}
    with started(methods, engine | {"in_process": args.in_process}, args.kv_gib) as workers:
        results, peaks = measure(workers, parts, args.max_tokens, args.temperature)
    report = build_report(methods, results, peaks, settings)
    if args.look_inside:
        look_inside(report, methods, engine, args.kv_gib, questions, args.max_tokens)
    return report


def look_inside(
    report: dict[str, Any],
    methods: list[Method],
    engine: dict[str, Any],
    kv_gib: int,
    questions: list[Question],
    max_tokens: int,
) -> None:
    """Add time by stage, and for tree methods trees and calibration, to the report; one engine at a time."""
    texts = [questions[i * len(questions) // 6].text for i in range(min(6, len(questions)))]
    request = {"texts": texts, "max_tokens": max_tokens}

    def ask(worker: Worker, message: dict) -> dict:
        worker.send(message)
        return worker.receive()

    for method in (method for method in methods if not method.by_transformers):
        with started([method], engine, kv_gib, PROBE_MODULE) as [worker]:
            entry = report["methods"][method.label]
            entry["stages"] = ask(worker, request)
            if not method.stock:
                entry |= ask(worker, request | {"count": _NUM_TREES})
            worker.close()
    if tree := next((m for m in methods if m.config and m.config["method"] in ("eagle2", "hass")), None):
        wide = Method(tree.label, tree.config | {"num_speculative_tokens": max(_STEP_NODES)})
        with started([wide], engine, kv_gib, PROBE_MODULE) as [worker]:
            steps = {"nodes": list(_STEP_NODES), "context": 256, "max_tokens": 24}
            ask(worker, steps)  # a warm-up
            report["step_cost"] = ask(worker, steps) | worker.machine
            worker.close()


def run(args: argparse.Namespace) -> None:
    """``specplug bench``."""
    tables: list[tuple[str, tuple[str, str]]] = []
    if args.table is not None:
        tables.append((render(json.loads(args.table.read_text()), markdown=True), MARKS))
    if args.concurrency_table is not None:
        reports = {file.name: json.loads(file.read_text()) for file in args.concurrency_table}
        tables.append((render_concurrency(reports), CONCURRENCY_MARKS))
    for table, marks in tables:
        print(table) if args.into is None else write_table(table, args.into, marks)
    if tables:
        return
    report = run_benchmark(args)
    print(render(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
