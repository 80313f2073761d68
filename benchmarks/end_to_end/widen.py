"""Widen a Llama checkpoint, and an EAGLE head for it: more parameters, the same function.

    python benchmarks/end_to_end/widen.py SMOLLM2 WIDE --head HEAD --head-out WIDE-HEAD

Hidden sizes and heads are copied side by side, and every weight that reads copies is shared out among them, in powers
of two.  So a small model's texts and acceptance lengths can be measured at a large one's cost of a step.  Only the
order of sums differs.  SmolLM2-135M-Instruct becomes a model of 1.6 billion parameters, 85 million of them embeddings.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def shares(copies: int) -> list[float]:
    """Return what each copy counts; the sum is 1, and each share a power of two."""
    parts = [1.0]
    while len(parts) < copies:
        largest = parts.pop(parts.index(max(parts)))
        parts += [largest / 2, largest / 2]
    return parts


def rows(weight: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat the outputs."""
    return weight.repeat(copies, *(1 for _ in weight.shape[1:]))


def columns(weight: torch.Tensor, copies: int) -> torch.Tensor:
    """Share the weights of each input out among its copies."""
    return torch.cat([weight * share for share in shares(copies)], dim=1)


def widened(state: dict[str, torch.Tensor], copies: int, inner: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama checkpoint, or of an EAGLE head, with wider layers.

    Args:
        state: tensors by name.
        copies: of the hidden size and the heads.
        inner: copies of the MLP's inner size.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[name] = columns(rows(weight, copies), copies)
        elif kind in ("gate_proj", "up_proj"):
            found[name] = columns(rows(weight, inner), copies)
        elif kind == "down_proj":
            found[name] = columns(rows(weight, copies), inner)
        elif kind == "fc":
            sides = weight.chunk(2, dim=1)  # embedding and hidden state
            found[name] = rows(torch.cat([columns(side, copies) for side in sides], dim=1), copies)
        elif kind == "embed_tokens":
            found[name] = weight.repeat(1, copies)
        elif kind == "lm_head":
            found[name] = columns(weight, copies)
        elif kind == "d2t":
            found[name] = weight
        elif weight.dim() == 1:  # norms
            found[name] = rows(weight, copies)
        else:
            raise ValueError(f"{name}: no Llama layer has such a tensor")
    return {name: weight.contiguous() for name, weight in found.items()}


def write(source: Path, out: Path, copies: int, inner: int, is_head: bool) -> None:
    """Write the folder ``out``."""
    config = json.loads((source / "config.json").read_text())
    state = load_file(source / "model.safetensors")
    if not is_head and "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        config[name] *= copies
    config["intermediate_size"] *= inner
    config["tie_word_embeddings"] = is_head
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    state = widened(state, copies, inner)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{out}: {sum(weight.numel() for weight in state.values()) / 1e9:.2f} billion parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="a folder with a Llama checkpoint in one model.safetensors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", type=Path, help="an EAGLE head for it")
    parser.add_argument("--head-out", type=Path)
    parser.add_argument("--copies", type=int, default=3, help="of the hidden size and the heads")
    parser.add_argument("--inner", type=int, default=5, help="copies of the MLP's inner size")
    args = parser.parse_args()
    write(args.target, args.out, args.copies, args.inner, is_head=False)
    if args.head:
        write(args.head, args.head_out, args.copies, args.inner, is_head=True)


if __name__ == "__main__":
    main()
