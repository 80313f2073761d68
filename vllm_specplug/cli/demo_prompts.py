"""The built-in questions of ``specplug demo``, in ``demo_prompts.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One question: its kind, a short label for the table, and the text."""

    kind: str
    label: str
    text: str


PROMPTS = tuple(Prompt(**one) for one in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
WARM_UP = "Write a short story about a dog that learns to swim."
