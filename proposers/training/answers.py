"""Prompts and the target's own answers to them: the text that a drafter learns from.

A prompts file has JSON lines, plain or `.gz`. A line may have a `source` (or `category`) and has one of these layouts:

    {"prompt": text}                                       {"turns": [text, ...]}   (the user's turns)
    {"messages": [{"role", "content"}, ...]}               {"conversations": [{"from", "value"}, ...]}   (ShareGPT)
    {"instruction": text, "input": text (may be absent)}   {"question": text}

Only the texts of the user and of the system are read: the target answers each turn itself.

An answers file has JSON lines {"source", "prompt_ids", "answer_ids"}: the text before the answer with the chat template
applied, and the target's answer with its end token. A conversation has one line for each turn (see generate.py).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_LAYOUTS = "'prompt' nor 'turns', 'messages', 'conversations', 'instruction' or 'question'"


@dataclass(frozen=True)
class Conversation:
    """A user's turns, which the target answers one after the other."""

    source: str
    turns: list[str]
    system: str | None = None

    def messages(self, answers: list[str]) -> list[dict[str, str]]:
        """The chat up to the user's turn number len(answers), counted from 0, with the answers before it."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class Answer:
    """One prompt and the target's answer, as token ids."""

    source: str
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


def read_conversations(files: Iterable[str | os.PathLike]) -> list[Conversation]:
    """Read the rows of all files, in their order.

    Raises:
        ValueError: a file is empty or malformed; the message has the line number.
    """
    rows = []
    for file in map(Path, files):
        before = len(rows)
        for number, line in enumerate(_lines(file), start=1):
            if line.strip():
                rows.append(_conversation(line, file, number))
        if len(rows) == before:
            raise ValueError(f"{file} is empty: it must hold one JSON object with a prompt per line")
    return rows


def read_prompts(files: Iterable[str | os.PathLike]) -> list[dict]:
    """Read the first turn of each row as {"source", "prompt"}; errors as in `read_conversations`."""
    return [{"source": row.source, "prompt": row.turns[0]} for row in read_conversations(files)]


def without_duplicates(rows: Iterable[Conversation]) -> list[Conversation]:
    """Keep the first of the rows that differ in white space at most."""
    seen: dict[str, Conversation] = {}
    for row in rows:
        words = [text.split() for text in (row.system or "", *row.turns)]
        seen.setdefault(json.dumps(words), row)
    return list(seen.values())


def read_answers(file: str | os.PathLike) -> list[Answer]:
    """Read all complete lines of an answers file; a last line without its newline is left out.

    Raises:
        ValueError: a line is not an answer; the message has the line number.
    """
    rows = []
    for number, line in enumerate(_lines(Path(file)), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            rows.append(Answer(row["source"], row["prompt_ids"], row["answer_ids"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: not an answer with 'source', 'prompt_ids' and 'answer_ids'; was a prompts "
                "file given for --answers?"
            ) from error
    return rows


def content_hash(answers: Iterable[Answer]) -> str:
    """sha256 over the token ids: identifies a data set in provenance and caches."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(json.dumps([answer.prompt_ids, answer.answer_ids]).encode())
    return digest.hexdigest()


def select_draft_vocabulary(answers: Iterable[Answer], size: int, vocab_size: int, keep: Iterable[int] = ()):
    """The `size` ids that the target writes most often, sorted: int64 [draft_vocab].

    Prompt tokens only break ties and fill up the rest; `keep` ids are always included.
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


def adapted_vocabulary(ids: torch.Tensor, answers: Iterable[Answer], end_ids: list[int]) -> torch.Tensor:
    """Put ids that the answers have into a draft vocabulary of the same size: int64 [draft_vocab], ascending.

    They replace the highest ids that the answers do not have: a tokenizer gives rare tokens high ids.
    """
    counts = Counter(token for answer in answers for token in answer.answer_ids)
    kept = [*end_ids, *(token for token, _ in counts.most_common()), *ids.tolist()]
    return torch.tensor(sorted(list(dict.fromkeys(kept))[: ids.numel()]))


def _conversation(line: str, file: Path, number: int) -> Conversation:
    place = f"{file}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a JSON object is needed, found {type(row).__name__}")
    system, turns = _system_and_turns(row)
    if not turns:
        raise ValueError(f"{place}: a row has neither {_LAYOUTS} with a text in it: {line.strip()[:100]}")
    if not all(isinstance(text, str) and text.strip() for text in turns):
        raise ValueError(f"{place}: every turn must be a text that is not empty: {line.strip()[:100]}")
    return Conversation(row.get("source") or row.get("category") or file.name, turns, system)


def _system_and_turns(row: dict) -> tuple[str | None, list]:
    """The system's text and the user's turns of a row of any layout."""
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list):
        messages = [
            (message.get("role") or message.get("from"), message.get("content") or message.get("value"))
            for message in chat
            if isinstance(message, dict)
        ]
        system = next((text for role, text in messages if role == "system"), None)
        return system, [_text(text) for role, text in messages if role in ("user", "human")]
    if isinstance(row.get("turns"), list) and not row.get("prompt"):
        return None, row["turns"]
    if row.get("instruction"):
        return None, ["\n\n".join(part for part in (row["instruction"], row.get("input")) if part)]
    text = row.get("prompt") or row.get("question")
    return None, [text] if text else []


def _text(content) -> str:
    """The text of a message, whose content is a string or a list of typed parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content


def _lines(file: Path) -> Iterator[str]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged, or its content does not match its name: {error}") from error
