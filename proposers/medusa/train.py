"""`specplug train medusa`: MEDUSA-1, heads on a frozen target (Medusa, section 2.2.1).

Head k reads the target's feature t and learns what the target says k tokens after its own next token. The labels are
the target's own distributions there, which its cached features give through its LM head: the soft form of the paper's
cross-entropy. The blocks start at zero, so that every head starts as the target's LM head.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..eagle2.checkpoint import offsets, save_head
from ..training import command
from ..training.evaluate import Acceptance
from ..training.features import FeatureSet, target_head
from ..training.loop import Batch
from ..training.losses import distillation_loss, likeliest, sparse_distillation_loss
from ..training.provenance import provenance
from ..training.team import Team
from ..training.trainer import LoopOptions, train
from .checkpoint import load_medusa, validate_medusa
from .heads import MedusaHeads, heads_from_state
from .ranks import chain_acceptance, head_accuracies, rank_answers


@dataclass(frozen=True)
class MedusaTraining(LoopOptions):
    """What a training run depends on, besides the target and the data."""

    weight_decay: float = 0.0
    num_heads: int = 4
    num_layers: int = 1  # residual blocks per head
    decay: float = 0.8  # head k's loss weighs decay ** k
    label_topk: int = 32  # a label is the target's distribution over its likeliest tokens; 0: over all
    own_lm_heads: bool = False  # train an LM head for each head, starting from the target's; large checkpoints

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads and num_layers must be at least 1, got {self.num_heads}, {self.num_layers}")
        if self.label_topk < 0:
            raise ValueError(f"label_topk must not be negative, got {self.label_topk}")


def train_medusa(
    target_dir: str,
    data: FeatureSet,
    out_dir: str,
    draft_ids: torch.Tensor,
    options: MedusaTraining,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    max_steps: int | None = None,
    init_from: str | None = None,
    progress: bool = True,
    eval_every: int = 0,
    team: Team | None = None,
) -> MedusaHeads:
    """Train on `data` and write the checkpoint to `out_dir`; `max_steps` stops early, leaving the state to resume.

    draft_ids: int64 [draft_vocab], the target ids the heads can propose, ascending. init_from: a checkpoint of as
    many heads and layers to start from. eval_every, team: as in `trainer.train`.

    Raises:
        ValueError: features or checkpoint of another target, or a training state of other settings in `out_dir`.
        OSError: a file could not be written.
    """
    team = team or Team()
    task = MedusaTask(target_dir, draft_ids, options, init_from, team.device)
    train(task, data, out_dir, options, draft_ids, dev, facts, save_every_s, eval_every, max_steps, progress, team)
    return task.head


class MedusaTask:
    """Medusa heads in training (`trainer.Task`)."""

    def __init__(
        self,
        target_dir: str,
        draft_ids: torch.Tensor,
        options: MedusaTraining,
        init_from: str | None = None,
        device: torch.device | None = None,
    ):
        device = device or torch.device("cpu")
        self.target_dir, self.draft_ids, self.options, self.init_from = target_dir, draft_ids, options, init_from
        self.target_config, _, lm_head = target_head(target_dir)
        self.draft_head = lm_head[draft_ids].to(device)  # [draft_vocab, h]
        self.in_draft = torch.zeros(lm_head.shape[0], dtype=torch.bool, device=device)  # [vocab]
        self.in_draft[draft_ids.to(device)] = True
        self.head = MedusaHeads(options.num_heads, options.num_layers, self.target_config["hidden_size"])
        self._accuracies: list[list[float]] | None = None

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        if self.options.own_lm_heads and self.head.lm_heads is None:
            self.head.add_lm_heads(self.draft_head)
        if fresh and self.init_from is not None:
            self.head.load_state_dict(self._start(self.init_from).state_dict())

    def _start(self, path: str) -> MedusaHeads:
        options, config = self.options, self.target_config
        info = validate_medusa(path, config["hidden_size"], config["vocab_size"])
        shape, wanted = (info.num_heads, info.num_layers), (options.num_heads, options.num_layers)
        if shape != wanted or info.has_lm_heads != options.own_lm_heads:
            raise ValueError(
                f"the checkpoint at {path} has {shape[0]} heads of {shape[1]} layers "
                f"{'with' if info.has_lm_heads else 'without'} LM heads of their own: train heads of that shape to "
                "start from it"
            )
        return heads_from_state(load_medusa(path), *shape)

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return self.head_losses(self.head, batch, batch.features)

    def head_losses(self, heads: MedusaHeads, batch: Batch, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """The cross-entropy of each head reading `features` [B, T, h], averaged over its rows, times decay ** k."""
        num_heads, width = self.options.num_heads, batch.label_ids.shape[1]
        usable = batch.in_answer & (batch.label_ids >= 0) & self.in_draft[batch.label_ids.clamp(min=0)]
        # Row t of the batch has its label at token t + 2, which is head 1's: head k's stands k - 1 rows later.
        taken = usable.new_zeros(num_heads, *usable.shape)
        for k in range(min(num_heads, width)):
            taken[k, :, : width - k] = usable[:, k:]
        read = taken.any(0)
        with torch.autocast(batch.features.device.type, dtype=torch.bfloat16):
            predicted = heads(features[read])  # [rows read, heads, h]
        targets = batch.target_features[usable]  # one row for every label; the heads share them
        label = (usable.flatten().cumsum(0) - 1).view_as(usable)
        labels = likeliest(targets, self.draft_head, self.options.label_topk) if self.options.label_topk else None
        losses = {}
        for k in range(num_heads):
            at = label[:, k:][usable[:, k:]]
            weights = torch.full((at.shape[0],), self.options.decay ** (k + 1) / max(at.shape[0], 1), device=at.device)
            own = None if heads.lm_heads is None else heads.lm_heads[k]
            head, rows = self.draft_head if own is None else own, predicted[taken[k][read], k]
            if labels is not None:
                loss = sparse_distillation_loss(rows, labels[0][at], labels[1][at], head, weights)
            else:
                target_head = None if own is None else self.draft_head
                loss = distillation_loss(rows, targets[at], head, weights, target_head=target_head)
            losses[f"head {k + 1}"] = loss
        return losses

    def measure(self, dev: FeatureSet) -> Acceptance:
        """Of a chain of best guesses; the accuracies of all heads go into the checkpoint's facts."""
        head = self.draft_head if self.head.lm_heads is None else self.head.lm_heads.detach()
        ranks = rank_answers(self.head, dev, head, self.draft_ids)
        self._accuracies = head_accuracies(ranks)
        return chain_acceptance(ranks)

    def export(self, out_dir: str, facts: dict) -> None:
        if self._accuracies is not None:
            facts = facts | {"dev_accuracies": [[round(value, 4) for value in row[:5]] for row in self._accuracies]}
        export(self.head, self.target_config, self.draft_ids, out_dir, provenance(self.target_dir, **facts))


def export(heads: MedusaHeads, target_config: dict, draft_ids: torch.Tensor, out_dir: str, source: dict) -> None:
    """Write the heads in the target's dtype: without LM heads (the target's is used) unless they have their own."""
    dtype = getattr(torch, str(target_config.get("torch_dtype") or target_config.get("dtype") or "bfloat16"))
    config = {
        "model_type": "medusa",
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": target_config["hidden_size"],
        "vocab_size": target_config["vocab_size"],
        "draft_vocab_size": draft_ids.numel(),
        "base_model_name_or_path": source["target"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "specplug": source,
    }
    state = {name: tensor.to(dtype) for name, tensor in heads.checkpoint_state().items()}
    if draft_ids.numel() < target_config["vocab_size"]:
        state["d2t"] = offsets(draft_ids)
    save_head(out_dir, config, state)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train medusa`."""
    command.add_data_arguments(parser, attention=False)
    command.add_option_arguments(parser, MedusaTraining())


def run(args: argparse.Namespace) -> int:
    """`specplug train medusa`."""
    return command.run(args, command.options_from(args, MedusaTraining), train_medusa)
