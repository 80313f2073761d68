"""`specplug train parallel`: an EAGLE head that drafts all levels in one forward (proposers/eagle2/parallel.py)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ..eagle2.checkpoint import FOLLOW_RANK_KEY, MASK_TOKEN_KEY, read_config
from ..eagle2.head import HeadConfig
from ..eagle2.parallel import ParallelHead
from . import command
from .eagle import EagleOptions, EagleTask
from .features import FeatureSet, end_ids_of
from .initialise import SAMPLE_ROWS
from .options import option


@dataclass(frozen=True)
class ParallelOptions(EagleOptions):
    """Options of a parallel head's training."""

    align_steps: int = option(6, "levels: the root's row and the mask rows behind it", low=2)
    step_weight: float = option(0.8, "the weight of level j is this number ** (j - 1)", low=0)
    distill_weight: float = option(1.0, "weight of the harmonised loss", low=0)
    rank: int = option(256, "width of the network that reads the token above (0: there is none)", low=0)


class ParallelTask(EagleTask):
    """A parallel EAGLE head in training; it can start from an EAGLE head or from a parallel one."""

    options: ParallelOptions

    @property
    def mask_token_id(self) -> int:
        """The token whose embedding the mask rows read."""
        return _mask_token(self.target_config)

    def new_head(self) -> ParallelHead:
        config = HeadConfig.from_dict(self.target_config, bias=self.options.bias)
        return ParallelHead(config, self.embedding[self.mask_token_id], self.options.rank)

    @classmethod
    def check_start(cls, init_from: str, target_config: dict, options: ParallelOptions) -> None:
        """Check that training can start from an EAGLE head or a parallel one; errors as of `Task`."""
        super().check_start(init_from, target_config, options)
        config = read_config(Path(init_from))
        own, found = (
            (_mask_token(target_config), options.rank),
            (config.get(MASK_TOKEN_KEY), config.get(FOLLOW_RANK_KEY)),
        )
        if MASK_TOKEN_KEY in config and found != own:
            raise ValueError(
                f"the parallel head at {init_from} has mask token {found[0]} and rank {found[1]}, not {own[0]} "
                f"and {own[1]}: train with --rank {found[1]} and its own target, or start from an EAGLE head"
            )

    def _initialise(self, data: FeatureSet) -> None:
        super()._initialise(data)
        self._initialise_mask_rows(data)

    def _start_from(self, tensors: dict[str, torch.Tensor], data: FeatureSet) -> None:
        self._initialise_mask_rows(data)  # an EAGLE head has none
        super()._start_from(self.head.folded_state() | tensors, data)

    def _initialise_mask_rows(self, data: FeatureSet) -> None:
        """The mean feature, and a network that changes nothing yet."""
        head, hidden = self.head, self.head.config.hidden_size
        torch.manual_seed(self.options.seed)
        head.mask_hidden.copy_(data.features[:SAMPLE_ROWS].float().mean(0) * head.input_scale[hidden:])
        if head.follow is not None:
            head.follow.down.weight.normal_(0, (2 * hidden) ** -0.5)
            head.follow.up.weight.zero_()

    def export(self, out_dir: str, facts: dict) -> None:
        """As for EAGLE, with `mask_hidden`, `follow` and the id of the mask token (P-EAGLE's `ptd_token_id`)."""
        config = {"bias": self.head.config.bias, MASK_TOKEN_KEY: self.mask_token_id}
        self.save(out_dir, facts, config | {FOLLOW_RANK_KEY: self.options.rank})


def _mask_token(target_config: dict) -> int:
    """The target's first end token, or 0 if it has none."""
    return (end_ids_of(target_config) or [0])[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train parallel`."""
    command.add_data_arguments(parser)
    command.add_option_arguments(parser, ParallelOptions())


def run(args: argparse.Namespace) -> int:
    """`specplug train parallel`."""
    return command.run(args, ParallelTask, command.options_from(args, ParallelOptions), attention=args.attention)
