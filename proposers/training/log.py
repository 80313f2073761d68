"""The log of a training run: a JSON-lines file beside the weights.

Rows: {"step", "lr", "loss": {name: mean since the last such row}, "tokens_per_s"} and, for each measurement,
{"step", "alpha": [share accepted at draft levels 0-5], "tau"}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_specplug.utils.files import replacing

LOG_NAME = "training_log.jsonl"


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
