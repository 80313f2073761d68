"""Arguments that several commands have, and their checks: one name, help and range everywhere."""

from __future__ import annotations

import argparse

DTYPES = ("bfloat16", "float16", "float32")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--target`` and ``--dtype``."""
    parser.add_argument("--target", metavar="DIR", help="folder of the model (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--dtype", default=DTYPES[0], choices=DTYPES, help="number format of the weights (default: %(default)s)"
    )


def add_max_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    """Add ``--max-tokens``."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=default,
        metavar="N",
        help="largest number of tokens of an answer (default: %(default)s)",
    )


def add_kv_gib(parser: argparse.ArgumentParser) -> None:
    """Add ``--kv-gib``."""
    parser.add_argument(
        "--kv-gib", type=int, default=1, metavar="G", help="size of an engine's KV cache in GiB (default: %(default)s)"
    )


def check_at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raise ``ValueError`` for a given argument that is below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
