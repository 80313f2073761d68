"""`specplug train peagle`: a head that predicts all positions in one forward, trained on all of them at once (P-EAGLE).

Data, loss and LM head are those of EAGLE-3. The checkpoint has the speculators format, of which vLLM drafts chains too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ..eagle2.checkpoint import load_head, read_config, save_head, target_ids, validate_parallel
from ..eagle2.head import HeadConfig
from ..eagle2.kinds import SPECULATORS_KEY
from ..eagle2.layout import AUX_KEY
from ..eagle3.head import layer_ids
from ..eagle3.train import Eagle3Options, Eagle3Task
from ..training import command
from ..training.features import FeatureSet, read_target_config
from ..training.initialise import SAMPLE_ROWS, column_scale, ridge_solution, small_layer
from ..training.options import option
from .checkpoint import POSITIONS_KEY
from .peagle import PEagleHead


@dataclass(frozen=True)
class PEagleOptions(Eagle3Options):
    """Options of a P-EAGLE head's training."""

    align_steps: int = option(6, "positions that one forward predicts", low=1)
    num_layers: int = option(2, "decoder layers", low=1)


class PEagleTask(Eagle3Task):
    """A P-EAGLE head in training, on data as for EAGLE-3."""

    @property
    def mask_token(self) -> int:
        """The target's padding token, else its end token: the hidden state beside it tells the mask from the token."""
        given = [self.target_config.get(key) for key in ("pad_token_id", "eos_token_id")]
        return next((one for one in given if isinstance(one, int) and one >= 0), 0)

    def new_head(self) -> PEagleHead:
        config = HeadConfig.from_dict(self.target_config, bias=False)
        return PEagleHead(config, self.draft_ids.numel(), self.options.num_layers)

    @classmethod
    def check_start(cls, init_from: str, target_config: dict, options: PEagleOptions) -> None:
        """Check that training can start from a head; errors as of `Task`."""
        sizes = (target_config[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
        info = validate_parallel(Path(init_from), *sizes)
        if info.num_layers != options.num_layers:
            raise ValueError(
                f"the head at {init_from} has {info.num_layers} layers: train with --num-layers {info.num_layers}"
            )

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        super().prepare(data, fresh)
        self.head.mask_embedding.copy_(self.embedding[self.mask_token])

    def _initialise(self, data: FeatureSet) -> None:
        """Let the head start as the linear predictor of the next feature, and the mask as the mean of the features."""
        super()._initialise(data)
        head, scale = self.head, column_scale(data.features)
        weight = ridge_solution(data, lambda rows: data.layer_features[rows].float(), self.options.seed)
        head.fc.weight.copy_(weight * scale[:, None] / head.input_scale)  # features of equal scale
        sample = data.layer_features[: SAMPLE_ROWS // 10].float()
        # The norm gives the columns their scales, times the explained share: bad predictions must not be confident.
        head.norm.weight.copy_(head.fuse(sample).square().mean() / scale)
        head.mask_hidden.copy_(sample.mean(0))
        for layer in head.layers.values():
            small_layer(layer, input_rms=1.0)
            layer.input_layernorm.weight.fill_(1.0)

    def export(self, out_dir: str, facts: dict) -> None:
        """Write the head in bf16 with its LM head, in the speculators format; it uses the target's embedding."""
        layers = {"num_hidden_layers": self.options.num_layers}
        config, state = self.checkpoint(facts, layers | {"tie_word_embeddings": False}, {"t2d": self.in_draft})
        methods = [{"proposal_type": "greedy", "speculative_tokens": self.options.align_steps}]
        target = {"name_or_path": Path(self.target_dir).name, "architectures": self.target_config.get("architectures")}
        config = {
            "architectures": ["PEagleSpeculator"],
            SPECULATORS_KEY: "peagle",
            "speculators_config": {"algorithm": "peagle", "proposal_methods": methods, "verifier": target},
            "mask_token_id": self.mask_token,
            POSITIONS_KEY: self.options.align_steps,
            "draft_vocab_size": config.pop("draft_vocab_size"),
            "target_hidden_size": config["hidden_size"],
            AUX_KEY: list(layer_ids(self.target_config)),
            "norm_before_residual": False,
            "specplug": config.pop("specplug"),
            "transformer_layer_config": config,
        }
        save_head(out_dir, config, {name.replace("midlayer.", "layers.0."): one for name, one in state.items()})


def load_trained(path: str, embedding: torch.Tensor) -> tuple[PEagleHead, torch.Tensor]:
    """A checkpoint of `export` as a module (float32), and its draft ids int64 [draft_vocab].

    embedding: the target's, [vocab, h].
    """
    config, state = load_head(path)
    rows = state["lm_head.weight"].shape[0]
    head = PEagleHead(HeadConfig.from_dict(config, bias=False), rows, config["num_hidden_layers"])
    head.load_state_dict({name: state[name].float() for name in head.state_dict()})
    head.mask_embedding.copy_(embedding[read_config(Path(path))["mask_token_id"]])
    return head.eval(), target_ids(state["d2t"]) if "d2t" in state else torch.arange(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train peagle`."""
    command.add_data_arguments(parser, method="dflash_tree")
    command.add_option_arguments(parser, PEagleOptions())


def run(args: argparse.Namespace) -> int:
    """`specplug train peagle`."""
    options, layers = command.options_from(args, PEagleOptions), layer_ids(read_target_config(args.target))
    return command.run(args, PEagleTask, options, layers=layers, attention=args.attention)
