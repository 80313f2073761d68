"""The log of a training run: a JSON-lines file beside the weights, and a plot of it.

Rows: {"step", "lr", "loss": {name: mean since the last such row}, "tokens_per_s"} and, for each measurement,
{"step", "alpha": [share accepted at draft levels 0-5], "tau"}.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_specplug.utils.figures import new_figure
from vllm_specplug.utils.files import replacing

LOG_NAME = "training_log.jsonl"
PLOT_NAME = "training.png"


class TrainingLog:
    """Appends rows to the log; a resumed run first drops the rows of steps that it will repeat."""

    def __init__(self, out_dir: str | os.PathLike, first_step: int):
        self.file = Path(out_dir) / LOG_NAME
        kept = [row for row in read_log(out_dir) if row["step"] <= first_step]
        with replacing(self.file) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def add(self, **row) -> None:
        with open(self.file, "a") as stream:
            stream.write(json.dumps(row) + "\n")


def read_log(out_dir: str | os.PathLike) -> list[dict]:
    """Read all rows; an unfinished last line of a killed run is dropped."""
    file = Path(out_dir) / LOG_NAME
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def plot_log(out_dir: str | os.PathLike) -> Path | None:
    """Draw losses, acceptance per level and tau over the steps; None if matplotlib or the rows are missing.

    There is a panel for losses and one for measurements, each only if the log has such rows.
    """
    rows = read_log(out_dir)
    losses = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "alpha" in row]
    panels = [(draw, found) for draw, found in ((_losses, losses), (_acceptance, measured)) if found]
    if not panels or find_spec("matplotlib") is None:
        return None
    figure = new_figure(5 * len(panels), 4)
    for axes, (draw, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, found)
        axes.legend()
    file = Path(out_dir) / PLOT_NAME
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return file


def _losses(axes: Any, rows: list[dict]) -> None:
    for name in sorted({name for row in rows for name in row["loss"]}):
        named = [row for row in rows if name in row["loss"]]
        marker = "." if len(named) == 1 else None  # a line through one point is invisible
        axes.plot([row["step"] for row in named], [row["loss"][name] for row in named], marker=marker, label=name)
    axes.set(xlabel="step", ylabel="loss", title="training loss")


def _acceptance(axes: Any, rows: list[dict]) -> None:
    steps = [row["step"] for row in rows]
    for level in range(len(rows[0]["alpha"])):
        axes.plot(steps, [row["alpha"][level] for row in rows], marker=".", label=f"{level}-alpha")
    axes.set(xlabel="step", ylabel="acceptance", title=f"acceptance on dev answers, tau {rows[-1]['tau']:.2f}")
