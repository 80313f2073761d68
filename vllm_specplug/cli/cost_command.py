"""``specplug calibrate cost``: time the parts of a step on this machine, and show the choices of the measured budget.

The engine runs in its own process, with as many threads as a server has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_specplug.bench.methods import METHODS
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.cli.arguments import add_kv_gib, add_max_tokens, add_model, check_at_least_one
from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.environment import end_of_log, engine_environment
from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.tables import format_table

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug calibrate cost``."""
    add_model(parser)
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=json.dumps(METHODS["eagle2"]),
        help="the method whose steps are timed, as the server gets it (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=max(BATCHES),
        metavar="R",
        help="largest batch to time, in requests (default: %(default)s)",
    )
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="questions to answer, to learn acceptance from (default: none)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take N questions at even distances")
    add_chat_template_kwargs(parser)
    add_max_tokens(parser, 64)
    add_kv_gib(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for costs.json and costs.png (default: not written)"
    )


def run(args: argparse.Namespace) -> None:
    """Measure costs, save them for later servers, print and plot them."""
    try:
        speculative = json.loads(args.speculative_config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(speculative, dict) or speculative.get("budget", "measured") != "measured":
        raise ValueError("--speculative-config must be a JSON object whose budget, if given, is measured")
    check_at_least_one(args, "max_num_seqs", "max_tokens", "kv_gib", "limit")
    by_category: dict[str, list[str]] = {}
    for question in read_questions(args.questions, args.limit) if args.questions else ():
        by_category.setdefault(question.category, []).append(question.text)
    from vllm_specplug.utils.smollm2 import check_target, prepare

    check_target(args.target)

    engine = {
        "model": str(args.target or prepare()),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": args.max_num_seqs,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": speculative | {"budget": "measured"},
    }
    batches = [batch for batch in BATCHES if batch <= args.max_num_seqs]
    task = {"engine": engine, "questions": by_category, "max_tokens": args.max_tokens, "batches": batches}
    task["chat_template_kwargs"] = args.chat_template_kwargs
    result = measure(task, args.kv_gib)
    print(render(result))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with replacing(args.out / "costs.json") as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n")
        plot(result, args.out / "costs.png")


def measure(task: dict[str, Any], kv_gib: int) -> dict[str, Any]:
    """Run ``vllm.probes.cost_probe``.

    Raises:
        RuntimeError: the engine failed; the message contains the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="specplug-costs-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        (Path(folder) / "task.json").write_text(json.dumps(task))
        with log.open("wb") as sink:
            command = [
                sys.executable,
                "-m",
                "vllm_specplug.vllm.probes.cost_probe",
                f"{folder}/task.json",
                str(answer),
            ]
            code = subprocess.run(command, stdout=sink, stderr=sink, env=engine_environment(kv_gib)).returncode
        if code:
            raise RuntimeError(f"the engine stopped with exit code {code}; {end_of_log(log)}")
        return json.loads(answer.read_text())


def render(result: dict[str, Any]) -> str:
    """Return the cost model and the choices as tables."""
    measured = {part: _by_rows(points) for part, points in result["costs"]["measured"].items()}
    counts = sorted({count for points in measured.values() for count in points})
    rows = []
    for part, points in measured.items():
        rows.append([part, *(f"{1e3 * points[count]:.2f}" if count in points else "" for count in counts)])
    parts = [
        "milliseconds by rows: the target's forward, the drafter's first one, and a further level of it",
        format_table(["part", *map(str, counts)], rows),
    ]
    for category, choices in result["choices"].items():
        parts.append(f"choices: {category}")
        table = [[str(c["batch"]), c["arm"], str(c["accepted"]), f"{c['speedup']:.2f}x"] for c in choices]
        parts.append(format_table(["batch", "runs", "accepted", "expected"], table))
    return "\n\n".join(parts)


def _by_rows(points: dict[Any, float]) -> dict[int, float]:
    """Return seconds by rows; JSON has texts for the rows."""
    return {int(count): seconds for count, seconds in points.items()}


def plot(result: dict[str, Any], file: Path) -> None:
    """Plot the costs, the expected speed by batch size and category, and predicted against real acceptance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 3 if result["reliability"] else 2  # without questions nothing was predicted
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    costs, speeds, *others = figure.subplots(1, panels)
    for part, points in result["costs"]["measured"].items():
        by_rows = _by_rows(points)
        costs.plot(by_rows.keys(), [1e3 * seconds for seconds in by_rows.values()], ".-", label=part)
    costs.set(xlabel="rows", ylabel="ms", title="Costs", xscale="log", yscale="log")
    for category, choices in result["choices"].items():
        batches = [choice["batch"] for choice in choices]
        speeds.plot(batches, [choice["speedup"] for choice in choices], ".-", label=category)
    speeds.set(xlabel="requests", ylabel="multiple of plain decoding", title="Expected speed", xscale="log")
    for reliability in others:
        for category, curve in result["reliability"].items():
            reliability.plot([p for _, p, _ in curve], [y for _, _, y in curve], ".-", label=category)
        reliability.plot([0, 1], [0, 1], "k:", linewidth=0.8)
        reliability.set(xlabel="predicted probability", ylabel="share accepted", title="Reliability")
    for axes in (costs, speeds):
        axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_figure(str(file), dpi=120)
