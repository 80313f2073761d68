"""The log of a training run: a JSON-lines file beside the weights, and a plot of it.

Rows: {"step", "lr", "loss": {name: mean since the last such row}, "tokens_per_s"} and, for each measurement,
{"step", "alpha": [share accepted at draft levels 0-5], "tau"}.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

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
    """Draw losses, acceptance per level and tau over the steps; None if matplotlib or the rows are missing."""
    rows = read_log(out_dir)
    losses = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "alpha" in row]
    if not rows or find_spec("matplotlib") is None:
        return None
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for name in sorted({name for row in losses for name in row["loss"]}):
        named = [row for row in losses if name in row["loss"]]
        left.plot([row["step"] for row in named], [row["loss"][name] for row in named], label=name)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    steps = [row["step"] for row in measured]
    for level in range(len(measured[0]["alpha"]) if measured else 0):
        right.plot(steps, [row["alpha"][level] for row in measured], marker=".", label=f"{level}-alpha")
    taus = [f"{row['tau']:.2f}" for row in measured[-1:]]
    right.set(
        xlabel="step", ylabel="acceptance", title=f"acceptance on dev answers{''.join(f', tau {t}' for t in taus)}"
    )
    for axes, drawn in ((left, losses), (right, measured)):
        if drawn:
            axes.legend()
    file = Path(out_dir) / PLOT_NAME
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return file
