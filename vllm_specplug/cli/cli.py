"""The console command ``specplug``.

A command is a module with ``add_arguments(parser)`` and ``run(args)``, imported only when the command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

from vllm_specplug import __doc__ as _summary
from vllm_specplug.utils.environment import version_of
from vllm_specplug.utils.lazy import load


@dataclass(frozen=True)
class Command:
    """One command: its words, one line of help, the module that runs it, and its heading in --help."""

    words: tuple[str, ...]
    help: str
    module: str
    heading: str


_TRAINING = "vllm_specplug.proposers.training"

_SERVE, _MEASURE, _TRAIN, _FILES = "serve", "measure", "train", "models and checkpoints"

COMMANDS = (
    Command(
        ("demo",),
        "serve SmolLM2 plainly and with EAGLE-2, and compare speed and answers",
        "vllm_specplug.cli.demo",
        _SERVE,
    ),
    Command(
        ("doctor",),
        "say whether the plugin works here, and print a command that starts a server",
        "vllm_specplug.cli.doctor",
        _SERVE,
    ),
    Command(("top",), "show tau, acceptance and times of a running server", "vllm_specplug.cli.top", _SERVE),
    Command(
        ("bench",),
        "measure tokens per second of methods on a file of questions",
        "vllm_specplug.bench.command",
        _MEASURE,
    ),
    Command(
        ("calibrate", "medusa"),
        "measure the accuracy of Medusa heads, and make the best tree for them",
        "vllm_specplug.proposers.medusa.calibrate",
        _MEASURE,
    ),
    Command(("data",), "make training data: the target's answers and its hidden states", f"{_TRAINING}.data", _TRAIN),
    Command(
        ("train", "hass"), "train an EAGLE head with HASS (start here)", "vllm_specplug.proposers.hass.train", _TRAIN
    ),
    Command(("train", "eagle"), "train an EAGLE head", f"{_TRAINING}.eagle", _TRAIN),
    Command(("train", "eagle3"), "train an EAGLE-3 head", "vllm_specplug.proposers.eagle3.train", _TRAIN),
    Command(
        ("train", "peagle"),
        "train a P-EAGLE head, which drafts all positions in one forward",
        "vllm_specplug.proposers.dflash.train",
        _TRAIN,
    ),
    Command(("train", "medusa"), "train Medusa heads", "vllm_specplug.proposers.medusa.train", _TRAIN),
    Command(("learn",), "train a drafter again and again on what a server records", f"{_TRAINING}.learn", _TRAIN),
    Command(
        ("drafter", "new"),
        "make an untrained drafter for a target, from which `specplug learn` starts",
        f"{_TRAINING}.new_drafter",
        _TRAIN,
    ),
    Command(
        ("inspect",),
        "show what a drafter is, and check whether it fits a target",
        "vllm_specplug.cli.inspection",
        _FILES,
    ),
    Command(
        ("convert",),
        "convert an EAGLE-3 head from the speculators format to the layout that this plugin and vLLM load",
        "vllm_specplug.proposers.eagle3.speculators",
        _FILES,
    ),
    Command(("smollm2",), "write SmolLM2-135M-Instruct as a Hugging Face folder", "vllm_specplug.cli.cli", _FILES),
)
_GROUPS = {
    "train": "train a drafter",
    "drafter": "make a drafter",
    "calibrate": "measure the accuracy of a drafter",
}

#: Errors of usage or of the machine: one line, exit code 2.  Any other error is a defect of this package: exit code 1.
EXPECTED_ERRORS = (ValueError, OSError, RuntimeError, ImportError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug smollm2``."""
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: in the user's cache)")


def run(args: argparse.Namespace) -> None:
    """Run ``specplug smollm2``: print the directory."""
    from vllm_specplug.utils.smollm2 import prepare

    print(prepare(args.out))


def _overview() -> str:
    """Return the commands under their headings."""
    width = max(len(" ".join(command.words)) for command in COMMANDS)
    lines = []
    for heading in (_SERVE, _MEASURE, _TRAIN, _FILES):
        lines.append(f"{heading}:")
        rows = ((" ".join(one.words), one.help) for one in COMMANDS if one.heading == heading)
        lines += [f"  {words.ljust(width)}  {text}" for words, text in rows]
        lines.append("")
    return "\n".join([*lines, "specplug COMMAND --help shows the options of a command."])


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    """Build the parser; only the command that ``argv`` names gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="specplug",
        usage="specplug COMMAND [OPTIONS]",
        description=f"{_summary}\n\n{_overview()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-specplug {version_of('vllm-specplug')}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="specplug", help=argparse.SUPPRESS)
    parsers: dict[tuple[str, ...], argparse._SubParsersAction[argparse.ArgumentParser]] = {(): commands}
    words_given = tuple(word for word in argv if not word.startswith("-"))
    for command in COMMANDS:
        group = command.words[:-1]
        if group not in parsers:
            node = parsers[()].add_parser(group[0], help=_GROUPS[group[0]], description=_GROUPS[group[0]])
            parsers[group] = node.add_subparsers(metavar="COMMAND", required=True)
        leaf = parsers[group].add_parser(command.words[-1], help=command.help, description=command.help)
        leaf.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if words_given[: len(command.words)] == command.words:
            module = load(command.module)
            module.add_arguments(leaf)
            leaf.set_defaults(run=module.run)
    return parser


def _complete(words: list[str]) -> int:
    """Write the completions of a command line; return only if argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return 1
    argcomplete.autocomplete(build_parser(words))
    return 0


def _describe(error: Exception) -> str:
    """Return an error's message; without the number that Python puts before one of the system."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 or the command's own exit code; 2 for an error of usage or of the machine; 1 for a defect; 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions, and runs no command
        return _complete(os.environ.get("COMP_LINE", "").split()[1:])
    try:
        args = build_parser(argv).parse_args(argv)
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `specplug doctor | head`: nobody reads any further
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # every error is shown as one line
        if "--traceback" in argv:
            raise
        expected = isinstance(error, EXPECTED_ERRORS)
        text = _describe(error) if expected and str(error) else f"{type(error).__name__}: {error}"
        print(f"specplug: error: {text}", file=sys.stderr)
        if not expected:
            print("specplug: this is a defect of vllm-specplug; --traceback shows where", file=sys.stderr)
        return 2 if expected else 1


if __name__ == "__main__":
    sys.exit(main())
