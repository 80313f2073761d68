"""Measures the time of a verification step by nodes on a hybrid target: vLLM's chain, and a tree of as many nodes.

    python -m benchmarks.micro.hybrid_step --out hybrid_step.json

The target is like Qwen3-Next, with three layers of the gated delta rule to one of attention: 0.6 billion random
weights in bfloat16.  Drafts are random tokens, so that each step emits one token.  Each engine has its own process, and
both run without ``torch.compile``, which takes longer than all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_specplug import proposer
from vllm_specplug.config import TreeOptions
from vllm_specplug.core.tree import static_tree
from vllm_specplug.proposer import DraftContext, Method
from vllm_specplug.types import TokenTree
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

WAYS = ("chain of vLLM", "tree")
NODES = (1, 2, 4, 8, 16)
VOCAB, STEPS, PROMPT = 32768, 8, 16
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1536,
    "shared_expert_intermediate_size": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
#: Nodes of the drafts from now on.
_nodes = 0


class RandomOptions(TreeOptions):
    method: ClassVar[str] = "random"


class RandomTrees:
    """Proposes binary trees of random tokens."""

    def __init__(self, options: RandomOptions):
        pass

    def propose(self, context: DraftContext) -> TokenTree:
        tokens = torch.randint(3, VOCAB, (len(context.root_token_ids), _nodes))
        return static_tree(context.root_token_ids, tokens, tuple(node // 2 for node in range(_nodes)))


RANDOM = Method("random", RandomOptions, make=RandomTrees)


def _random_chains(
    _: Any, num_speculative_tokens: int, sampled_token_ids: list[list[int]], *__: Any, **___: Any
) -> list[list[int]]:
    return [[random.randrange(3, VOCAB) for _ in range(_nodes)] for _ in sampled_token_ids]


def _speculative_config(way: str) -> dict[str, Any]:
    if way == "tree":
        ours = proposer._registered()
        entry = EntryPoint(name="random", value=f"{__name__}:RANDOM", group=proposer.GROUP)
        proposer._registered = lambda: {**ours, "random": entry}
        proposer.find_method.cache_clear()
        return {"method": "random", "num_speculative_tokens": max(NODES), "budget": "fixed"}
    return {"method": "ngram", "num_speculative_tokens": max(NODES), "prompt_lookup_max": 2}


def seconds_per_step(way: str, requests: int, repeats: int) -> dict[int, float]:
    """Return the median seconds of a step by nodes, in this process."""
    global _nodes
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import SamplingParams

    from vllm_specplug.vllm.probes.in_process import start_in_process

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        arguments = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        arguments |= {"max_model_len": 512, "max_num_seqs": requests, "kv_cache_memory_bytes": 1 << 30}
        arguments |= {"enforce_eager": True}
        llm = start_in_process(
            arguments | {"enable_prefix_caching": False, "speculative_config": _speculative_config(way)}
        )
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    NgramProposer.propose = _random_chains
    prompts = [{"prompt_token_ids": [random.randrange(3, VOCAB) for _ in range(PROMPT)]} for _ in range(requests)]

    def answer(num_tokens: int) -> float:
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    found: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for _nodes in NODES:
        answer(2)  # warms up
    for _ in range(repeats):
        for _nodes in NODES:
            found[_nodes].append((answer(1 + STEPS) - answer(1)) / STEPS)
    return {nodes: statistics.median(values) for nodes, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help="measure this one only, in this process")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args()
    if args.way:
        args.out.write_text(json.dumps(seconds_per_step(args.way, args.requests, args.repeats)))
        return
    found = {}
    for way in WAYS:
        with tempfile.NamedTemporaryFile(suffix=".json") as part:
            options = ["--requests", str(args.requests), "--repeats", str(args.repeats), "--out", part.name]
            subprocess.run([sys.executable, "-m", "benchmarks.micro.hybrid_step", "--way", way, *options], check=True)
            found[way] = json.loads(Path(part.name).read_text())
    origin = provenance(baseline="vLLM's chains on the same target, in a process of their own")
    result = {"provenance": origin, "requests": args.requests, "seconds per step": found}
    args.out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    rows = [[str(nodes), *(f"{found[way][str(nodes)] * 1e3:.1f}" for way in WAYS)] for nodes in NODES]
    print(format_table(["nodes", *(f"{way} ms" for way in WAYS)], rows))


if __name__ == "__main__":
    main()
