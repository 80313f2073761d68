"""The target's hidden states over answered prompts, cached on disk in shards.

Features are what the serving host returns as hidden states: the output of the target's final norm, so that
`lm_head(feature)` are the target's logits. One shard holds the features of `SHARD_ROWS` consecutive answers:

    features      bf16  [tokens, hidden]   rows of all sequences, one after another
    layer_features bf16 [tokens, 3 hidden] where asked for: the inputs of three layers side by side (EAGLE-3)
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from vllm_specplug.utils.files import replacing

from .answers import Answer, content_hash

SHARD_ROWS = 128


@dataclass
class FeatureSet:
    """All sequences of one or more shards, concatenated; sequence i owns rows starts[i] : starts[i] + lengths[i]."""

    features: torch.Tensor  # bf16 [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens]
    lengths: torch.Tensor  # int64 [sequences]
    prompt_lengths: torch.Tensor  # int64 [sequences]
    layer_features: torch.Tensor | None = None  # bf16 [tokens, layers * hidden], where loaded

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
    layers: tuple[int, ...] = (),
    device: str | torch.device = "cpu",
) -> list[Path]:
    """Compute every missing shard; return all shard files in order (those another process holds included).

    layers: ids of the layers whose inputs are kept too, as `layer_features` (n: the last layer's output).

    Raises:
        ValueError: `out_dir` holds the features of another target.
        OSError: a shard could not be written.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    files, model, done = [], None, 0
    target = Path(target_dir).name
    started = time.monotonic()
    with tqdm(range(0, len(answers), SHARD_ROWS), desc="features", unit="shard", disable=not progress) as bar:
        for start in bar:
            rows = answers[start : start + SHARD_ROWS]
            file = out_dir / f"shard-{start // SHARD_ROWS:05d}.safetensors"
            files.append(file)
            identity = {
                "hash": content_hash(rows),
                "max_length": str(max_length),
                "dtype": str(dtype),
                "target": target,
            }
            identity |= {"layers": ",".join(map(str, layers))} if layers else {}
            if _holds(file, identity):
                continue
            with _claim(file) as mine:
                if not mine or _holds(file, identity):
                    continue
                model = model or _load_target(target_dir, dtype).to(device)
                tensors = _run_target(model, [row.ids[:max_length] for row in rows], batch_tokens, layers)
                prompt_lengths = [min(len(row.prompt_ids), max_length) for row in rows]
                tensors["prompt_lengths"] = torch.tensor(prompt_lengths, dtype=torch.int32)
                with replacing(file) as temporary:
                    save_file(tensors, str(temporary), metadata=identity)
                done += tensors["ids"].numel()
                bar.set_postfix_str(f"{done / (time.monotonic() - started):.0f} tok/s")
    return files


def load_features(files: list[Path], layers: bool = False) -> FeatureSet:
    """Read shards into memory, `layer_features` only where asked for.

    Raises:
        ValueError: there are no shards.
    """
    if not files:
        raise ValueError("there are no features: the answers file is empty")
    names = ["features", "ids", "lengths", "prompt_lengths"] + ["layer_features"] * layers
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for file in files:
        with safe_open(str(file), framework="pt") as shard:
            for name, tensors in parts.items():
                tensors.append(shard.get_tensor(name))
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return FeatureSet(**{name: x if name.endswith("features") else x.long() for name, x in joined.items()})


def check_features(data: FeatureSet, target_config: dict) -> None:
    """Refuse features of a model of another size.

    Raises:
        ValueError: with both sizes.
    """
    found, hidden, vocab = data.features.shape[1], target_config["hidden_size"], target_config["vocab_size"]
    if found != hidden:
        raise ValueError(f"the features have hidden size {found}, the target {hidden}: they belong to another model")
    if int(data.ids.max()) >= vocab:
        raise ValueError(
            f"the answers hold token {int(data.ids.max())}, the target has {vocab} tokens: they belong to another model"
        )


def read_target_config(target_dir: str | os.PathLike) -> dict:
    """The target's config.json.

    Raises:
        ValueError: there is none.
    """
    file = Path(target_dir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{target_dir} is not a Hugging Face folder: it has no config.json")
    return json.loads(file.read_text())


def target_head(target_dir: str | os.PathLike) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The target's config, embedding and LM head weights ([vocab, hidden] each), read without building the model."""
    target_dir = Path(target_dir)
    config = read_target_config(target_dir)
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
def _run_target(
    model, sequences: list[list[int]], batch_tokens: int, layers: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """Forward length-sorted batches. Right padding: causal attention keeps it from being seen."""
    names = ["features"] + ["layer_features"] * bool(layers)
    kept: dict[str, list[torch.Tensor]] = {name: [torch.empty(0)] * len(sequences) for name in names}
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    with _layer_inputs(model, layers) as seen:
        for batch in _batches(order, [len(s) for s in sequences], batch_tokens):
            longest = max(len(sequences[i]) for i in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            for row, i in enumerate(batch):
                ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            states = {"features": model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state}
            if layers:
                states["layer_features"] = torch.cat([seen[layer] for layer in layers], dim=-1)
            for name, hidden in states.items():
                hidden = hidden.to("cpu", torch.bfloat16)
                for row, i in enumerate(batch):
                    kept[name][i] = hidden[row, : len(sequences[i])]
    return {
        **{name: torch.cat(rows).contiguous() for name, rows in kept.items()},
        "ids": torch.tensor([i for s in sequences for i in s], dtype=torch.int32),
        "lengths": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
    }


@contextmanager
def _layer_inputs(model, layers: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
    """What goes into each of `layers` during a forward; the final norm stands behind the last layer.

    Not the model's own `output_hidden_states`: its last entry is taken behind the final norm.
    """
    seen: dict[int, torch.Tensor] = {}
    modules = [*model.layers, model.norm] if layers else []
    if layers and not all(0 <= layer < len(modules) for layer in layers):
        raise ValueError(f"layers {layers} are not within 0..{len(modules) - 1} of the target")
    hooks = [
        modules[layer].register_forward_pre_hook(
            lambda _module, args, kwargs, layer=layer: seen.update(
                {layer: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
        for layer in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


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


def _holds(file: Path, identity: dict[str, str]) -> bool:
    """Whether the shard is there and is what `identity` says (it may hold more)."""
    if not file.exists():
        return False
    with safe_open(str(file), framework="pt") as shard:
        found = shard.metadata() or {}
    if found.get("target") != identity["target"]:
        raise ValueError(
            f"{file} holds features of the target {found.get('target')!r}, not of {identity['target']!r}: give another "
            "folder with --features, or delete this one"
        )
    return all(found.get(key) == value for key, value in identity.items())


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
