"""Lets the target answer conversations, turn by turn; the caller supplies the function that generates tokens.

The answers file has a line {"source", "prompt_ids", "answer_ids", "conversation"} for each answered turn.
`conversation` is the conversation's index in the list, and `more` is true if another turn of it follows. So the last
line shows where to resume. A line without `conversation` counts as a conversation of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_specplug.utils.chat_template import chat_ids

from .answers import Conversation

#: (prompts as token ids, a seed for each) -> (index of the prompt, its answer's token ids with the end token), in the
#: order in which the answers end.
Generate = Callable[[list[list[int]], list[int]], Iterable[tuple[int, list[int]]]]


@dataclass
class _Chat:
    """A conversation while it is being answered."""

    number: int
    conversation: Conversation
    lines: list[dict]
    answers: list[str]
    closed: bool = False


def load_tokenizer(target: str | os.PathLike, chat_template: str | None = None):
    """The target's tokenizer; `chat_template`, a Jinja text, replaces its own template.

    Raises:
        ValueError: it has no chat template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    if chat_template:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        raise ValueError(
            f"the target {target} has no chat template, so prompts cannot be built: give a Jinja file with "
            "--chat-template to `specplug data`, or add chat_template to its tokenizer_config.json"
        )
    return tokenizer


def resume_at(path: Path) -> int:
    """Count the conversations that are answered in full; cut off an unfinished one at the end of the file."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    rows = [json.loads(line) for line in lines[-1:]]
    done = rows[0].get("conversation", len(lines) - 1) + 1 if rows else 0
    if rows and rows[0].get("more"):
        done -= 1
        while lines and json.loads(lines[-1]).get("conversation") == done:
            lines.pop()
    kept = sum(map(len, lines))
    if kept < len(content):
        os.truncate(path, kept)
    return done


def answer_conversations(
    conversations: list[Conversation],
    tokenizer,
    generate: Generate,
    path: str | os.PathLike,
    max_prompt_tokens: int,
    rows_per_batch: int = 384,
    progress: bool = True,
    switches: dict[str, Any] | None = None,
) -> int:
    """Append the answers to `conversations` to the file at `path`; return the number of tokens written.

    A first turn longer than `max_prompt_tokens` is cut to that length; a conversation that grows beyond it ends. A
    conversation is written once it and all before it are answered. `switches` are those of the chat template.

    Raises:
        OSError: the file could not be written; its last complete conversations are kept.
    """
    path = Path(path)
    done, written, started = resume_at(path), 0, time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(conversations), initial=done, unit="prompt", desc="answers", disable=not progress) as bar:
        for start in range(done, len(conversations), rows_per_batch):
            rows = conversations[start : start + rows_per_batch]
            chats = [_Chat(start + i, row, [], []) for i, row in enumerate(rows)]
            waiting = deque(chats)
            while open_chats := [chat for chat in chats if not chat.closed]:
                for answer_tokens in _answer_turn(open_chats, tokenizer, generate, max_prompt_tokens, switches):
                    written += answer_tokens
                    bar.set_postfix_str(f"{written / (time.monotonic() - started):.0f} tok/s", refresh=False)
                    while waiting and waiting[0].closed:
                        _append(path, waiting.popleft().lines)
                        bar.update()
    return written


def _answer_turn(
    chats: list[_Chat], tokenizer, generate: Generate, max_prompt_tokens: int, switches: dict[str, Any] | None
) -> Iterator[int]:
    """Answer the next turn of each chat, and close the chats that end with it; yield the tokens of each answer."""
    prompts = []
    for chat in chats:
        messages = chat.conversation.messages(chat.answers)
        ids = chat_ids(tokenizer, messages, switches)
        if chat.answers and len(ids) > max_prompt_tokens:
            chat.closed = True
            yield 0
        else:
            prompts.append((chat, ids[:max_prompt_tokens]))
    if not prompts:
        return
    for index, answer in generate([ids for _, ids in prompts], [chat.number for chat, _ in prompts]):
        chat, ids = prompts[index]
        if chat.lines:
            chat.lines[-1]["more"] = True
        line = {"source": chat.conversation.source, "prompt_ids": ids, "answer_ids": answer}
        chat.lines.append(line | {"conversation": chat.number})
        chat.answers.append(tokenizer.decode(answer, skip_special_tokens=True))
        chat.closed = len(chat.answers) == len(chat.conversation.turns)
        yield len(answer)


def _append(path: Path, lines: list[dict]) -> None:
    before = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        os.truncate(path, before)
        raise OSError(
            f"{path} could not be written: {error}. Free disk space and run the same command again: it resumes."
        ) from error
