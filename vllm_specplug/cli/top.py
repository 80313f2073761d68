"""``specplug top``: show a live table of a server's speculation counters, read from its ``/metrics``."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import nullcontext
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

_VLLM = "vllm:spec_decode_num_"


class NoSpeculation(ValueError):
    """The server runs without speculation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug top``."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="seconds between updates (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print the totals since the server's start and exit")


def run(args: argparse.Namespace) -> None:
    """Run ``specplug top``: show the table until interrupted; rates are those of the last interval.

    Outside a terminal it prints the table once per interval.
    """
    if args.interval <= 0:
        raise ValueError("--interval must be above 0")
    before = read(args.url)
    if args.once:
        Console().print(table(before))
        return
    console = Console()
    with Live(table(before), auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            time.sleep(args.interval)
            now = read(args.url)
            shown = table(since(before, now))
            if live is None:  # in a file or a pipe: one table after the other
                console.print(time.strftime("%H:%M:%S"), shown)
                sys.stdout.flush()
            else:
                live.update(shown, refresh=True)
            before = now


def read(url: str) -> dict[str, float]:
    """Read the speculation counters of a server, summed over its engines; see ``counters_of``."""
    address = f"{url if '://' in url else f'http://{url}'}".rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return counters_of(response.read().decode())
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, NoSpeculation):
            raise
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{address} cannot be read ({getattr(reason, 'strerror', None) or reason}): give the URL of a running vLLM "
            "server, for example http://127.0.0.1:8000"
        ) from None


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the differences of counters; those of versions of the drafter stay totals, to compare them."""
    return {key: value if key.startswith("drafter") else value - before.get(key, 0.0) for key, value in now.items()}


def counters_of(text: str) -> dict[str, float]:
    """Return counters by name: ``depth 1`` etc. for acceptance by depth, ``fallback: REASON`` for fallbacks.

    ``drafter_version`` is the drafter's version; ``drafter_trees 3``, ``drafter_accepted_tokens 3`` are of version 3.

    Raises:
        NoSpeculation: the text reports no speculation.
    """
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith((_VLLM, "specplug:")):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total") and sample.name != "specplug:drafter_version":
                continue
            key = sample.name.removesuffix("_total").removeprefix(_VLLM).removeprefix("specplug:")
            if "position" in sample.labels:
                key = f"depth {int(sample.labels['position']) + 1}"
            elif "reason" in sample.labels:
                key = f"fallback: {sample.labels['reason']}"
            elif "version" in sample.labels:
                key = f"{key} {sample.labels['version']}"
            counters[key] = counters.get(key, 0.0) + sample.value
    if "drafts" not in counters:
        raise NoSpeculation("this server reports no speculation: was it started with a --speculative-config?")
    return counters


def table(counters: Mapping[str, float]) -> Table:
    """Show the counters (or their differences) as rates per draft and per step."""
    drafts, steps = counters["drafts"], counters.get("steps", 0.0)

    def per(key: str, count: float, unit: str = "", scale: float = 1.0) -> str:
        return f"{scale * counters.get(key, 0.0) / count:.2f}{unit}" if count else "-"

    rows = Table("speculation", "value", title="specplug top")
    rows.add_row("tau (bonus token included)", f"{1 + counters['accepted_tokens'] / drafts:.2f}" if drafts else "-")
    rows.add_row("drafted trees", f"{drafts:.0f}")
    rows.add_row("nodes per tree", per("draft_tokens", drafts))
    rows.add_row("draft time per step", per("draft_seconds", steps, " ms", 1000))
    rows.add_row("verification time per step", per("verify_seconds", steps, " ms", 1000))
    depth = 1
    while counters.get(f"depth {depth}"):
        rows.add_row(f"accepted at depth {depth}", per(f"depth {depth}", drafts, " %", 100))
        depth += 1
    if version := counters.get("drafter_version"):
        rows.add_row("version of the drafter", f"{version:.0f}")
    for key, value in counters.items():
        if key.startswith("drafter_trees ") and value:
            number = key.removeprefix("drafter_trees ")
            tau = 1 + counters.get(f"drafter_accepted_tokens {number}", 0.0) / value
            rows.add_row(f"tau with version {number}, since its start", f"{tau:.2f}")
    for name in ("drafters_taken", "drafters_refused", "drafters_rolled_back"):
        if counters.get(name):
            rows.add_row(name.replace("_", " "), f"{counters[name]:.0f}")
    for key, value in counters.items():
        if key.startswith("fallback: "):
            rows.add_row(key, f"{value:.0f}")
    return rows
