"""`specplug train eagle3`: training-time test, three fused layers, a draft vocabulary, no feature loss (EAGLE-3)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..eagle2.alignment import choose_attention
from ..eagle2.checkpoint import load_head, offsets, save_head, target_ids, validate_checkpoint
from ..eagle2.head import HeadConfig
from ..training import command
from ..training.eagle import base_config
from ..training.evaluate import Acceptance, chain_acceptance
from ..training.features import FeatureSet, read_target_config, target_head
from ..training.initialise import column_scale, small_layer
from ..training.loop import Batch
from ..training.losses import distillation_loss
from ..training.provenance import provenance
from ..training.team import Team
from ..training.trainer import LoopOptions, train
from .head import Eagle3Head, layer_ids


@dataclass(frozen=True)
class Eagle3Options(LoopOptions):
    """What a training run depends on, besides the target and the data."""

    align_steps: int = 7  # passes of the training-time test
    step_weight: float = 0.8  # weight of pass j is step_weight ** (j - 1)
    prompt_share: float = 0.0  # share of the rows inside the prompt that is trained on, drawn anew in each step

    def __post_init__(self):
        super().__post_init__()
        if self.align_steps < 1:
            raise ValueError(f"align_steps must be at least 1, got {self.align_steps}")


def train_eagle3(
    target_dir: str,
    data: FeatureSet,
    out_dir: str,
    draft_ids: torch.Tensor,
    options: Eagle3Options,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    max_steps: int | None = None,
    init_from: str | None = None,
    progress: bool = True,
    eval_every: int = 0,
    team: Team | None = None,
    attention: str = "auto",
) -> Eagle3Head:
    """Train on `data` (with `layer_features` of `layer_ids`) and write the checkpoint to `out_dir`.

    Parameters and errors as of `train_eagle`.
    """
    team = team or Team()
    task = Eagle3Task(target_dir, draft_ids, options, init_from, team.device, attention)
    if data.layer_features is None:
        raise ValueError("EAGLE-3 reads the features of three layers, and the data has none: extract them first")
    train(task, data, out_dir, options, draft_ids, dev, facts, save_every_s, eval_every, max_steps, progress, team)
    return task.head


class Eagle3Task:
    """An EAGLE-3 head in training (`trainer.Task`)."""

    def __init__(
        self,
        target_dir: str,
        draft_ids: torch.Tensor,
        options: Eagle3Options,
        init_from: str | None = None,
        device: torch.device | None = None,
        attention: str = "auto",
    ):
        self.device = device or torch.device("cpu")
        self.target_dir, self.draft_ids, self.options, self.init_from = target_dir, draft_ids, options, init_from
        self.target_config, embedding, lm_head = target_head(target_dir)
        if init_from:
            validate_checkpoint(
                init_from, self.target_config["hidden_size"], self.target_config["vocab_size"], "eagle3"
            )
            if not torch.equal(load_trained(init_from)[1], draft_ids):
                raise ValueError(f"the head at {init_from} has another draft vocabulary: its LM head cannot be kept")
        self.head = Eagle3Head(HeadConfig.from_dict(self.target_config, bias=False), draft_ids.numel())
        self.head.attend = choose_attention(attention, self.device, self.head.config.head_dim)
        self.embedding = embedding.to(self.device)
        self.target_rows = lm_head[draft_ids].to(self.device, torch.bfloat16).contiguous()  # [draft_vocab, h]
        self.in_draft = torch.zeros(lm_head.shape[0], dtype=torch.bool, device=self.device)  # [vocab]
        self.in_draft[draft_ids.to(self.device)] = True

    @torch.no_grad()
    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        head = self.head
        head.input_scale.copy_(column_scale(data.layer_features))
        if not fresh:
            return
        if self.init_from is not None:
            tensors = load_head(self.init_from)[1]
            head.load_state_dict({name: tensors[name].float() for name in head.state_dict()})
            head.fc.weight /= head.input_scale
            return
        torch.manual_seed(self.options.seed)
        head.fc.weight.normal_(0, head.fc.in_features**-0.5)
        small_layer(head.midlayer, input_rms=1.0)
        for norm in (head.norm, head.midlayer.hidden_norm, head.midlayer.input_layernorm):
            norm.weight.fill_(1.0)
        head.lm_head.weight.copy_(self.target_rows.float())

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        options = self.options
        chosen = torch.rand(batch.in_answer.shape, generator=generator).to(self.device) < options.prompt_share
        # as in the cross-entropy of EAGLE-1/2: where the truth cannot be proposed there is nothing to learn
        trained = (batch.in_answer | chosen) & (batch.label_ids >= 0) & self.in_draft[batch.label_ids]
        count = max(int(trained.sum()), 1)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            outputs = self.head.aligned(
                self.embedding[batch.next_ids].to(batch.features.dtype), batch.features, options.align_steps
            )
        own_rows = self.head.lm_head.weight.to(torch.bfloat16)
        loss = torch.zeros((), device=self.device)
        for index, output in enumerate(outputs):
            with_past = trained.clone()
            with_past[:, :index] = False
            rows = with_past.flatten().nonzero()[:, 0]
            weights = torch.full((rows.numel(),), options.step_weight**index / count, device=self.device)
            loss = loss + distillation_loss(
                output.flatten(0, 1)[rows],
                batch.target_features.flatten(0, 1)[rows],
                own_rows,
                weights,
                target_head=self.target_rows,
            )
        return {"ce": loss}

    def measure(self, dev: FeatureSet) -> Acceptance:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            lm_head = self.head.lm_head.weight.detach().to(torch.bfloat16)
            return chain_acceptance(self.head, dev, self.embedding, lm_head, self.draft_ids.to(self.device))

    def export(self, out_dir: str, facts: dict) -> None:
        config = base_config(self.target_config, self.draft_ids.numel(), provenance(self.target_dir, **facts)) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(layer_ids(self.target_config)),
        }
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.head.folded_state().items()}
        if self.draft_ids.numel() < self.target_config["vocab_size"]:
            state |= {"d2t": offsets(self.draft_ids), "t2d": self.in_draft}
        save_head(out_dir, config, state)


def load_trained(path: str) -> tuple[Eagle3Head, torch.Tensor]:
    """A checkpoint as a module (float32), and its draft ids int64 [draft_vocab].

    Raises:
        ValueError: it is of a variant that this module does not compute.
    """
    config, state = load_head(path)
    odd = [key for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "attention_bias") if config.get(key)]
    if odd:
        raise ValueError(f"the head at {path} has {', '.join(odd)}: it can be served, but not trained or measured here")
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
    layers = layer_ids(read_target_config(args.target))
    return command.run(args, command.options_from(args, Eagle3Options), train_eagle3, layers, attention=args.attention)
