"""Chats as token ids, with the same switches of the chat template in every command as on the server."""

from __future__ import annotations

import argparse
import json
from typing import Any

#: Arguments of ``apply_chat_template`` that are not the template's own.
_RESERVED = ("add_generation_prompt", "chat_template", "conversation", "return_dict", "return_tensors", "tokenize")


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], switches: dict[str, Any] | None = None) -> list[int]:
    """Return the token ids of a chat up to the start of the answer; ``switches`` are variables of the template."""
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **(switches or {}))
    )


def add_chat_template_kwargs(parser: argparse.ArgumentParser) -> None:
    """Add ``--chat-template-kwargs``, which has the name and the form that it has in vLLM."""
    parser.add_argument(
        "--chat-template-kwargs",
        type=_switches,
        metavar="JSON",
        help="switches of the chat template, like '{\"enable_thinking\": false}'; give those that your server gets as "
        "--default-chat-template-kwargs",
    )


def _switches(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r}: expected a JSON object, like {{"enable_thinking": false}}')
    if reserved := sorted(found.keys() & set(_RESERVED)):
        raise argparse.ArgumentTypeError(f"{reserved[0]!r} is no switch of a chat template: leave it out")
    return found
