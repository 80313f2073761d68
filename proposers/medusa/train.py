"""`specplug train medusa`: MEDUSA-1, heads on a frozen target (Medusa, section 2.2.1).

Head k reads the target's feature t and learns to predict the token k places after the target's next token. The labels
are the target's own distributions at that place, computed from its cached features and its LM head: a soft form of the
paper's cross-entropy. The residual blocks start at zero, so every head starts as the target's LM head.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..eagle2.checkpoint import offsets, save_head
from ..training import command
from ..training.evaluate import Acceptance
from ..training.features import FeatureSet
from ..training.loop import Batch
from ..training.losses import distillation_loss, likeliest, sparse_distillation_loss
from ..training.options import option
from ..training.precision import autocast, compute_dtype
from ..training.provenance import provenance
from ..training.trainer import LoopOptions, Task
from .checkpoint import load_medusa, validate_medusa
from .heads import MedusaHeads, heads_from_state
from .ranks import chain_acceptance, head_accuracies, rank_answers


@dataclass(frozen=True)
class MedusaTraining(LoopOptions):
    """Options of Medusa heads' training."""

    weight_decay: float = option(0.0, "weight decay of AdamW", low=0)
    num_heads: int = option(4, "number of heads; head k predicts the token k places after the next one", low=1)
    num_layers: int = option(1, "residual blocks per head", low=1)
    decay: float = option(0.8, "the weight of the loss of head k is this number ** k", above=0)
    label_topk: int = option(
        32, "number of likeliest tokens whose target probabilities are the label (0: all tokens)", low=0
    )
    own_lm_heads: bool = option(
        False, "give each head an LM head of its own, begun with the target's; makes large checkpoints"
    )


class MedusaTask(Task):
    """Medusa heads in training."""

    _accuracies: list[list[float]] | None = None

    def new_head(self) -> MedusaHeads:
        return MedusaHeads(self.options.num_heads, self.options.num_layers, self.target_config["hidden_size"])

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        if self.options.own_lm_heads and self.head.lm_heads is None:
            self.head.add_lm_heads(self.draft_head)
        if fresh and self.init_from is not None:
            shape = self.options.num_heads, self.options.num_layers
            self.head.load_state_dict(heads_from_state(load_medusa(self.init_from), *shape).state_dict())

    @classmethod
    def check_start(cls, init_from: str, target_config: dict, options: MedusaTraining) -> None:
        """Check that training can start from heads; errors as of `Task`."""
        info = validate_medusa(init_from, target_config["hidden_size"], target_config["vocab_size"])
        shape, wanted = (info.num_heads, info.num_layers), (options.num_heads, options.num_layers)
        if shape != wanted or info.has_lm_heads != options.own_lm_heads:
            raise ValueError(
                f"the checkpoint at {init_from} has {shape[0]} heads of {shape[1]} layers "
                f"{'with' if info.has_lm_heads else 'without'} LM heads of their own: train heads of that shape to "
                "start from it"
            )

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The cross-entropy of each head, averaged over its rows, times decay ** k."""
        heads, features = self.head, batch.features
        num_heads, width = self.options.num_heads, batch.label_ids.shape[1]
        usable = batch.in_answer & (batch.label_ids >= 0) & self.in_draft[batch.label_ids.clamp(min=0)]
        # The batch's label of row t is token t + 2, the label of head 1; head k's label is that of row t + k - 1.
        has_label = usable.new_zeros(num_heads, *usable.shape)
        for k in range(min(num_heads, width)):
            has_label[k, :, : width - k] = usable[:, k:]
        read = has_label.any(0)  # rows that some head reads
        with autocast(features.device):
            predicted = heads(features[read].to(compute_dtype(features.device)))  # [rows read, heads, h]
        targets = batch.target_features[usable]  # one row for each label; the heads share them
        label_index = (usable.flatten().cumsum(0) - 1).view_as(usable)
        labels = likeliest(targets, self.draft_head, self.options.label_topk) if self.options.label_topk else None
        losses = {}
        for k in range(num_heads):
            at = label_index[:, k:][usable[:, k:]]
            weights = torch.full((at.shape[0],), self.options.decay ** (k + 1) / max(at.shape[0], 1), device=at.device)
            own = None if heads.lm_heads is None else heads.lm_heads[k]
            head, rows = self.draft_head if own is None else own, predicted[has_label[k][read], k]
            if labels is not None:
                loss = sparse_distillation_loss(rows, labels[0][at], labels[1][at], head, weights)
            else:
                target_head = None if own is None else self.draft_head
                loss = distillation_loss(rows, targets[at], head, weights, target_head=target_head)
            losses[f"head {k + 1}"] = loss
        return losses

    def measure(self, dev: FeatureSet) -> Acceptance:
        """Acceptance of chains of each head's best guess; keeps the heads' accuracies for the checkpoint's facts."""
        heads = self.head
        head = self.draft_head if heads.lm_heads is None else heads.lm_heads.detach()
        ranks = rank_answers(heads, dev, head, self.draft_ids)
        self._accuracies = head_accuracies(ranks)
        return chain_acceptance(ranks)

    def export(self, out_dir: str, facts: dict) -> None:
        """Write the heads in the target's dtype; without LM heads of their own they use the target's."""
        if self._accuracies is not None:
            facts = facts | {"dev_accuracies": [[round(value, 4) for value in row[:5]] for row in self._accuracies]}
        heads, target, draft_vocab_size = self.head, self.target_config, self.draft_ids.numel()
        source = provenance(self.target_dir, **facts)
        dtype = getattr(torch, str(target.get("torch_dtype") or target.get("dtype") or "bfloat16"))
        config = {
            "model_type": "medusa",
            "medusa_num_heads": heads.num_heads,
            "medusa_num_layers": heads.num_layers,
            "hidden_size": target["hidden_size"],
            "vocab_size": target["vocab_size"],
            "draft_vocab_size": draft_vocab_size,
            "base_model_name_or_path": source["target"],
            "torch_dtype": str(dtype).removeprefix("torch."),
            "specplug": source,
        }
        state = {name: tensor.to(dtype) for name, tensor in heads.checkpoint_state().items()}
        if draft_vocab_size < target["vocab_size"]:
            state["d2t"] = offsets(self.draft_ids)
        save_head(out_dir, config, state)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train medusa`."""
    command.add_data_arguments(parser, attention=False, method="medusa")
    command.add_option_arguments(parser, MedusaTraining())


def run(args: argparse.Namespace) -> int:
    """`specplug train medusa`."""
    return command.run(args, MedusaTask, command.options_from(args, MedusaTraining))
