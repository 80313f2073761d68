"""The target's hidden states over answered prompts, cached on disk in shards.

Features are what the serving host returns as hidden states: the output of the target's final norm, so that
`lm_head(feature)` are the target's logits. One shard holds the features of `SHARD_ROWS` consecutive answers:

    features      bf16  [tokens, hidden]   rows of all sequences, one after another
    ids           int32 [tokens]           their token ids
    lengths       int32 [rows]             tokens per sequence
    prompt_lengths int32 [rows]            how many of them belong to the prompt

Shards are written atomically and recognised by the hash of their token ids; several processes may work on one
folder, each shard is held by a file lock while it is being computed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from .answers import Answer, content_hash

SHARD_ROWS = 128


@dataclass
class FeatureSet:
    """All sequences of one or more shards, concatenated; sequence i owns rows starts[i] : starts[i] + lengths[i]."""

    features: torch.Tensor  # bf16 [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens]
    lengths: torch.Tensor  # int64 [sequences]
    prompt_lengths: torch.Tensor  # int64 [sequences]

    def __post_init__(self):
        self.starts = torch.cumsum(self.lengths, 0) - self.lengths

    def __len__(self) -> int:
        return self.lengths.numel()


def extract(
    target_dir: str | os.PathLike,
    answers: list[Answer],
    out_dir: str | os.PathLike,
    max_length: int = 2048,
    batch_tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
) -> list[Path]:
    """Compute every missing shard; return all shard files in order (those another process holds included)."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    files, model = [], None
    target = Path(target_dir).name
    for start in tqdm(range(0, len(answers), SHARD_ROWS), desc="features", unit="shard", disable=not progress):
        rows = answers[start : start + SHARD_ROWS]
        file = out_dir / f"shard-{start // SHARD_ROWS:05d}.safetensors"
        files.append(file)
        identity = {"hash": content_hash(rows), "max_length": str(max_length), "dtype": str(dtype), "target": target}
        if _identity(file) == identity:
            continue
        with _claim(file) as mine:
            if not mine or _identity(file) == identity:
                continue
            model = model or _load_target(target_dir, dtype)
            tensors = _run_target(model, [row.ids[:max_length] for row in rows], batch_tokens)
            prompt_lengths = [min(len(row.prompt_ids), max_length) for row in rows]
            tensors["prompt_lengths"] = torch.tensor(prompt_lengths, dtype=torch.int32)
            save_file(tensors, f"{file}.tmp", metadata=identity)
            os.replace(f"{file}.tmp", file)
    return files


def load_features(files: list[Path]) -> FeatureSet:
    """Read shards into memory."""
    parts: dict[str, list[torch.Tensor]] = {"features": [], "ids": [], "lengths": [], "prompt_lengths": []}
    for file in files:
        with safe_open(str(file), framework="pt") as shard:
            for name, tensors in parts.items():
                tensors.append(shard.get_tensor(name))
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return FeatureSet(joined.pop("features"), **{name: tensor.long() for name, tensor in joined.items()})


def target_head(target_dir: str | os.PathLike) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The target's config, embedding and LM head weights ([vocab, hidden] each), read without building the model."""
    target_dir = Path(target_dir)
    config = json.loads((target_dir / "config.json").read_text())
    wanted = {"model.embed_tokens.weight": None, "lm_head.weight": None}
    for file in sorted(target_dir.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in wanted.keys() & set(tensors.keys()):
                wanted[name] = tensors.get_tensor(name)
    embedding, head = wanted.values()
    if embedding is None:
        raise ValueError(f"{target_dir} has no model.embed_tokens.weight in safetensors; convert the target first.")
    return config, embedding, embedding if head is None else head


def _load_target(target_dir, dtype: torch.dtype):
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(target_dir), dtype=dtype).eval()


@torch.inference_mode()
def _run_target(model, sequences: list[list[int]], batch_tokens: int) -> dict[str, torch.Tensor]:
    """Forward length-sorted batches. Right padding: causal attention keeps it from being seen."""
    features: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for batch in _batches(order, [len(s) for s in sequences], batch_tokens):
        longest = max(len(sequences[i]) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state.to(torch.bfloat16)
        for row, i in enumerate(batch):
            features[i] = hidden[row, : len(sequences[i])]
    return {
        "features": torch.cat(features).contiguous(),
        "ids": torch.tensor([i for s in sequences for i in s], dtype=torch.int32),
        "lengths": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
    }


def _batches(order: list[int], lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Consecutive runs of `order` (ascending lengths) whose padded size stays within `batch_tokens`."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _identity(file: Path) -> dict | None:
    if not file.exists():
        return None
    with safe_open(str(file), framework="pt") as shard:
        return shard.metadata()


@contextmanager
def _claim(file: Path) -> Iterator[bool]:
    """True while this process holds the shard; the lock dies with the process."""
    with open(f"{file}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
