"""Reading and validating Medusa checkpoints (h = hidden size, V = target vocabulary, D = draft vocabulary).

    {head}.{layer}.linear.weight   [h, h]
    {head}.{layer}.linear.bias     [h]
    {head}.{num_layers}.weight     [V or D, h]  the head's own LM head; the legacy layout has none and uses the base
                                                model's
    d2t                            [D]          optional, offsets as in ``eagle2.checkpoint``

A prefix ``medusa_head.`` or ``medusa_heads.`` is removed.  All keys of config.json are optional: ``medusa_num_heads``
and ``medusa_num_layers`` (by default those of the weights), ``hidden_size``, ``vocab_size``,
``base_model_name_or_path``, and ``medusa_choices``, the tree.  Weights are safetensors files, or the official
``medusa_lm_head.pt`` / ``pytorch_model.bin``, of which only plain tensors are read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..eagle2.checkpoint import (
    CheckpointError,
    check_draft_vocabulary,
    check_tensors,
    load_head,
    read_config,
    read_shapes,
)
from ..eagle2.kinds import kind_of, name_of

_PREFIX = re.compile(r"^medusa_heads?\.")
_LAYER = re.compile(r"^(\d{1,4})\.(\d{1,4})\.linear\.weight$", re.ASCII)


@dataclass(frozen=True)
class MedusaInfo:
    """Facts about a validated checkpoint, from its config and tensor headers."""

    path: Path
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # ids the heads can propose; equals vocab_size without a reduced vocabulary
    has_lm_heads: bool  # false: the legacy layout, the target's LM head is used
    has_d2t: bool
    config: dict = field(repr=False)


def validate_medusa(path: str | os.PathLike, target_hidden_size: int, target_vocab_size: int) -> MedusaInfo:
    """Check that the heads at `path` are complete and belong to the target.

    Raises:
        CheckpointError: they are incomplete or another target's; one line with the cause and the remedy.
    """
    path = Path(path)
    config = read_config(path)
    shapes = {_PREFIX.sub("", name): shape for name, shape in read_shapes(path).items()}
    layers = [tuple(map(int, match.groups())) for name in shapes if (match := _LAYER.match(name))]
    if not layers:
        kind = kind_of(config, shapes)
        served = "the method 'eagle2' serves it" if kind in ("eagle", "eagle3") else "give a folder of Medusa heads"
        raise CheckpointError(f"{path} is not a Medusa checkpoint but {name_of(kind)}: {served}.")
    # A name with a large number must not make the loops below very long.
    if max(max(head, layer) for head, layer in layers) >= len(layers) or len(shapes.get("0.0.linear.weight", ())) != 2:
        raise CheckpointError(
            f"{path} does not number its heads and layers from 0 ({layers[:3]}...), or tensor 0.0.linear.weight is no "
            f"matrix: the heads are incomplete, export or download them again."
        )
    num_heads = _count(path, config, "medusa_num_heads", 1 + max(head for head, _ in layers), "heads")
    num_layers = _count(path, config, "medusa_num_layers", 1 + max(layer for _, layer in layers), "layers per head")
    own = [f"{head}.{num_layers}.weight" in shapes for head in range(num_heads)]
    has_lm_heads = all(own)
    _check_base(path, config, shapes["0.0.linear.weight"][-1], target_hidden_size, target_vocab_size, has_lm_heads)
    draft_vocab_size = target_vocab_size
    if "d2t" in shapes:
        draft_vocab_size = check_draft_vocabulary(path, shapes, target_vocab_size)
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            expected[f"{head}.{layer}.linear.weight"] = (target_hidden_size, target_hidden_size)
            expected[f"{head}.{layer}.linear.bias"] = (target_hidden_size,)
        if any(own):
            expected[f"{head}.{num_layers}.weight"] = (draft_vocab_size, target_hidden_size)
    check_tensors(
        path,
        shapes,
        expected,
        missing_hint="the heads are incomplete: export or download them again.",
        shape_hint="a head's own LM head has one row for each token it can propose: the heads were trained for another "
        "target, or d2t is missing.",
    )
    return MedusaInfo(
        path=path,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=target_hidden_size,
        vocab_size=target_vocab_size,
        draft_vocab_size=draft_vocab_size,
        has_lm_heads=has_lm_heads,
        has_d2t="d2t" in shapes,
        config=config,
    )


def load_medusa(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint; prefixes are removed from names."""
    return {_PREFIX.sub("", name): tensor for name, tensor in load_head(path)[1].items()}


def _count(path: Path, config: dict, key: str, found: int, what: str) -> int:
    """The config's number of `what`, by default the weights' number `found`."""
    number = config.get(key, found)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise CheckpointError(f"{path / 'config.json'}: {key} must be an integer from 1, not {number!r}.")
    if number > found:
        raise CheckpointError(
            f"{path / 'config.json'} has {number} {what} ({key}), the weights have {found}: lower {key}, or use the "
            f"config.json that came with the heads."
        )
    return number


def _check_base(
    path: Path, config: dict, hidden_size: int, target_hidden_size: int, target_vocab_size: int, has_lm_heads: bool
) -> None:
    """Raise `CheckpointError` if the heads were trained on another model; legacy heads also need its LM head."""
    base = config.get("base_model_name_or_path") or "another model"
    vocab_size = config.get("vocab_size", target_vocab_size)
    if hidden_size == target_hidden_size and vocab_size == target_vocab_size:
        return
    difference = (
        f"hidden size {hidden_size}, the target {target_hidden_size}"
        if hidden_size != target_hidden_size
        else f"a vocabulary of {vocab_size}, the target {target_vocab_size}"
    )
    legacy = "" if has_lm_heads else ", and they use that model's LM head"
    raise CheckpointError(
        f"The heads at {path} have {difference}: they were trained on {base}{legacy}; serve that model, or use heads "
        f"trained for this target."
    )
