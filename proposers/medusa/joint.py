"""`specplug train medusa2`: MEDUSA-2, heads and backbone trained together (Medusa, sections 2.2.2 and 2.3.2).

The backbone learns through LoRA. Its own loss is self-distillation: the cross-entropy with the distribution that it has
with the adapter switched off, which the feature cache holds already, so that one forward per step is enough. The first
`heads_first` of the steps train the heads alone (the first stage, MEDUSA-1); then the heads' share of the joint loss
rises along a sine to `heads_weight`. The heads' learning rate is a multiple of the backbone's.

Exported are the heads, and in `backbone/` the backbone with its adapter merged: a model for the host like any other.
"""

from __future__ import annotations

import argparse
import math
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..training import command
from ..training.evaluate import Acceptance
from ..training.features import FeatureSet, target_head
from ..training.loop import Batch
from ..training.losses import distillation_loss
from ..training.team import Team
from ..training.trainer import train
from .heads import MedusaHeads
from .ranks import chain_acceptance, head_accuracies, rank_answers
from .train import MedusaTask, MedusaTraining

BACKBONE = "backbone"
#: Files that a folder needs beside config and weights to be served.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "added_tokens*",
)


@dataclass(frozen=True)
class JointTraining(MedusaTraining):
    """Options of MEDUSA-2; the defaults are the paper's, `lr` being the backbone's."""

    lr: float = 5e-4
    heads_lr_scale: float = 4.0  # the heads' learning rate over the backbone's
    heads_weight: float = 0.01  # lambda_0 at the end of its rise: 0.01 for self-distillation, 0.2 for data not its own
    heads_first: float = 0.3  # share of the steps in which the heads learn alone
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.heads_first <= 1 or not 0 <= self.lora_dropout < 1:
            raise ValueError("heads_first is a share of the steps, lora_dropout a probability: choose from 0 to 1")
        if self.lora_rank < 1 or self.heads_weight <= 0 or self.heads_lr_scale <= 0:
            raise ValueError("lora_rank, heads_weight and heads_lr_scale must be positive")


def train_joint(
    target_dir: str,
    data: FeatureSet,
    out_dir: str,
    draft_ids: torch.Tensor,
    options: JointTraining,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    max_steps: int | None = None,
    init_from: str | None = None,
    progress: bool = True,
    eval_every: int = 0,
    team: Team | None = None,
) -> JointTask:
    """Train on `data` and write heads and merged backbone to `out_dir`; arguments and errors as for `train_medusa`."""
    team = team or Team()
    task = JointTask(target_dir, draft_ids, options, init_from, team.device)
    train(task, data, out_dir, options, draft_ids, dev, facts, save_every_s, eval_every, max_steps, progress, team)
    return task


class Trained(nn.Module):
    """What is trained and saved: the heads and the adapter's weights; the backbone around these is not part of it."""

    def __init__(self, heads: MedusaHeads, adapter: dict[str, nn.Parameter]):
        super().__init__()
        self.heads = heads
        self.adapter = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in adapter.items()})


