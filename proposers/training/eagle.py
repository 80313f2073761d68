"""EAGLE-1/2 heads: `specplug train eagle`, and the code that HASS (proposers/hass) and EAGLE-3 share with it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..eagle2.alignment import choose_attention
from ..eagle2.checkpoint import (
    load_head,
    offsets,
    save_head,
    target_ids,
    validate_checkpoint,
)
from ..eagle2.head import EagleHead, HeadConfig
from ..eagle2.rotary import rope_of
from ..hass.losses import LOSSES
from . import command
from .evaluate import Acceptance, chain_acceptance
from .features import FeatureSet
from .initialise import initialise, input_scale
from .loop import Batch
from .losses import distillation_loss, feature_loss
from .options import option
from .precision import autocast, compute_dtype
from .provenance import provenance
from .trainer import LoopOptions, Task

PROMPT_SHARE_HELP = "share of the prompt tokens that are trained on too, drawn anew in each step"


@dataclass(frozen=True)
class EagleOptions(LoopOptions):
    """Options of an EAGLE-1/2 or HASS head's training."""

    align_steps: int = option(1, "passes of HASS's context alignment (1: EAGLE)", low=1)
    align_from: float = option(0.0, "share of the steps, at the start, with one pass only", low=0, high=1)
    step_weight: float = option(1.0, "the weight of pass j is this number ** (j - 1), beta in the paper", low=0)
    feature_weight: float = option(1.0, "weight of the loss of the hidden states", low=0)
    ce_weight: float = option(0.1, "weight of the cross-entropy", low=0)
    topk: int = option(10, "K of the loss topk", low=1)
    distill_loss: str = option("topk", f"loss that is added: {', '.join(LOSSES)}")
    distill_weight: float = option(0.0, "weight of --distill-loss", low=0)
    prompt_share: float = option(0.0, PROMPT_SHARE_HELP, low=0, high=1)
    noise: float = option(0.2, "width of the uniform noise that is added to the input hidden states", low=0)
    noise_length: int = option(
        0,
        "rows at which the noise is as wide as --noise; fewer rows get more noise; 0: always --noise",
        low=0,
    )
    bias: bool = option(False, "give the first layer (fc) a bias")

    def __post_init__(self):
        super().__post_init__()
        if self.distill_loss not in LOSSES:
            raise ValueError(f"--distill-loss {self.distill_loss!r} is unknown: choose one of {', '.join(LOSSES)}")
        if self.distill_weight and not self.ce_weight:
            raise ValueError(
                "--distill-weight needs a --ce-weight above 0: the added loss is computed with the cross-entropy"
            )


