"""Compares drafters of one target by what they accept: engines in one process, one after the other.

    python -m benchmarks.end_to_end.heads --target DIR --questions FILE --out FILE NAME=JSON [NAME=JSON ...]

JSON is a speculative configuration, vLLM's or the plugin's, or null. Each engine runs eagerly, in float32, and answers
one question at a time. `specplug bench` asks all engines in turns, so its speeds can be compared; the milliseconds here
depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_specplug.bench.questions import read_questions
from vllm_specplug.utils.environment import provenance

NODES = "vllm:spec_decode_num_draft_tokens"
#: vLLM's engines in one process cannot be freed one by one.
KEPT: list[Any] = []


def nodes_of(llm: Any) -> int:
    """Return the number of tokens drafted so far."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == NODES)


def measure(config: dict[str, Any] | None, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine and answer the questions; a part of the first answer is asked before, too."""
    from vllm_specplug.vllm.probes.bench_worker import answer
    from vllm_specplug.vllm.probes.in_process import start_in_process
    from vllm_specplug.vllm.probes.step_parts_probe import PartsClock

    engine = {"model": args.target, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 1, "enforce_eager": True}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False, "disable_log_stats": False}
    llm = start_in_process(engine | ({"speculative_config": config} if config else {}))
    KEPT.append(llm)
    clock, texts = PartsClock(llm), [question.text for question in read_questions(args.questions)]
    answer(llm, texts[:1], 8)
    clock.steps.clear()
    nodes = nodes_of(llm)
    found = answer(llm, texts, args.max_tokens, at_once=1)
    drafts, accepted = found["drafts"], [count for count in found["accepted_by_depth"] if count]
    return {
        "config": config,
        "tau": 1 + sum(accepted) / max(drafts, 1),
        "drafts": drafts,
        "accepted_by_depth": accepted,
        "alpha": [round(count / tried, 4) for tried, count in zip([drafts, *accepted], accepted, strict=False)],
        "nodes_per_draft": round((nodes_of(llm) - nodes) / max(drafts, 1), 2),
        "tokens_per_s": round(sum(map(len, found["token_ids"])) / found["seconds"], 2),
        "parts_of_a_step": clock.mean_parts(),
        "token_ids": found["token_ids"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", required=True, type=Path, help="methods that it has already are not measured again")
    parser.add_argument("methods", nargs="+", metavar="NAME=JSON")
    args = parser.parse_args()
    report = {"provenance": provenance("the first method, same questions"), "methods": {}}
    if args.out.exists():
        report = json.loads(args.out.read_text())
    for name, _, text in (method.partition("=") for method in args.methods):
        if name in report["methods"]:
            continue
        row = measure(json.loads(text), args)
        token_ids = row.pop("token_ids")
        first = report.setdefault("answers", token_ids)
        row["same_answers"] = f"{sum(map(list.__eq__, first, token_ids))} of {len(first)}"
        report["methods"][name] = row
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: tau {row['tau']:.3f}, alpha {row['alpha']}, {row['nodes_per_draft']} nodes", flush=True)


if __name__ == "__main__":
    main()
