"""Questions: JSON lines in the layouts of Spec-Bench, HumanEval and GSM8K."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

MIXED = "mixed"


@dataclass(frozen=True)
class Question:
    """One user message with its category; the most tokens of its answer, None for those of the run."""

    name: str
    category: str
    text: str
    max_tokens: int | None = None


def parse_question(record: dict, number: int) -> Question:
    """One line of Spec-Bench (``turns``, first turn), HumanEval (``prompt``) or GSM8K (``question``)."""
    if turns := record.get("turns"):
        return Question(str(record.get("question_id", number)), record.get("category", "none"), turns[0])
    if "prompt" in record:
        return Question(str(record.get("task_id", number)), record.get("category", "humaneval"), record["prompt"])
    if "question" in record:
        return Question(str(number), record.get("category", "gsm8k"), record["question"])
    raise ValueError("expected a key 'turns' (Spec-Bench), 'prompt' (HumanEval) or 'question' (GSM8K)")


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a JSONL file; with a ``limit``, that many at even distances, so that all categories take part."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                questions.append(parse_question(json.loads(line), number))
            except (ValueError, AttributeError, IndexError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise ValueError(f"{path} holds no questions")
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def spread_lengths(questions: list[Question], max_tokens: int, spread: float) -> list[Question]:
    """The questions with lengths of their own, evenly from ``1 - spread`` to ``1 + spread`` times ``max_tokens``.

    Answers that all reach one and the same length end together, and the prompts behind them come together: neither
    happens in a server.  Neighbours get lengths far apart (multiples of the golden ratio).
    """
    shares = [1 + spread * (2 * (number * 0.6180339887 % 1) - 1) for number in range(len(questions))]
    return [
        replace(q, max_tokens=max(1, round(max_tokens * share))) for q, share in zip(questions, shares, strict=True)
    ]


def make_batches(questions: list[Question], size: int, mixed: bool = False) -> list[list[Question]]:
    """Batches of at most ``size`` questions, each of one category; ``mixed`` fills them across categories."""
    by_category: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_category[MIXED if mixed else question.category].append(question)
    return [group[i : i + size] for group in by_category.values() for i in range(0, len(group), size)]
