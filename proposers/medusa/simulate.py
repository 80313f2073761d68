"""`specplug simulate medusa`: estimate the speedup by tree size and batch (Medusa, section 3.3 and appendix).

The paper derives a step's time from its GPU's roofline. Here the time is measured (`specplug steps`), and so is tau
(`specplug calibrate medusa`). As in the paper, speedup = acceleration rate (tau) / overhead (step time / plain step's).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

from .calibrate import write_json
from .steps import interpolate, read_steps


def simulate(taus: dict[int, float], steps: dict[str, Any]) -> dict[int, dict[int, float]]:
    """Expected speedup over plain decoding, by batch and number of nodes.

    taus: tau by nodes; steps: a result of `steps.measure`.
    """
    return {
        batch: {
            nodes: tau * steps["plain_ms"][batch] / (interpolate(table, nodes + 1) + steps["draft_ms"][batch])
            for nodes, tau in taus.items()
        }
        for batch, table in steps["step_ms"].items()
    }


def best_nodes(speedups: dict[int, float]) -> int:
    """The tree size with the largest speedup; 0 if none is faster than plain decoding."""
    best = max(speedups, key=speedups.__getitem__)
    return best if speedups[best] > 1 else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug simulate medusa`."""
    parser.add_argument(
        "--tree", metavar="FILE", type=Path, required=True, help="tree.json that `specplug calibrate medusa` wrote"
    )
    parser.add_argument("--steps", metavar="FILE", type=Path, required=True, help="file that `specplug steps` wrote")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="folder for simulation.json and simulation.png"
    )


def run(args: argparse.Namespace) -> None:
    """`specplug simulate medusa`; writes OUT/simulation.json and OUT/simulation.png, and prints a table."""
    try:
        taus = {int(nodes): float(tau) for nodes, tau in json.loads(args.tree.read_text())["held_out_tau"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{args.tree} has no tau by nodes ({error!r}): give a tree.json that `specplug calibrate medusa` wrote"
        ) from error
    steps = read_steps(args.steps)
    speedups = simulate(taus, steps)
    best = {batch: best_nodes(row) for batch, row in speedups.items()}
    rounded = {batch: {nodes: round(value, 3) for nodes, value in row.items()} for batch, row in speedups.items()}
    result = {"tau": taus, "speedup": rounded, "best_nodes": best, "steps": steps}
    write_json(args.out / "simulation.json", result | {"provenance": provenance(baseline="plain vLLM, measured steps")})
    plot(speedups, best, args.out / "simulation.png")
    rows = [
        [str(nodes), f"{tau:.3f}", *(f"{row[nodes]:.2f}x" for row in speedups.values())] for nodes, tau in taus.items()
    ]
    print(format_table(["nodes", "tau", *(f"batch {batch}" for batch in speedups)], rows))
    for batch, nodes in best.items():
        print(f"batch {batch}: " + (f"{nodes} nodes, {speedups[batch][nodes]:.2f}x" if nodes else "plain decoding"))


def plot(speedups: dict[int, dict[int, float]], best: dict[int, int], file: Path) -> None:
    """Draw speedup by nodes, one line for each batch, with its best size marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for batch, row in speedups.items():
        (line,) = axes.plot(list(row), list(row.values()), ".-", label=f"batch {batch}")
        if best[batch]:
            axes.plot(best[batch], row[best[batch]], "o", color=line.get_color())
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="nodes verified per step", ylabel="expected speedup", title="Tree size and batch")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend()
    FigureCanvasAgg(figure).print_figure(str(file), dpi=120)
