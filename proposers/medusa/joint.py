"""`specplug train medusa2`: MEDUSA-2, heads and backbone trained together (Medusa, sections 2.2.2 and 2.3.2).

The backbone learns through a LoRA adapter. Its own loss is self-distillation: the cross-entropy with its distribution
without the adapter. The feature cache already has that distribution, so one forward per step is enough. The first
`heads_first` of the steps train the heads alone (the first stage, MEDUSA-1). Then the weight of the heads' loss rises
along a sine to `heads_weight`. The heads' learning rate is a multiple of the backbone's.

The export has the heads and, in `backbone/`, the backbone with the merged adapter, a model that vLLM serves like any
other.
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
from ..training.options import option
from .heads import MedusaHeads
from .train import MedusaTask, MedusaTraining

BACKBONE = "backbone"
#: Files besides config and weights that vLLM needs to serve a model folder.
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
    """Options of MEDUSA-2's training; the defaults are the paper's."""

    lr: float = option(5e-4, "highest learning rate of the target's adapter", above=0)
    heads_lr_scale: float = option(4.0, "learning rate of the heads divided by that of the adapter", above=0)
    heads_weight: float = option(
        0.01, "final weight of the heads' loss: 0.01 for the target's own answers, 0.2 for other data", above=0
    )
    heads_first: float = option(
        0.3, "share of the steps, at the start, in which only the heads are trained", low=0, high=1
    )
    lora_rank: int = option(32, "rank of the adapter", low=1)
    lora_alpha: int = option(16, "scale of the adapter (alpha / rank)", low=1)
    lora_dropout: float = option(0.05, "dropout of the adapter", low=0, high=0.99)


class TrainedWeights(nn.Module):
    """The weights that are trained and saved in the training state: the heads and the adapter, not the backbone."""

    def __init__(self, heads: MedusaHeads, adapter: dict[str, nn.Parameter]):
        super().__init__()
        self.heads = heads
        self.adapter = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in adapter.items()})


class JointTask(MedusaTask):
    """Medusa heads and the backbone's adapter in training."""

    options: JointTraining

    def __init__(self, target_dir: str, draft_ids, options: JointTraining, init_from=None, device=None):
        super().__init__(target_dir, draft_ids, options, init_from, device)
        self.lm_head = target_head(target_dir)[2].to(self.device)
        torch.manual_seed(options.seed)
        self.model, self.backbone = _with_adapter(target_dir, options)
        self.backbone.to(self.device)
        adapter = {name: weight for name, weight in self.backbone.named_parameters() if weight.requires_grad}
        self.heads, self.head = self.head, TrainedWeights(self.head, adapter)
        self._losses: dict[str, float] | None = None

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        with self._head_is_heads():
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
        """The adapted backbone's inputs to its LM head: int64 [B, T], right-padded -> [B, T, h]."""
        with torch.autocast(token_ids.device.type, dtype=torch.bfloat16, enabled=self.lm_head.dtype == torch.bfloat16):
            return self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state

    def measure(self, dev: FeatureSet) -> Acceptance:
        """Acceptance of the heads on the adapted backbone; keeps the backbone's loss with and without the adapter."""
        self.backbone.eval()
        adapted = replace(dev, features=self._features(dev))
        with self.backbone.disable_adapter():
            before = replace(dev, features=self._features(dev))
        self._losses = {
            "before": round(answer_loss(before, self.lm_head), 5),
            "after": round(answer_loss(adapted, self.lm_head), 5),
        }
        return self.measure_heads(self.heads, adapted)

    @torch.no_grad()
    def _features(self, data: FeatureSet) -> torch.Tensor:
        """Features of every sequence, as the feature cache stores them: [N, h]."""
        parts = data.ids.split(data.lengths.tolist())
        return torch.cat([self.hidden(ids.to(self.device).unsqueeze(0))[0].to(data.features) for ids in parts])

    def export(self, out_dir: str, facts: dict) -> None:
        if self._losses is not None:
            facts = facts | {"dev_backbone_loss": self._losses}
        with self._head_is_heads():
            super().export(out_dir, facts | {"backbone": BACKBONE})
        self._export_backbone(Path(out_dir) / BACKBONE)

    def _export_backbone(self, out_dir: Path) -> None:
        """Write the model with the adapter merged into its weights, in its own dtype; the task cannot train on."""
        dtype = self.model.dtype
        self.backbone.float().cpu().merge_and_unload()  # changes `self.model` in place
        self.model.to(dtype).save_pretrained(out_dir)
        for pattern in _TOKENIZER_FILES:
            for file in Path(self.target_dir).glob(pattern):
                shutil.copy(file, out_dir)

    @contextmanager
    def _head_is_heads(self):
        """Let `self.head` be the Medusa heads alone, as the methods of `MedusaTask` expect it."""
        weights, self.head = self.head, self.heads
        try:
            yield
        finally:
            self.head = weights


def answer_loss(data: FeatureSet, lm_head: torch.Tensor) -> float:
    """Mean negative log-likelihood of the answers' tokens, by the features that predict them."""
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
    """The target as a model with its LM head, and its part without the LM head, which gets the adapter."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("MEDUSA-2 needs peft: pip install peft") from error
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
    command.add_data_arguments(parser, attention=False, method="medusa")
    command.add_option_arguments(parser, JointTraining())


def run(args: argparse.Namespace) -> int:
    """`specplug train medusa2`."""
    return command.run(args, JointTask, command.options_from(args, JointTraining))
