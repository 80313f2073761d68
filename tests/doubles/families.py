"""Drafters of each kind for a tiny target of any family: they know some answers by heart, or are a part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.doubles import dflash, tiny
from tests.doubles.architectures import ARCHITECTURES
from tests.doubles.architectures import write_target as write_architecture
from vllm_specplug.proposers.eagle3 import train as eagle3
from vllm_specplug.proposers.eagle3.head import layer_ids
from vllm_specplug.proposers.training.features import load_features
from vllm_specplug.proposers.training.trainer import RunSettings, train

#: Pairs of prompt and answer.
Texts = list[tuple[list[int], list[int]]]
#: By family: how its target is written.
FAMILIES: dict[str, Callable[[Path], object]] = {
    "Qwen3": lambda path: tiny.write_target(path, family="qwen3"),
    "Granite": lambda path: write_architecture(path, ARCHITECTURES["Granite"]),
}
_SMALL = {"epochs": 60, "batch_tokens": 1024, "lr": 5e-3, "draft_vocab_size": tiny.VOCAB, "align_steps": 2}


def write_eagle3(path: Path, target: Path, texts: Texts) -> Path:
    """Train an EAGLE-3 head."""
    files = tiny.extract_features(target, texts, path.parent / "features", layer_ids({"num_hidden_layers": 2}))
    task = eagle3.Eagle3Task(str(target), torch.arange(tiny.VOCAB), eagle3.Eagle3Options(**_SMALL))
    train(task, load_features(files, layers=True), str(path), RunSettings(progress=False))
    return path


def write_dflash(path: Path, target: Path, texts: Texts) -> Path:
    """Train a DFlash head."""
    return dflash.write_head(path, target, [prompt for prompt, _ in texts], len(texts[0][1]))


def write_sibling(path: Path, target: Path, _: Texts) -> Path:
    """Take the target's first layer."""
    return tiny.write_sibling(path, target)


#: By method: what writes its drafter.
DRAFTERS = {"eagle2": write_eagle3, "dflash_tree": write_dflash, "draft_tree": write_sibling}