class EagleTask(Task):
    """An EAGLE-1/2 or HASS head in training; `attention` as in `choose_attention`."""

    kind = "eagle"  # as in `validate_checkpoint`

    def __init__(
        self,
        target_dir: str,
        draft_ids: torch.Tensor,
        options: LoopOptions,
        init_from: str | None = None,
        device: torch.device | None = None,
        attention: str = "auto",
    ):
        super().__init__(target_dir, draft_ids, options, init_from, device)
        self.embedding = self.embedding.to(self.device)
        self.draft_head = self.draft_head.to(compute_dtype(self.device))
        self.head.attend = choose_attention(attention, self.device, self.head.config.head_dim)

    def new_head(self) -> EagleHead:
        return EagleHead(HeadConfig.from_dict(self.target_config, bias=self.options.bias))

    @classmethod
    def check_start(cls, init_from: str, target_config: dict, options: EagleOptions) -> None:
        """Check that training can start from a head; errors as of `Task`."""
        info = validate_checkpoint(init_from, target_config["hidden_size"], target_config["vocab_size"], cls.kind)
        if info.has_bias != options.bias:
            raise ValueError(
                f"the head at {init_from} has {'a' if info.has_bias else 'no'} fc.bias: train "
                f"{'with' if info.has_bias else 'without'} --bias to start from it"
            )

    @torch.no_grad()
    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        self.head.input_scale.copy_(self._input_scale(data))
        if fresh and self.init_from is None:
            self._initialise(data)
        elif fresh:
            self._start_from(load_head(self.init_from)[1], data)

    def _start_from(self, tensors: dict[str, torch.Tensor], data: FeatureSet) -> None:
        self.head.load_state_dict({name: tensors[name].float() for name in self.head.state_dict()})
        self.head.unfold()

    def _input_scale(self, data: FeatureSet) -> torch.Tensor:
        return input_scale(data, self.embedding.cpu())

    def _initialise(self, data: FeatureSet) -> None:
        initialise(self.head, data, self.embedding.cpu(), self.options.seed)

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The feature loss and the cross-entropy, summed over alignment passes, averaged over the weighted rows."""
        options, device = self.options, self.device
        passes = options.align_steps if step >= options.align_from * steps else 1
        rows = self.rows_to_train(batch, generator).flatten().nonzero()[:, 0]
        weights = torch.full((rows.numel(),), 1 / max(rows.numel(), 1), device=device)
        # The head cannot propose a token outside the draft vocabulary: no cross-entropy there, only the feature loss.
        ce_weights = weights * self.in_draft[batch.label_ids.flatten()[rows]]
        width = options.noise
        if options.noise_length:
            width *= options.noise_length / batch.features.shape[1]
        noise = (torch.rand(batch.features.shape, generator=generator) - 0.5) * width
        inputs = batch.features + noise.to(device, batch.features.dtype)
        targets = batch.target_features.flatten(0, 1)[rows]
        outputs = self.passes(batch, inputs, passes)
        # The added loss shares the cross-entropy's chunks, so its weight is relative to the cross-entropy's.
        share = options.distill_weight / options.ce_weight if options.distill_weight else 0.0
        harmonised = None if options.distill_loss == "topk" else LOSSES[options.distill_loss]  # top-K is fused
        topk = min(options.topk, self.draft_head.shape[0])
        feature, ce = torch.zeros((), device=device), torch.zeros((), device=device)
        for index, output in enumerate(outputs):
            predicted = output.flatten(0, 1)[rows]
            scale = options.step_weight**index
            feature = feature + scale * feature_loss(predicted, targets, weights)
            ce = ce + scale * distillation_loss(
                predicted, targets, self.draft_head, ce_weights, topk, share, harmonised
            )
        return {"feature": options.feature_weight * feature, "ce": options.ce_weight * ce}

    def rows_to_train(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """bool [B, T]: the rows whose label is in the answer, and `prompt_share` of those whose label is before it."""
        drawn = torch.rand(batch.in_answer.shape, generator=generator).to(self.device) < self.options.prompt_share
        return (batch.in_answer | drawn) & (batch.label_ids >= 0)

    def passes(self, batch: Batch, inputs: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The head's outputs [B, T, h] of `count` passes over `inputs`, the batch's features."""
        with autocast(self.device):
            return self.head.aligned(self.embedding[batch.next_ids].to(inputs.dtype), inputs, count)

    def measure(self, dev: FeatureSet) -> Acceptance:
        with autocast(self.device):
            lm_head, ids = self.scoring_head(), self.draft_ids.to(self.device)
            return chain_acceptance(self.head, dev, self.embedding, lm_head, ids)

    def scoring_head(self) -> torch.Tensor:
        """The LM head that drafts are scored with, in `compute_dtype`: [draft_vocab, h]."""
        return self.draft_head

    def export(self, out_dir: str, facts: dict) -> None:
        """Write the head as a bf16 checkpoint without embedding and LM head: it uses the target's."""
        self.save(out_dir, facts, {"bias": self.head.config.bias})

    def save(self, out_dir: str, facts: dict, more_config: dict, more_tensors: dict | None = None) -> None:
        """Write a checkpoint in the plain layout; see `checkpoint`."""
        save_head(out_dir, *self.checkpoint(facts, more_config, more_tensors))

    def checkpoint(self, facts: dict, more_config: dict, more_tensors: dict | None = None) -> tuple[dict, dict]:
        """The config (one Llama layer of the target's geometry, `more_config`, provenance), and the tensors.

        more_tensors: written beside `d2t` where the draft vocabulary is reduced.
        """
        config, draft_vocab_size = self.target_config, self.draft_ids.numel()
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        keys += ("head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "vocab_size")
        keys += ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        has_rope = config.get("rope_parameters") or config.get("rope_scaling")  # else vLLM reads `rope_theta`
        plain = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: config[key] for key in keys if key in config},
            **({"rope_parameters": rope_of(config)} if has_rope else {}),
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "draft_vocab_size": draft_vocab_size,
            "torch_dtype": "bfloat16",
            "specplug": provenance(self.target_dir, **facts),
        }
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.head.folded_state().items()}
        if draft_vocab_size < config["vocab_size"]:
            state |= {"d2t": offsets(self.draft_ids), **(more_tensors or {})}
        return plain | more_config, state


def load_trained(path: str) -> tuple[EagleHead, torch.Tensor]:
    """An exported head as a module (float32), and its draft ids int64 [draft_vocab]."""
    config, state = load_head(path)
    head = EagleHead(HeadConfig.from_dict(config, bias="fc.bias" in state))
    ids = target_ids(state["d2t"]) if "d2t" in state else torch.arange(config["vocab_size"])
    head.load_state_dict({name: state[name].float() for name in head.state_dict()})
    return head.eval(), ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train eagle`."""
    command.add_data_arguments(parser)
    command.add_option_arguments(parser, EagleOptions())


def run(args: argparse.Namespace) -> int:
    """`specplug train eagle`."""
    return command.run(args, EagleTask, command.options_from(args, EagleOptions), attention=args.attention)
