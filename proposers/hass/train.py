"""`specplug train hass`: the EAGLE trainer with context alignment and the harmonised objective (HASS, section 3)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from ..training import command
from ..training.eagle import EagleOptions, EagleTask
from ..training.options import option


@dataclass(frozen=True)
class HassTrainOptions(EagleOptions):
    """Options of a HASS head's training: the paper's alignment and objective, a schedule that suits small data."""

    align_steps: int = option(3, "passes of HASS's context alignment (1: EAGLE)", low=1)
    distill_weight: float = option(1.0, "weight of --distill-loss", low=0)


def published_schedule(options: HassTrainOptions) -> tuple[HassTrainOptions, HassTrainOptions]:
    """The two phases of the published training: alignment first, then the harmonised objective at a lower rate.

    Both keep the alignment, the objective, the vocabulary, the batches and the seed of `options`.
    """
    common = replace(
        options,
        schedule="linear",
        warmup=0.01,
        weight_decay=0.01,
        clip=0.0,
        clip_value=0.5,
        feature_weight=1.0,
        ce_weight=0.1,
        prompt_share=0.0,
        noise=0.2,
        noise_length=512,
    )
    return (
        replace(common, epochs=40, lr=3e-5, distill_weight=0.0),
        replace(common, epochs=10, lr=1e-5, distill_weight=options.distill_weight or 1.0),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train hass`."""
    command.add_data_arguments(parser)
    parser.add_argument(
        "--preset",
        choices=["published"],
        help="the paper's schedule: 40 epochs without the harmonised objective, then 10 with it; sets learning rates, "
        "clipping and noise",
    )
    command.add_option_arguments(parser, HassTrainOptions())


def run(args: argparse.Namespace) -> int:
    """`specplug train hass`."""
    options = command.options_from(args, HassTrainOptions)
    phases = published_schedule(options) if args.preset == "published" else (options,)
    return command.run(args, EagleTask, *phases, attention=args.attention)
