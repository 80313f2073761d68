"""`specplug train eagle3`: a head on three fused layers, trained with the training-time test (EAGLE-3, section 3).

It has a draft vocabulary and an LM head of its own, and there is no feature loss.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..eagle2.checkpoint import load_head, target_ids, validate_checkpoint
from ..eagle2.head import HeadConfig
from ..eagle2.layout import AUX_KEY
from ..training import command
from ..training.eagle import PROMPT_SHARE_HELP, EagleTask
from ..training.features import FeatureSet, read_target_config
from ..training.initialise import column_scale, small_layer
from ..training.loop import Batch
from ..training.losses import distillation_loss
from ..training.options import option
from ..training.trainer import LoopOptions
from .head import Eagle3Head, layer_ids


@dataclass(frozen=True)
class Eagle3Options(LoopOptions):
    """Options of an EAGLE-3 head's training."""

    align_steps: int = option(7, "passes of EAGLE-3's training-time test", low=1)
    step_weight: float = option(0.8, "the weight of pass j is this number ** (j - 1)", low=0)
    prompt_share: float = option(0.0, PROMPT_SHARE_HELP, low=0, high=1)


class Eagle3Task(EagleTask):
    """An EAGLE-3 head in training, on data with the `layer_features` of `layer_ids`."""

    kind = "eagle3"

    def new_head(self) -> Eagle3Head:
        return Eagle3Head(HeadConfig.from_dict(self.target_config, bias=False), self.draft_ids.numel())

    @classmethod
    def check_start(cls, init_from: str, target_config: dict, options: Eagle3Options) -> None:
        """Check that training can start from a head; errors as of `Task`."""
        validate_checkpoint(init_from, target_config["hidden_size"], target_config["vocab_size"], cls.kind)

    def _start_from(self, tensors: dict[str, torch.Tensor], data: FeatureSet) -> None:
        if not torch.equal(target_ids(tensors["d2t"]), self.draft_ids):
            raise ValueError(f"the head at {self.init_from} has another draft vocabulary: its LM head cannot be kept")
        super()._start_from(tensors, data)

    def _input_scale(self, data: FeatureSet) -> torch.Tensor:
        if data.layer_features is None:
            raise ValueError(
                "EAGLE-3 reads features of three layers, and the data has none: use `specplug data --eagle3`"
            )
        return column_scale(data.layer_features)

    def _initialise(self, data: FeatureSet) -> None:
        head = self.head
        torch.manual_seed(self.options.seed)
        head.fc.weight.normal_(0, head.fc.in_features**-0.5)
        small_layer(head.midlayer, input_rms=1.0)
        for norm in (head.norm, head.midlayer.hidden_norm, head.midlayer.input_layernorm):
            norm.weight.fill_(1.0)
        head.lm_head.weight.copy_(self.draft_head.float())

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        options = self.options
        # As in the cross-entropy of EAGLE-1/2: a label that the head cannot propose teaches nothing.
        trained = self.rows_to_train(batch, generator) & self.in_draft[batch.label_ids]
        count = max(int(trained.sum()), 1)
        outputs = self.passes(batch, batch.features, options.align_steps)
        own_head = self.scoring_head()
        loss = torch.zeros((), device=self.device)
        for index, output in enumerate(outputs):
            with_past = trained.clone()
            with_past[:, :index] = False
            rows = with_past.flatten().nonzero()[:, 0]
            weights = torch.full((rows.numel(),), options.step_weight**index / count, device=self.device)
            loss = loss + distillation_loss(
                output.flatten(0, 1)[rows],
                batch.target_features.flatten(0, 1)[rows],
                own_head,
                weights,
                target_head=self.draft_head,
            )
        return {"ce": loss}

    def scoring_head(self) -> torch.Tensor:
        """The head's own LM head in `compute_dtype`: [draft_vocab, h]."""
        return self.head.lm_head.weight.to(self.draft_head.dtype)

    def export(self, out_dir: str, facts: dict) -> None:
        """Write the head as a bf16 checkpoint with its LM head; it uses the target's embedding."""
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            AUX_KEY: list(layer_ids(self.target_config)),
        }
        self.save(out_dir, facts, config, {"t2d": self.in_draft})


def load_trained(path: str) -> tuple[Eagle3Head, torch.Tensor]:
    """A checkpoint as a module (float32), and its draft ids int64 [draft_vocab].

    Raises:
        ValueError: it is of a variant that `Eagle3Head` does not compute.
    """
    config, state = load_head(path)
    variants = ("norm_before_residual", "norm_before_fc", "fc_norm", "attention_bias")
    if found := ", ".join(key for key in variants if config.get(key)):
        raise ValueError(f"the head at {path} has {found}: it can be served, but not trained or measured here")
    rows = state["lm_head.weight"].shape[0]
    head = Eagle3Head(HeadConfig.from_dict(config, bias=False), rows, state["fc.weight"].shape[1] // 3)
    head.load_state_dict({name: state[name].float() for name in head.state_dict()})
    return head.eval(), target_ids(state["d2t"]) if "d2t" in state else torch.arange(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train eagle3`."""
    command.add_data_arguments(parser)
    command.add_option_arguments(parser, Eagle3Options())


def run(args: argparse.Namespace) -> int:
    """`specplug train eagle3`."""
    options, layers = command.options_from(args, Eagle3Options), layer_ids(read_target_config(args.target))
    return command.run(args, Eagle3Task, options, layers=layers, attention=args.attention)
