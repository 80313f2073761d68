"""Counts the answers that are the same with and without drafts, in one engine: alone, 8 and 32 at once.

    python -m benchmarks.end_to_end.same_texts --questions spec_bench_dev.jsonl --methods eagle2,union --out texts.json

SmolLM2-135M-Instruct with its shipped drafters, bfloat16, greedy and sampled with a seed.  The reference is 32 at
once without drafts; the first method also answers alone and 8 at once without them.  Prefix caching is on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import start_smollm2
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

EAGLE = {"method": "eagle2", "model": "smollm2-135m-instruct"}
METHODS = {
    "eagle2": EAGLE,
    "union": {"method": "union", "sources": [EAGLE, {"method": "lookup"}]},
    "medusa": {"method": "medusa", "model": "smollm2-135m-instruct"},
    "lookup": {"method": "lookup"},
}
BATCHES = (1, 8, 32)


class Asking:
    """Asks one engine the same questions in several ways.

    Args:
        llm: the engine.
        chats: one list of messages per question.
        max_tokens: of an answer.
    """

    def __init__(self, llm: Any, chats: list[list[dict[str, str]]], max_tokens: int):
        self._llm, self._chats, self._max_tokens = llm, chats, max_tokens

    def __call__(self, batch: int, temperature: float, drafts: bool) -> list[list[int]]:
        """Return the tokens of each answer."""
        from vllm import SamplingParams

        arguments = {} if drafts else {"extra_args": {"speculation": False}}
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=self._max_tokens, **arguments)
        answers: list[list[int]] = []
        for first in range(0, len(self._chats), batch):
            outputs = self._llm.chat(self._chats[first : first + batch], params, use_tqdm=False)
            answers += [list(output.outputs[0].token_ids) for output in outputs]
        return answers


def compare(asking: Asking, ways: list[tuple[int, bool]]) -> dict[str, dict[str, int]]:
    """Return by way of computing how many answers equal the reference, and how many there are.

    Args:
        ways: how many at once, and whether with drafts.
    """
    found: dict[str, dict[str, int]] = {}
    for temperature in (0.0, 0.8):
        reference = asking(max(BATCHES), temperature, drafts=False)
        for batch, drafts in ways:
            answers = asking(batch, temperature, drafts)
            same = sum(ours == theirs for ours, theirs in zip(answers, reference, strict=True))
            sampling, drafting = "sampled" if temperature else "greedy", "drafts" if drafts else "no drafts"
            kind = f"{sampling}, {batch} at once, {drafting}"
            found[kind] = {"same": same, "of": len(reference)}
            print(kind, same, "of", len(reference), flush=True)
    return found


def _counted(answers: dict[str, int] | None) -> str:
    return f"{answers['same']} of {answers['of']}" if answers else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--methods", default="eagle2,union,medusa,lookup")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    chats = [[{"role": "user", "content": one.text}] for one in read_questions(args.questions, args.limit)]
    found, kept = {}, []  # the end of an engine takes the process's parallel state with it
    drafting, undrafted = [(batch, True) for batch in BATCHES], [(batch, False) for batch in BATCHES[:-1]]
    for method in args.methods.split(","):
        room = {"max_num_seqs": max(BATCHES), "kv_cache_memory_bytes": 3 << 30, "enable_prefix_caching": True}
        kept.append(Asking(start_smollm2(METHODS[method], **room), chats, args.max_tokens))
        found[method] = compare(kept[-1], drafting if found else drafting + undrafted)
        origin = provenance(baseline="32 questions at once without drafts, in the same engine")
        args.out.write_text(json.dumps({"provenance": origin, "answers": found}, separators=(",", ":")) + "\n")
    ways = list(next(iter(found.values())))
    rows = [[way, *(_counted(one.get(way)) for one in found.values())] for way in ways]
    print(format_table(["", *found], rows))


if __name__ == "__main__":
    main()
