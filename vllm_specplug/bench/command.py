"""``specplug bench``: compare methods on the same questions in one run.

Each method has its own engine in a worker process (``vllm_specplug.vllm.probes.bench_worker``).  All engines are alive
at once, and each batch of questions goes to one method after the other, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_specplug.bench.look_inside import look_inside
from vllm_specplug.bench.methods import BASELINE, METHODS, parse_methods
from vllm_specplug.bench.questions import Question, make_batches, read_questions
from vllm_specplug.bench.results import (
    build_report,
    read_result,
    render,
    render_short,
    write_table,
)
from vllm_specplug.bench.server import Server
from vllm_specplug.bench.workers import Measurement, Part, measure, started
from vllm_specplug.cli.arguments import add_kv_gib, add_max_tokens, add_model, check_at_least_one
from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.smollm2 import check_target, prepare


def parse_levels(text: str) -> list[int]:
    """Parse ``1,4,16`` to numbers, each at least 1 and given once."""
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1 or len(set(levels)) != len(levels):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, each once, like 1,4,16")
    return levels


def parse_server(text: str) -> tuple[str, str]:
    """Parse ``LABEL=URL`` or ``URL``."""
    label, separator, url = text.partition("=")
    label, url = (label, url) if separator and not label.startswith("http") else (BASELINE, text)
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected URL or LABEL=URL; a URL starts with http:// or https://")
    return label, url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug bench``."""
    add_model(parser)
    parser.add_argument(
        "--methods",
        default="plain,ngram,eagle-chain,eagle2",
        metavar="A,B:LABEL",
        help=f"plain, and others of {', '.join(METHODS)}, or an installed one; NAME:LABEL names a variant "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--method-config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="options of a method or variant, like eagle2:big='{\"num_speculative_tokens\": 16}'; can be repeated",
    )
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="JSON lines in the layout of Spec-Bench, HumanEval or GSM8K"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take N questions at even distances")
    add_chat_template_kwargs(parser)
    add_max_tokens(parser, 128)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature, with a fixed seed (default: 0, greedy)",
    )
    parser.add_argument(
        "--concurrency",
        type=parse_levels,
        default=[1],
        metavar="C,..",
        help="numbers of questions at once, like 1,4,8; categories are mixed where it is more than 1 (default: 1)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="R", help="passes over the questions (default: %(default)s)"
    )
    _add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the results")
    _add_table_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=parse_server,
        metavar="LABEL=URL",
        help="measure running servers instead of starting engines; a URL without a label is the plain server",
    )
    parser.add_argument(
        "--look-inside",
        action="store_true",
        help="also measure the time of a step by stage; starts each engine once more",
    )
    add_kv_gib(parser)


def _add_table_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="measure nothing; print the Markdown table of a file that --out wrote",
    )
    parser.add_argument("--short", action="store_true", help="with --table: only the overall figures")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help="with --table: write the table into this page, between its marks",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for arguments that are out of range or exclude each other."""
    if args.questions is None:
        raise ValueError("--questions FILE is needed (or --table FILE to print earlier results)")
    check_at_least_one(args, "max_tokens", "kv_gib", "limit", "repeats")
    if not 0 <= args.temperature <= 2:
        raise ValueError("--temperature must be from 0 to 2")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: create its folder first")
    check_target(args.target)
    labels = [label for label, _ in args.server]
    if labels and (BASELINE not in labels or len(set(labels)) != len(labels)):
        raise ValueError("--server: one label must be 'plain' (the baseline), and each label must be given once")
    if labels and args.look_inside:
        raise ValueError("--look-inside needs its own engines: remove --server")


def make_parts(questions: list[Question], concurrency: list[int], repeats: int) -> list[Part]:
    """Return the passes over the questions."""
    return [Part(c, repeat, make_batches(questions, c)) for c in concurrency for repeat in range(repeats)]


def interruption(results: dict[str, list[Measurement]], parts: list[Part]) -> dict[str, str]:
    """Return the setting that says how much an interrupted run has measured; nothing for a whole run."""
    done, total = len(results[BASELINE]), sum(len(part.batches) for part in parts)
    return {"interrupted": f"{done} of {total} batches"} if done < total else {}


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements of the arguments and return the report."""
    check_arguments(args)
    methods = [] if args.server else parse_methods(args.methods, args.method_config)
    questions = read_questions(args.questions, args.limit)
    parts = make_parts(questions, args.concurrency, args.repeats)
    settings = {"questions": args.questions.name, "num_questions": len(questions), "max_tokens": args.max_tokens}
    settings |= {"concurrency": ",".join(map(str, args.concurrency)), "repeats": args.repeats}
    settings["temperature"] = args.temperature
    if args.chat_template_kwargs:
        settings["chat_template_kwargs"] = args.chat_template_kwargs
    if args.server:
        servers = [Server(label, url, args.chat_template_kwargs) for label, url in args.server]
        settings |= {"dtype": "dtype of the server", "model": servers[0].model}
        results, peaks = measure(servers, parts, args.max_tokens, args.temperature)
        settings |= interruption(results, parts)
        return build_report([server.method for server in servers], results, peaks, settings)
    engine = {
        "model": str(args.target or prepare()),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(8, *args.concurrency),
        "enable_prefix_caching": False,  # so that each answer computes its own prompt
        "disable_log_stats": False,
    }
    if args.chat_template_kwargs:
        engine["chat_template_kwargs"] = args.chat_template_kwargs
    settings |= {key: engine[key] for key in ("dtype", "max_model_len", "max_num_seqs", "enable_prefix_caching")}
    settings |= {"kv_gib": args.kv_gib, "model": Path(engine["model"]).name}
    with started(methods, engine, args.kv_gib) as workers:
        results, peaks = measure(workers, parts, args.max_tokens, args.temperature)
    settings |= interruption(results, parts)
    report = build_report(methods, results, peaks, settings)
    if args.look_inside and "interrupted" not in settings:
        look_inside(report, methods, engine, args.kv_gib, questions, args.max_tokens)
    return report


def run(args: argparse.Namespace) -> None:
    """Run ``specplug bench``."""
    if args.table is not None:
        report = read_result(args.table)
        table = render_short(report) if args.short else render(report, markdown=True)
        print(table) if args.into is None else write_table(table, args.into)
        return
    report = run_benchmark(args)
    print(render(report))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
