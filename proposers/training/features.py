"""The target's hidden states over answered prompts, cached on disk in shards.

Features are the hidden states that vLLM gives a drafter: the outputs of the target's final norm, so that
`lm_head(feature)` are the target's logits. One shard has the features of `SHARD_ROWS` consecutive answers:

    features       bf16  [tokens, hidden]    rows of all sequences, one after another
    layer_features bf16  [tokens, 3 hidden]  optional: the inputs of three layers side by side (EAGLE-3)
    ids            int32 [tokens]            their token ids
    lengths        int32 [rows]              tokens per sequence
    prompt_lengths int32 [rows]              tokens of the sequence's prompt

Shards are written atomically and identified by the hash of their token ids. Several processes may work on one folder:
a process locks the shard that it computes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from vllm_specplug.utils.files import replacing

from .answers import Answer, content_hash
from .precision import compute_dtype

SHARD_ROWS = 128


@dataclass
class FeatureSet:
    """All sequences of one or more shards, concatenated; sequence i owns rows starts[i] : starts[i] + lengths[i]."""

    features: torch.Tensor  # bf16 [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens]
    lengths: torch.Tensor  # int64 [sequences]
    prompt_lengths: torch.Tensor  # int64 [sequences]
    layer_features: torch.Tensor | None = None  # bf16 [tokens, layers * hidden], if loaded

    def __post_init__(self):
        self.starts = torch.cumsum(self.lengths, 0) - self.lengths

    def __len__(self) -> int:
        return self.lengths.numel()

    def take(self, sequences: list[int]) -> FeatureSet:
        """The sequences of these numbers, in this order."""
        pairs = zip(self.starts[sequences].tolist(), self.lengths[sequences].tolist(), strict=True)
        rows = torch.cat([torch.arange(start, start + length) for start, length in pairs] or [torch.arange(0)])
        layers = None if self.layer_features is None else self.layer_features[rows]
        lengths, prompts = self.lengths[sequences], self.prompt_lengths[sequences]
        return FeatureSet(self.features[rows], self.ids[rows], lengths, prompts, layers)


def extract(
    target_dir: str | os.PathLike,
    answers: list[Answer],
    out_dir: str | os.PathLike,
    max_length: int = 2048,
    batch_tokens: int = 4096,
    progress: bool = True,
    layers: tuple[int, ...] = (),
    device: str | torch.device = "cpu",
) -> list[Path]:
    """Compute the missing shards; return all shard files in order, also the shards of other processes.

    layers: ids of the layers whose inputs are stored as `layer_features` (number of layers: the last layer's output).

    Raises:
        ValueError: `out_dir` has the features of another target.
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
                "target": target,
            }
            identity |= {"layers": ",".join(map(str, layers))} if layers else {}
            if _is_complete(file, identity):
                continue
            with _try_lock(file) as locked:
                if not locked or _is_complete(file, identity):
                    continue
                model = model or _load_target(target_dir, compute_dtype(device)).to(device)
                tensors = _run_target(model, [row.ids[:max_length] for row in rows], batch_tokens, layers)
                prompt_lengths = [min(len(row.prompt_ids), max_length) for row in rows]
                tensors["prompt_lengths"] = torch.tensor(prompt_lengths, dtype=torch.int32)
                with replacing(file) as temporary:
                    save_file(tensors, str(temporary), metadata=identity)
                done += tensors["ids"].numel()
                bar.set_postfix_str(f"{done / (time.monotonic() - started):.0f} tok/s")
    return files


def load_features(files: list[Path], layers: bool = False) -> FeatureSet:
    """Read shards into memory; `layer_features` only if `layers` is true.

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


def join(sets: list[FeatureSet]) -> FeatureSet:
    """Return all sequences of all sets, in their order."""
    names = [one.name for one in fields(FeatureSet) if getattr(sets[0], one.name) is not None]
    return FeatureSet(**{name: torch.cat([getattr(one, name) for one in sets]) for name in names})


def has_layer_features(folder: Path) -> bool:
    """Return whether the shards of a folder, if it has any, contain `layer_features`."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    for file in shards:
        with safe_open(str(file), framework="pt") as shard:
            if "layer_features" not in shard.keys():  # noqa: SIM118 (it has no other iterator)
                return False
    return bool(shards)


def check_features(data: FeatureSet, target_config: dict) -> None:
    """Check that the features can be the target's.

    Raises:
        ValueError: the hidden size or the vocabulary is another model's.
    """
    found, hidden, vocab = data.features.shape[1], target_config["hidden_size"], target_config["vocab_size"]
    if found != hidden:
        raise ValueError(f"the features have hidden size {found}, the target {hidden}: they belong to another model")
    if int(data.ids.max()) >= vocab:
        raise ValueError(
            f"the answers have token {int(data.ids.max())}, the target has {vocab} tokens: they belong to another model"
        )


def read_target_config(target_dir: str | os.PathLike) -> dict:
    """Read the target's config.json.

    Raises:
        ValueError: there is no config.json.
    """
    file = Path(target_dir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{target_dir} is not a Hugging Face folder: it has no config.json; download the model first")
    return json.loads(file.read_text())


def end_ids_of(target_config: dict) -> list[int]:
    """The ids that end the target's answers."""
    end = target_config.get("eos_token_id")
    return end if isinstance(end, list) else [end] if end is not None else []


def target_head(target_dir: str | os.PathLike) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Read the target's config, embedding and LM head ([vocab, hidden] each) without building the model."""
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
    """Run the target over batches of similar lengths; padding is on the right, where causal attention ignores it."""
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
    """Collect the inputs of `layers` during a forward; the final norm counts as the layer after the last.

    The model's own `output_hidden_states` does not serve: its last entry is the output of the final norm.
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
    """Split `order` (lengths ascending) into batches of at most `batch_tokens` tokens, padding included."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _is_complete(file: Path, identity: dict[str, str]) -> bool:
    """Whether the shard exists and its metadata has the entries of `identity`; it may have more."""
    if not file.exists():
        return False
    with safe_open(str(file), framework="pt") as shard:
        found = shard.metadata() or {}
    if found.get("target") != identity["target"]:
        raise ValueError(
            f"{file} has features of the target {found.get('target')!r}, not of {identity['target']!r}: give another "
            "folder with --features, or delete this one"
        )
    return all(found.get(key) == value for key, value in identity.items())


@contextmanager
def _try_lock(file: Path) -> Iterator[bool]:
    """Lock the shard; false if another process has the lock, which ends with the process."""
    with open(f"{file}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
