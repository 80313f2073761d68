"""Prompts and the target's own answers to them: the text a drafter learns from.

A prompts file is JSON lines, plain or `.gz`, with `prompt` (or the first of `turns`) and optionally `source`.
An answers file is JSON lines {"source", "prompt_ids", "answer_ids"}: the prompt with the chat template applied,
and the target's greedy answer with its end token. One line per prompt, so the line count says where to resume.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Answer:
    """One prompt and the target's answer, as token ids."""

    source: str
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


def read_prompts(files: Iterable[str | os.PathLike]) -> list[dict]:
    """Rows {"source", "prompt"} of all files, in their order."""
    rows = []
    for file in files:
        for line in _lines(Path(file)):
            row = json.loads(line)
            prompt = row.get("prompt") or (row.get("turns") or [None])[0]
            if not prompt:
                raise ValueError(f"{file}: a row has neither 'prompt' nor 'turns': {line[:100]}")
            rows.append({"source": row.get("source") or row.get("category") or Path(file).name, "prompt": prompt})
    return rows


def read_answers(file: str | os.PathLike) -> list[Answer]:
    """All complete lines of an answers file; a last line still being written is left out."""
    rows = []
    for line in _lines(Path(file)):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        rows.append(Answer(row["source"], row["prompt_ids"], row["answer_ids"]))
    return rows


def content_hash(answers: Iterable[Answer]) -> str:
    """sha256 over the token ids, the identity of a data set in provenance and caches."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(json.dumps([answer.prompt_ids, answer.answer_ids]).encode())
    return digest.hexdigest()


def select_draft_vocabulary(answers: Iterable[Answer], size: int, vocab_size: int, keep: Iterable[int] = ()):
    """The `size` target ids the target writes most often, sorted: int64 [draft_vocab].

    Answer tokens count before prompt tokens (which only break ties and fill up); `keep` ids are always in.
    """
    if size >= vocab_size:
        return torch.arange(vocab_size)
    answered, prompted = Counter(), Counter()
    for answer in answers:
        answered.update(answer.answer_ids)
        prompted.update(answer.prompt_ids)
    kept = set(keep)
    order = sorted(range(vocab_size), key=lambda i: (i not in kept, -answered[i], -prompted[i], i))
    return torch.tensor(sorted(order[:size]))


def _lines(file: Path):
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as stream:
        yield from stream