class JointTask(MedusaTask):
    """Heads and adapter in training (`trainer.Task`)."""

    options: JointTraining

    def __init__(self, target_dir: str, draft_ids, options: JointTraining, init_from=None, device=None):
        super().__init__(target_dir, draft_ids, options, init_from, device)
        self.device = self.draft_head.device
        self.lm_head = target_head(target_dir)[2].to(self.device)
        torch.manual_seed(options.seed)
        self.model, self.backbone = _with_adapter(target_dir, options)
        self.backbone.to(self.device)
        adapter = {name: weight for name, weight in self.backbone.named_parameters() if weight.requires_grad}
        self.heads, self.head = self.head, Trained(self.head, adapter)
        self._losses: dict[str, float] | None = None

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        with self._only_heads():
            super().prepare(data, fresh)

    def parameter_groups(self) -> list[dict]:
        return [
            {"params": list(self.head.adapter.values())},
            {"params": list(self.heads.parameters()), "lr_scale": self.options.heads_lr_scale},
        ]

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        first_stage = math.ceil(self.options.heads_first * steps)
        if step < first_stage:
            return self.head_losses(self.heads, batch, batch.features)
        torch.manual_seed(generator.initial_seed())  # the adapter's dropout
        self.backbone.train()
        hidden = self.hidden(torch.cat([batch.first_ids.unsqueeze(1), batch.next_ids], dim=1))
        weight = self.options.heads_weight * math.sin(math.pi / 2 * (step + 1 - first_stage) / (steps - first_stage))
        losses = {name: weight * x for name, x in self.head_losses(self.heads, batch, hidden[:, :-1]).items()}
        rows = batch.in_answer & (batch.label_ids >= 0)
        teacher = batch.target_features[rows]
        weights = torch.full((teacher.shape[0],), 1 / max(teacher.shape[0], 1), device=teacher.device)
        losses["backbone"] = distillation_loss(hidden[:, 1:][rows], teacher, self.lm_head, weights)
        return losses

    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the adapted backbone hands to its LM head: int64 [B, T], right-padded -> [B, T, h]."""
        with torch.autocast(token_ids.device.type, dtype=torch.bfloat16, enabled=self.lm_head.dtype == torch.bfloat16):
            return self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state

    def measure(self, dev: FeatureSet) -> Acceptance:
        """The heads on the adapted backbone; its loss on these answers, and the unadapted one's, become facts."""
        self.backbone.eval()
        adapted = replace(dev, features=self._run(dev))
        with self.backbone.disable_adapter():
            before = replace(dev, features=self._run(dev))
        self._losses = {
            "before": round(answer_loss(before, self.lm_head), 5),
            "after": round(answer_loss(adapted, self.lm_head), 5),
        }
        head = self.draft_head if self.heads.lm_heads is None else self.heads.lm_heads.detach()
        ranks = rank_answers(self.heads, adapted, head, self.draft_ids)
        self._accuracies = head_accuracies(ranks)
        return chain_acceptance(ranks)

    @torch.no_grad()
    def _run(self, data: FeatureSet) -> torch.Tensor:
        """Features of every sequence, as the cache stores them: [N, h]."""
        parts = data.ids.split(data.lengths.tolist())
        return torch.cat([self.hidden(ids.to(self.device).unsqueeze(0))[0].to(data.features) for ids in parts])

    def export(self, out_dir: str, facts: dict) -> None:
        if self._losses is not None:
            facts = facts | {"dev_backbone_loss": self._losses}
        with self._only_heads():
            super().export(out_dir, facts | {"backbone": BACKBONE})
        self._export_backbone(Path(out_dir) / BACKBONE)

    def _export_backbone(self, out_dir: Path) -> None:
        """Write the model with the adapter's change added to its weights, in its own dtype; ends the training."""
        dtype = self.model.dtype
        self.backbone.float().cpu().merge_and_unload()  # in place, inside the model
        self.model.to(dtype).save_pretrained(out_dir)
        for pattern in _TOKENIZER_FILES:
            for file in Path(self.target_dir).glob(pattern):
                shutil.copy(file, out_dir)

    @contextmanager
    def _only_heads(self):
        """What `MedusaTask` does with its heads."""
        whole, self.head = self.head, self.heads
        try:
            yield
        finally:
            self.head = whole


def answer_loss(data: FeatureSet, lm_head: torch.Tensor) -> float:
    """Mean negative log-likelihood of the answers' tokens, given the features that predict them."""
    total, count = 0.0, 0
    for start, length, prompt in zip(
        data.starts.tolist(), data.lengths.tolist(), data.prompt_lengths.tolist(), strict=True
    ):
        first, last = start + max(prompt - 1, 0), start + length - 1
        logits = data.features[first:last].to(lm_head) @ lm_head.T
        truth = data.ids[first + 1 : last + 1].to(lm_head.device)
        total += nn.functional.cross_entropy(logits.float(), truth, reduction="sum").item()
        count += last - first
    return total / max(count, 1)


def _with_adapter(target_dir: str, options: JointTraining) -> tuple[nn.Module, nn.Module]:
    """The target with its LM head, and the part of it below, which has the adapter."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("MEDUSA-2 needs peft: pip install 'vllm-specplug[train]'") from error
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear",
    )
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype="auto")
    return model, get_peft_model(model.base_model, settings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train medusa2`."""
    command.add_data_arguments(parser, attention=False)
    command.add_option_arguments(parser, JointTraining())


def run(args: argparse.Namespace) -> int:
    """`specplug train medusa2`."""
    return command.run(args, command.options_from(args, JointTraining), train_joint)
