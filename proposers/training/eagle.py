"""EAGLE-1/2 heads: `specplug train eagle`, and what HASS (proposers/hass) shares with it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ..eagle2.alignment import choose_attention
from ..eagle2.checkpoint import load_head, offsets, save_head, target_ids, validate_checkpoint
from ..eagle2.head import EagleHead, HeadConfig
from ..hass.losses import LOSSES
from . import command
from .evaluate import Acceptance, chain_acceptance
from .features import FeatureSet, target_head
from .initialise import initialise, input_scale
from .loop import Batch
from .losses import distillation_loss, feature_loss
from .provenance import provenance
from .team import Team
from .trainer import LoopOptions, train


@dataclass(frozen=True)
class EagleOptions(LoopOptions):
    """What a training run depends on, besides the target and the data."""

    align_steps: int = 1  # HASS context alignment; 1 is EAGLE
    align_from: float = 0.0  # share of the steps made with align_steps 1 first
    step_weight: float = 1.0  # beta: the weight of alignment step j is beta ** (j - 1)
    feature_weight: float = 1.0
    ce_weight: float = 0.1
    topk: int = 10  # K of the harmonised loss
    topk_weight: float = 0.0  # distill_weight by its older name
    distill_loss: str = "topk"  # HASS's harmonised objective, one of proposers/hass/losses.py
    distill_weight: float = 0.0
    prompt_share: float = 0.0  # share of the rows inside the prompt that is trained on, drawn anew in each step
    noise: float = 0.2  # width of the uniform noise on the input features
    noise_length: int = 0  # where given, the width is noise * noise_length / rows of the batch
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.align_steps < 1:
            raise ValueError(f"align_steps must be at least 1 (1 is EAGLE), got {self.align_steps}")
        if self.distill_loss not in LOSSES:
            raise ValueError(f"distill_loss {self.distill_loss!r} is unknown: choose one of {', '.join(LOSSES)}")
        if self.topk_weight and self.distill_weight:
            raise ValueError("topk_weight is distill_weight by its older name: give only distill_weight")
        if self.harmony and not self.ce_weight:
            raise ValueError("topk_weight needs ce_weight > 0: the harmonised term is computed with the cross-entropy")

    @property
    def harmony(self) -> float:
        """Weight of the harmonised loss."""
        return self.distill_weight or self.topk_weight


def train_eagle(
    target_dir: str,
    data: FeatureSet,
    out_dir: str,
    draft_ids: torch.Tensor,
    options: EagleOptions,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    max_steps: int | None = None,
    init_from: str | None = None,
    progress: bool = True,
    eval_every: int = 0,
    team: Team | None = None,
    attention: str = "auto",
) -> EagleHead:
    """Train on `data` and write the checkpoint to `out_dir`; `max_steps` stops early, leaving the state to resume.

    draft_ids: int64 [draft_vocab], the target ids the head can propose, ascending. init_from: a checkpoint of the
    same shape to start from. eval_every, team, attention: as in `trainer.train`, `team.join`, `choose_attention`.

    Raises:
        ValueError: features or checkpoint of another target, or a training state of other settings in `out_dir`.
        OSError: a file could not be written.
    """
    team = team or Team()
    task = EagleTask(target_dir, draft_ids, options, init_from, team.device, attention)
    train(task, data, out_dir, options, draft_ids, dev, facts, save_every_s, eval_every, max_steps, progress, team)
    return task.head


class EagleTask:
    """An EAGLE-1/2 or HASS head in training (`trainer.Task`)."""

    def __init__(
        self,
        target_dir: str,
        draft_ids: torch.Tensor,
        options: EagleOptions,
        init_from: str | None = None,
        device: torch.device | None = None,
        attention: str = "auto",
    ):
        device = device or torch.device("cpu")
        self.target_dir, self.draft_ids, self.options, self.init_from = target_dir, draft_ids, options, init_from
        self.target_config, self.embedding, lm_head = target_head(target_dir)
        if init_from:
            self._check_start()
        self.head = EagleHead(HeadConfig.from_dict(self.target_config, bias=options.bias))
        self.head.attend = choose_attention(attention, device, self.head.config.head_dim)
        self.objective = Objective(self.embedding.to(device), lm_head.to(device), draft_ids.to(device), options)

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        self.head.input_scale.copy_(input_scale(data, self.embedding))
        if not fresh:
            return
        if self.init_from is None:
            initialise(self.head, data, self.embedding, self.options.seed)
            return
        tensors = load_head(self.init_from)[1]
        self.head.load_state_dict({name: tensors[name].float() for name in self.head.state_dict()})
        self.head.fc.weight.data /= self.head.input_scale

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        aligned = step >= self.options.align_from * steps
        return self.objective.losses(self.head, batch, self.options.align_steps if aligned else 1, generator)

    def measure(self, dev: FeatureSet) -> Acceptance:
        objective = self.objective
        with torch.autocast(objective.embedding.device.type, dtype=torch.bfloat16):
            return chain_acceptance(self.head, dev, objective.embedding, objective.draft_head, objective.draft_ids)

    def export(self, out_dir: str, facts: dict) -> None:
        export(self.head, self.target_config, self.draft_ids, out_dir, provenance(self.target_dir, **facts))

    def _check_start(self) -> None:
        config = self.target_config
        info = validate_checkpoint(self.init_from, config["hidden_size"], config["vocab_size"], "eagle")
        if info.has_bias != self.options.bias:
            raise ValueError(
                f"the head at {self.init_from} has {'a' if info.has_bias else 'no'} fc.bias: train "
                f"{'with' if info.has_bias else 'without'} --bias to start from it"
            )


class Objective:
    """The loss of a batch: everything about it that stays the same over a run; all tensors on one device."""

    def __init__(self, embedding: torch.Tensor, lm_head: torch.Tensor, draft_ids: torch.Tensor, options: EagleOptions):
        self.embedding = embedding
        self.draft_ids = draft_ids
        self.draft_head = lm_head[draft_ids].to(torch.bfloat16).contiguous()  # [draft_vocab, h]
        self.in_draft = torch.zeros(lm_head.shape[0], dtype=torch.bool, device=lm_head.device)  # [vocab]
        self.in_draft[draft_ids] = True
        self.options = options

    def losses(self, head: EagleHead, batch: Batch, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The named terms, summed over alignment steps, averaged over the weighted rows."""
        options, device = self.options, self.embedding.device
        chosen = torch.rand(batch.in_answer.shape, generator=generator).to(device) < options.prompt_share
        rows = ((batch.in_answer | chosen) & (batch.label_ids >= 0)).flatten().nonzero()[:, 0]
        weights = torch.full((rows.numel(),), 1 / max(rows.numel(), 1), device=device)
        # a token outside the draft vocabulary cannot be proposed: no cross-entropy there, only the feature
        ce_weights = weights * self.in_draft[batch.label_ids.flatten()[rows]]
        width = options.noise
        if options.noise_length:
            width *= options.noise_length / batch.features.shape[1]
        noise = (torch.rand(batch.features.shape, generator=generator) - 0.5) * width
        inputs = batch.features + noise.to(device, batch.features.dtype)
        targets = batch.target_features.flatten(0, 1)[rows]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            outputs = head.aligned(self.embedding[batch.next_ids].to(inputs.dtype), inputs, steps)
        # the harmonised term has its weight relative to the cross-entropy, whose chunks it shares
        share = options.harmony / options.ce_weight if options.harmony else 0.0
        harmonised = None if options.distill_loss == "topk" else LOSSES[options.distill_loss]  # top-K is fused
        topk = min(options.topk, self.draft_head.shape[0])
        feature, ce = torch.zeros((), device=device), torch.zeros((), device=device)
        for step, output in enumerate(outputs):
            predicted = output.flatten(0, 1)[rows]
            scale = options.step_weight**step
            feature = feature + scale * feature_loss(predicted, targets, weights)
            ce = ce + scale * distillation_loss(
                predicted, targets, self.draft_head, ce_weights, topk, share, harmonised
            )
        return {"feature": options.feature_weight * feature, "ce": options.ce_weight * ce}


