"""Measures what a reduced draft vocabulary costs, and how much of it a request's own tokens recover.

    python -m benchmarks.micro.context_vocabulary --target DIR --data DATA --out FILE

Greedy chains of the shipped drafter on answers kept by `specplug data`, offline: over its draft vocabulary, with the
tokens of the prompt added (serving adds those of the answer so far too), and over the target's whole vocabulary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from vllm_specplug.config import resolve_drafter
from vllm_specplug.proposers.eagle2.checkpoint import load_head, target_ids
from vllm_specplug.proposers.eagle2.head import EagleHead, HeadConfig
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.features import FeatureSet, load_features, target_head
from vllm_specplug.utils.environment import provenance

DRAFTER = "smollm2-135m-instruct"


def one_by_one(data: FeatureSet) -> list[FeatureSet]:
    """Split the data into one set per sequence."""
    spans = [slice(start, start + length) for start, length in zip(data.starts, data.lengths, strict=True)]
    return [
        FeatureSet(data.features[span], data.ids[span], data.lengths[i : i + 1], data.prompt_lengths[i : i + 1])
        for i, span in enumerate(spans)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder written by `specplug data`")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    config, embedding, lm_head = target_head(args.target)
    _, tensors = load_head(resolve_drafter(DRAFTER))[:2]
    head = EagleHead(HeadConfig.from_dict(config, bias=False))
    head.load_state_dict({name: tensors[name].float() for name in head.state_dict()})
    draft_ids = target_ids(tensors["d2t"])
    data = load_features(sorted((args.data / "features").glob("shard-*.safetensors")))
    sequences = one_by_one(data)
    prompts = [sequence.ids[: int(sequence.prompt_lengths[0])] for sequence in sequences]
    own = [torch.cat((draft_ids, prompt.unique()[~torch.isin(prompt.unique(), draft_ids)])) for prompt in prompts]
    answers = torch.cat([sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)])
    vocabularies = {
        "draft vocabulary": [draft_ids] * len(data),
        "and the prompt's tokens": own,
        "whole vocabulary": [torch.arange(len(lm_head))] * len(data),
    }
    found = {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, ids_of in vocabularies.items():
            tokens = cycles = 0
            for sequence, ids in zip(sequences, ids_of, strict=True):
                rows = lm_head[ids].to(torch.bfloat16).contiguous()
                result = chain_acceptance(head, sequence, embedding, rows, ids)
                tokens += round(result.tau * result.cycles)
                cycles += result.cycles
            found[name] = {"tau": tokens / cycles, "ids": sum(map(len, ids_of)) / len(ids_of)}
            print(f"{name}: tau {found[name]['tau']:.3f}, {found[name]['ids']:.0f} ids", flush=True)
    report = {
        "provenance": provenance("the draft vocabulary, same answers"),
        "answers": len(data),
        "answer_tokens": len(answers),
        "answer_tokens_in_draft_vocabulary": float(torch.isin(answers, draft_ids).float().mean()),
        "chains": found,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
