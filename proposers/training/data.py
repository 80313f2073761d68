"""`specplug data`: let the target answer prompts and compute its features, in one folder. Each part resumes.

answers.jsonl                 the answers (see answers.py)
features/shard-*.safetensors  the features (see features.py)
data.json                     the prompts and settings they were made from
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.lazy import load

from .answers import Conversation, content_hash, read_answers, read_conversations, without_duplicates
from .features import extract, read_target_config
from .generate import load_tokenizer

ANSWERS_NAME, FEATURES_NAME, FACTS_NAME = "answers.jsonl", "features", "data.json"

#: Imported by name, because it starts vLLM and the methods import nothing of vLLM.
ANSWER_PROMPTS = "vllm_specplug.vllm.probes.offline:answer_prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug data`."""
    parser.add_argument("--target", metavar="DIR", required=True, help="Hugging Face folder of the target")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        nargs="+",
        required=True,
        help="JSON lines (.gz too): prompt, turns, messages, conversations, instruction and input, or question",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder for answers and hidden states: the --data of `specplug train`",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="largest number of prompts (default: all)")
    parser.add_argument(
        "--max-turns", metavar="N", type=int, help="largest number of turns of a conversation to answer (default: all)"
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=320,
        help="largest number of tokens of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        metavar="N",
        type=int,
        default=1600,
        help="prompts are cut to this number of tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="sampling temperature (default: %(default)s)"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="file with a chat template (Jinja), if the target has none"
    )
    add_chat_template_kwargs(parser)
    parser.add_argument(
        "--eagle3", action="store_true", help="also keep the hidden states of three layers, which EAGLE-3 reads"
    )
    parser.add_argument("--no-features", action="store_true", help="make answers only, no hidden states")
    parser.add_argument("--device", default="cpu", help="device that computes the features (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """`specplug data`.

    Raises:
        ValueError: prompts or target are unusable, or --out has data made from other prompts or settings.
        OSError: a file could not be written.
    """
    config = read_target_config(args.target)
    given = read_conversations(args.prompts)
    rows = without_duplicates(given)[: args.limit]
    rows = [Conversation(row.source, row.turns[: args.max_turns], row.system) for row in rows]
    template = Path(args.chat_template).read_text() if args.chat_template else None
    load_tokenizer(args.target, template)  # raises for a target without a template, before anything is written
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    record_facts(out / FACTS_NAME, _facts(args, rows, template))
    load(ANSWER_PROMPTS)(
        args.target,
        rows,
        out / ANSWERS_NAME,
        max_tokens=args.max_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        temperature=args.temperature,
        chat_template=template,
        switches=args.chat_template_kwargs,
    )
    answers = read_answers(out / ANSWERS_NAME)
    tokens = sum(len(answer.answer_ids) for answer in answers)
    print(
        f"{len(rows)} prompts ({len(given) - len(without_duplicates(given))} duplicates dropped), {len(answers)} "
        f"answers, {tokens} answer tokens, sha256 {content_hash(answers)}"
    )
    if not args.no_features:
        from ..eagle3.head import layer_ids

        layers = layer_ids(config) if args.eagle3 else ()
        extract(args.target, answers, out / FEATURES_NAME, layers=layers, device=args.device)
    return 0


def _facts(args: argparse.Namespace, rows: list[Conversation], template: str | None) -> dict:
    return {
        "target": Path(args.target).name,
        "prompts_sha256": hashlib.sha256(json.dumps([asdict(row) for row in rows]).encode()).hexdigest(),
        "prompts": len(rows),
        "max_tokens": args.max_tokens,
        "max_prompt_tokens": args.max_prompt_tokens,
        "temperature": args.temperature,
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "chat_template_kwargs": args.chat_template_kwargs,
    }


def record_facts(file: Path, facts: dict) -> None:
    """Write the prompts and settings of a new folder; refuse to continue a folder that was made from others."""
    if not file.exists():
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(facts, indent=2) + "\n")
        return
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): give another --out, or delete this folder") from None
    if changed := sorted(key for key in facts if found.get(key) != facts[key]):
        raise ValueError(
            f"{file.parent} has data with other {', '.join(changed)}: give the same prompts and settings to resume, or "
            "another --out"
        )
