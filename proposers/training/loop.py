"""Parts of the training loop that are the same for every method: batches, schedule, state on disk.

All random numbers derive from (seed, epoch) or (seed, step), so a resumed run makes exactly the steps of an
uninterrupted one.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from vllm_specplug.utils.files import replacing

from .features import FeatureSet
from .precision import compute_dtype

POOL_BATCHES = 32  # sequences are sorted by length within pools of about so many batches
SCHEDULES = ("cosine", "linear")


@dataclass
class Batch:
    """Padded sequences; row t of a sequence is the pair (token t+1, feature t), which predicts feature t+1."""

    next_ids: torch.Tensor  # int64 [B, T], token t+1
    features: torch.Tensor  # [B, T, h], feature t; [B, T, 3h] of three layers if the data has them (EAGLE-3)
    target_features: torch.Tensor  # [B, T, h], feature t+1
    label_ids: torch.Tensor  # int64 [B, T], token t+2, which the target writes after feature t+1; -1: padding
    in_answer: torch.Tensor  # bool [B, T], whether token t+2 belongs to the answer
    first_ids: torch.Tensor  # int64 [B], token 0

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def make_batch(data: FeatureSet, sequences: list[int], dtype: torch.dtype | None = None) -> Batch:
    """Gather `sequences`, right-padded; rows whose label is beyond the sequence are padding.

    dtype: of the batch's features; None: `compute_dtype` of a CPU.
    """
    dtype = dtype or compute_dtype("cpu")
    rows = max(int(data.lengths[i]) for i in sequences) - 2
    shape = (len(sequences), rows)
    next_ids = torch.zeros(shape, dtype=torch.long)
    label_ids = torch.full(shape, -1)
    inputs = data.features if data.layer_features is None else data.layer_features
    features = torch.zeros(*shape, inputs.shape[1], dtype=dtype)
    target_features = torch.zeros(*shape, data.features.shape[1], dtype=dtype)
    in_answer = torch.zeros(shape, dtype=torch.bool)
    for row, i in enumerate(sequences):
        start, count = int(data.starts[i]), int(data.lengths[i]) - 2
        next_ids[row, :count] = data.ids[start + 1 : start + 1 + count]
        label_ids[row, :count] = data.ids[start + 2 : start + 2 + count]
        features[row, :count] = inputs[start : start + count]
        target_features[row, :count] = data.features[start + 1 : start + 1 + count]
        in_answer[row, max(int(data.prompt_lengths[i]) - 2, 0) : count] = True
    first_ids = data.ids[data.starts[sequences]]
    return Batch(next_ids, features, target_features, label_ids, in_answer, first_ids)


def epoch_batches(lengths: list[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One shuffled pass over all sequences of 3 or more tokens, in batches of similar lengths and <= batch_tokens."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = [i for i in torch.randperm(len(lengths), generator=generator).tolist() if lengths[i] >= 3]
    mean_length = max(sum(lengths) // max(len(lengths), 1), 1)
    pool_size = max(POOL_BATCHES * batch_tokens // mean_length, 1)
    batches = []
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda i: lengths[i])
        batches += _fill(pool, lengths, batch_tokens)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def plan(lengths: list[int], batch_tokens: int, seed: int, epochs: int) -> Iterator[list[int]]:
    """The batches of all epochs, in order."""
    for epoch in range(epochs):
        yield from epoch_batches(lengths, batch_tokens, seed, epoch)


def learning_rate(
    step: int, steps: int, peak: float, warmup: float = 0.03, floor: float = 0.01, schedule: str = "cosine"
) -> float:
    """Linear warm-up, then a cosine down to `floor` times the peak, or a straight line to zero."""
    warm = max(int(steps * warmup), 1)
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(steps - warm, 1)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Interrupt:
    """Whether the user has asked the run to stop."""

    asked: bool = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Note SIGINT and SIGTERM instead of breaking off a step; a second one breaks off as usual."""
    interrupt = Interrupt()

    def note(*_):
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield interrupt
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def save_state(path: str | os.PathLike, state: dict) -> None:
    """Write a training state atomically.

    Raises:
        OSError: it could not be written; the previous state is kept.
    """
    with replacing(path) as temporary:
        torch.save(state, temporary)


def load_state(path: str | os.PathLike, plan_id: dict) -> dict | None:
    """Load the saved state; None if there is none.

    plan_id: the data and settings that the state must have.

    Raises:
        ValueError: the state has other data or settings.
    """
    if not Path(path).exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    changed = sorted(key for key in plan_id if state["plan"].get(key) != plan_id[key])
    if changed:
        raise ValueError(
            f"{path} belongs to a run with other {', '.join(changed)}; give the same settings to resume it, "
            f"or another --out to start again."
        )
    return state


def _fill(order: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for i in order:  # lengths ascend, so the sequence added last sets the padded length
        if batches and (len(batches[-1]) + 1) * lengths[i] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
