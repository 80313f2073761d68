"""Questions of a benchmark: JSON lines in the layouts of Spec-Bench, HumanEval and GSM8K."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """One user message with its category."""

    name: str
    category: str
    text: str


def parse_question(record: dict, number: int) -> Question:
    """Parse one line of Spec-Bench (``turns``, first turn), HumanEval (``prompt``) or GSM8K (``question``)."""
    if turns := record.get("turns"):
        return Question(str(record.get("question_id", number)), record.get("category", "none"), turns[0])
    if "prompt" in record:
        return Question(str(record.get("task_id", number)), record.get("category", "humaneval"), record["prompt"])
    if "question" in record:
        return Question(str(number), record.get("category", "gsm8k"), record["question"])
    raise ValueError("expected a key 'turns' (Spec-Bench), 'prompt' (HumanEval) or 'question' (GSM8K)")


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read a JSONL file; ``limit`` takes that many questions at even distances, so that they cover all categories."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                questions.append(parse_question(json.loads(line), number))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            except (ValueError, AttributeError, IndexError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise ValueError(f"{path} contains no questions")
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def make_batches(questions: list[Question], concurrency: int) -> list[list[Question]]:
    """Split into what one method answers per turn.

    With several questions at once these are many, of any category, because the last ones of a turn run alone.
    """
    size = 1 if concurrency == 1 else 8 * concurrency
    return [questions[i : i + size] for i in range(0, len(questions), size)]