def export(head: EagleHead, target_config: dict, draft_ids: torch.Tensor, out_dir: str, source: dict) -> None:
    """Write the head as a bf16 checkpoint without embedding and LM head: the target's are shared."""
    config = base_config(target_config, draft_ids.numel(), source) | {"bias": head.config.bias}
    state = {name: tensor.to(torch.bfloat16) for name, tensor in head.folded_state().items()}
    if draft_ids.numel() < target_config["vocab_size"]:
        state["d2t"] = offsets(draft_ids)
    save_head(out_dir, config, state)


def base_config(target_config: dict, draft_vocab_size: int, source: dict) -> dict:
    """The config of any head of ours: one Llama layer with the target's geometry, and where it comes from."""
    keys = ("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters", "vocab_size")
    keys += ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: target_config[key] for key in keys if key in target_config},
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "torch_dtype": "bfloat16",
        "specplug": source,
    }


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
    """All steps, for the command line: prompts -> answers -> features -> training -> checkpoint."""
    return run_with(args, command.options_from(args, EagleOptions))


def run_with(args: argparse.Namespace, *phases: EagleOptions) -> int:
    """Train in phases, each from the last one's checkpoint; the last one's goes to --out itself."""
    with command.training(args, phases[0]) as (team, material):
        init_from = args.init_from
        for number, options in enumerate(phases, start=1):
            last = number == len(phases)
            train_eagle(
                args.target,
                material.data,
                str(args.out if last else Path(args.out) / f"phase{number}"),
                material.draft_ids,
                options,
                material.dev,
                material.facts,
                init_from=init_from,
                eval_every=args.eval_every,
                team=team,
                attention=args.attention,
            )
            init_from = str(Path(args.out) / f"phase{number}")
    return 0
