"""``specplug bench``: methods against each other on the same questions, in one run.

Every method has an engine of its own in a worker process (``python -m vllm_specplug.hosts.bench_worker``), all alive at
once; each batch of questions goes to one method after the other, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .environment import end_of_log, engine_environment, provenance
from .tables import format_table

_DRAFTER = "smollm2-135m-instruct"
_STOCK_EAGLE = "eagle-chain"

#: Speculative configurations by method name; ``None`` is plain decoding.
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    _STOCK_EAGLE: {"method": "eagle", "model": _DRAFTER, "num_speculative_tokens": 3},
    "eagle2": {"method": "eagle2", "model": _DRAFTER},
    "medusa-chain": {"method": "medusa", "model": _DRAFTER, "tree": [[0], [0, 0], [0, 0, 0]]},  # top-1 of each head
    "medusa": {"method": "medusa", "model": _DRAFTER},
    "lookup": {"method": "lookup"},
    "union": {"method": "union", "sources": [{"method": "eagle2", "model": _DRAFTER}, {"method": "lookup"}]},
}
_STOCK = ("plain", "ngram", _STOCK_EAGLE)  # these run without any plugin loaded
_BASELINE = "plain"
_NUM_WARM_UPS = 3
_MARKS = ("<!-- results -->", "<!-- /results -->")


@dataclass(frozen=True)
class Question:
    """One user message with its category."""

    name: str
    category: str
    text: str


@dataclass(frozen=True)
class Method:
    """A column of the result: ``name`` or ``name:label``, and the host's speculative configuration."""

    label: str
    config: dict[str, Any] | None

    @property
    def stock(self) -> bool:
        return self.label.partition(":")[0] in _STOCK


@dataclass
class Measurement:
    """What one method did with one batch of questions."""

    questions: list[str]
    category: str
    seconds: float
    token_ids: list[list[int]]
    drafts: int
    accepted: int
    agree: list[bool] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


# Questions and methods


def parse_question(record: dict, number: int) -> Question:
    """One line of Spec-Bench (``turns``, first turn), HumanEval (``prompt``) or GSM8K (``question``)."""
    if turns := record.get("turns"):
        return Question(str(record.get("question_id", number)), record.get("category", "none"), turns[0])
    if "prompt" in record:
        return Question(str(record.get("task_id", number)), record.get("category", "humaneval"), record["prompt"])
    if "question" in record:
        return Question(str(number), record.get("category", "gsm8k"), record["question"])
    raise ValueError("expected a key 'turns' (Spec-Bench), 'prompt' (HumanEval) or 'question' (GSM8K)")


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a JSONL file; with a ``limit``, that many at even distances, so that all categories take part."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                questions.append(parse_question(json.loads(line), number))
            except (ValueError, AttributeError, IndexError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise ValueError(f"{path} holds no questions")
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def make_batches(questions: list[Question], size: int) -> list[list[Question]]:
    """Batches of at most ``size`` questions, each of one category."""
    by_category: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_category[question.category].append(question)
    return [group[i : i + size] for group in by_category.values() for i in range(0, len(group), size)]


def parse_methods(names: str, overrides: Iterable[str] = ()) -> list[Method]:
    """Methods from ``a,b:label`` and ``NAME=JSON`` overrides; a null value removes a key.

    Raises:
        ValueError: an unknown method without a configuration, a malformed override, or no plain baseline.
    """
    labels = [name.strip() for name in names.split(",") if name.strip()]
    changes: dict[str, dict] = {}
    for override in overrides:
        label, separator, text = override.partition("=")
        try:
            changes[label] = json.loads(text)
        except json.JSONDecodeError:
            separator = ""
        if not separator or not isinstance(changes[label], dict):
            raise ValueError(f"--method-config {override!r}: expected NAME='{{\"key\": value}}'")
        if label not in labels:
            raise ValueError(f"--method-config {label}: not one of --methods {','.join(labels)}")
    if _BASELINE not in labels or len(set(labels)) != len(labels):
        raise ValueError("--methods must name 'plain', the baseline, and every method once (variants: NAME:LABEL)")
    methods = []
    for label in labels:
        name = label.partition(":")[0]
        if name not in METHODS and label not in changes:
            raise ValueError(f"unknown method {name!r}: known are {', '.join(METHODS)}; others need --method-config")
        base = METHODS.get(name, {"method": name})
        config = None if base is None else {k: v for k, v in (base | changes.get(label, {})).items() if v is not None}
        methods.append(Method(label, config))
    return methods


def full_vocabulary_copy(drafter: Path, out: Path) -> Path:
    """A copy of an EAGLE checkpoint without its draft vocabulary, for the stock host, which then shares the
    target's whole LM head: same weights, larger head."""
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((drafter / "config.json").read_text())
    config.pop("draft_vocab_size", None)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: t for file in drafter.glob("*.safetensors") for name, t in load_file(file).items()}
    kept = {name: t for name, t in tensors.items() if name.split(".")[-1] not in ("d2t", "t2d")}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _for_stock_host(method: Method, scratch: Path) -> Method:
    if method.config is None or method.config.get("method") != "eagle":
        return method
    from .config import resolve_drafter

    drafter = full_vocabulary_copy(resolve_drafter(method.config["model"]), scratch / method.label.replace(":", "-"))
    return Method(method.label, method.config | {"model": str(drafter)})


# Running


class Worker:
    """The parent's end of a worker process: one JSON line out, one JSON line back."""

    def __init__(self, method: Method, engine: dict[str, Any], kv_gib: int, log: Path) -> None:
        self.method, self.log, self.config = method, log, method.config
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_specplug.hosts.bench_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=engine_environment(kv_gib=kv_gib, plugins=not method.stock),
                start_new_session=True,  # so that its engine processes can be ended with it
            )
        self.send(engine | ({} if method.config is None else {"speculative_config": method.config}))

    def send(self, message: dict) -> None:
        """Write a request."""
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._obituary()) from None

    def receive(self) -> dict:
        """Wait for a reply.

        Raises:
            RuntimeError: the worker died; the message carries the end of its log.
        """
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self._obituary())
        return json.loads(line)

    def _obituary(self) -> str:
        return f"the engine of {self.method.label!r} has ended (code {self.process.wait()}); {end_of_log(self.log)}"

    def generate(self, questions: list[Question], max_tokens: int, sampling: dict | None = None) -> Measurement:
        """Answer a batch, greedily or as ``SamplingParams`` of ``sampling`` say; tokenisation is not timed."""
        request = {"texts": [question.text for question in questions], "max_tokens": max_tokens}
        self.send(request | ({"sampling": sampling} if sampling else {}))
        reply = self.receive()
        return Measurement([question.name for question in questions], questions[0].category, **reply)

    def close(self) -> int:
        """Ask for the peak memory (MiB, the worker and its engine together) and end the worker."""
        self.send({"close": True})
        peak = self.receive()["peak_rss_mib"]
        self.process.wait(60)
        return peak

    def kill(self) -> None:
        """End the worker and its engine, whatever they do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(
    methods: list[Method], batches: list[list[Question]], engine: dict[str, Any], max_tokens: int, kv_gib: int
) -> tuple[dict[str, list[Measurement]], dict[str, int]]:
    """Start all engines, warm them up, and give every batch to one method after the other.

    Returns:
        Measurements and peak memory in MiB, by method label.
    """
    scratch = Path(tempfile.mkdtemp(prefix="specplug-bench-"))
    workers: list[Worker] = []
    results: dict[str, list[Measurement]] = {method.label: [] for method in methods}
    try:
        for method in methods:
            log = scratch / f"{method.label.replace(':', '-')}.log"
            print(f"starting {method.label} (log: {log})", file=sys.stderr)
            workers.append(Worker(_for_stock_host(method, scratch), engine, kv_gib, log))
            workers[-1].receive()  # one start at a time: compilers share the cores badly
        for worker in workers:
            for batch in (batches * _NUM_WARM_UPS)[:_NUM_WARM_UPS]:
                worker.generate(batch, max_tokens)
        for number, batch in enumerate(batches):
            turn = number % len(workers)
            for worker in workers[turn:] + workers[:turn]:
                results[worker.method.label].append(worker.generate(batch, max_tokens))
            print(f"\r{number + 1}/{len(batches)} {batch[0].category:<24}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        peaks = {worker.method.label: worker.close() for worker in workers}
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return results, peaks


# Results


def mark_agreement(results: dict[str, list[Measurement]]) -> None:
    """Fill ``agree``: whether each answer has the baseline's tokens."""
    for measurements in results.values():
        for measurement, baseline in zip(measurements, results[_BASELINE], strict=True):
            measurement.agree = [a == b for a, b in zip(measurement.token_ids, baseline.token_ids, strict=True)]


def summarise(measurements: list[Measurement], baseline: list[Measurement]) -> dict[str, Any]:
    """Figures of one method over some batches; ``baseline`` holds plain decoding of the same batches."""
    tokens, seconds = sum(m.tokens for m in measurements), sum(m.seconds for m in measurements)
    base_rate = sum(b.tokens for b in baseline) / sum(b.seconds for b in baseline)
    drafts, accepted = sum(m.drafts for m in measurements), sum(m.accepted for m in measurements)
    ratios = [m.rate / b.rate for m, b in zip(measurements, baseline, strict=True)]
    agree = [same for m in measurements for same in m.agree]
    return {
        "questions": len(agree),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_s_median": round(statistics.median(m.rate for m in measurements), 2),
        "speedup": round(tokens / seconds / base_rate, 3),
        "speedup_median": round(statistics.median(ratios), 3),
        "tau": round(1 + accepted / drafts, 3) if drafts else None,
        "agree": sum(agree),
    }


def build_report(
    methods: list[Method], results: dict[str, list[Measurement]], peaks: dict[str, int], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything that goes into the JSON file."""
    mark_agreement(results)
    baseline = results[_BASELINE]
    report: dict[str, Any] = {
        "provenance": provenance(baseline="plain vLLM (no plugin, no speculation), same run, questions interleaved"),
        "settings": settings,
        "methods": {},
    }
    for method in methods:
        own = results[method.label]
        categories = {}
        for category in dict.fromkeys(m.category for m in own):
            pairs = [(m, b) for m, b in zip(own, baseline, strict=True) if m.category == category]
            categories[category] = summarise([m for m, _ in pairs], [b for _, b in pairs])
        report["methods"][method.label] = {
            "config": method.config,
            "overall": summarise(own, baseline),
            "categories": categories,
            "peak_rss_mib": peaks[method.label],
            "batches": [{k: v for k, v in asdict(m).items() if k != "token_ids"} | {"tokens": m.tokens} for m in own],
        }
    return report


def render(report: dict[str, Any], markdown: bool = False) -> str:
    """The overall table, the speedups by category, and where the numbers come from."""
    headers = [
        "method",
        "tokens/s",
        "median tokens/s",
        "speedup",
        "median speedup",
        "tau",
        "same tokens",
        "peak RSS MiB",
    ]
    rows, by_category = [], []
    for label, method in report["methods"].items():
        o = method["overall"]
        rates = [f"{o['tokens_per_s']:.1f}", f"{o['tokens_per_s_median']:.1f}"]
        speedups = [f"{o['speedup']:.2f}x", f"{o['speedup_median']:.2f}x", f"{o['tau']:.2f}" if o["tau"] else "-"]
        rows.append([label, *rates, *speedups, f"{o['agree']}/{o['questions']}", str(method["peak_rss_mib"])])
    names = list(report["methods"])
    for category, base in report["methods"][_BASELINE]["categories"].items():
        cells = (report["methods"][name]["categories"][category] for name in names if name != _BASELINE)
        by_category.append([category, str(base["questions"]), *(f"{c['speedup']:.2f}x" for c in cells)])
    parts = [format_table(headers, rows, markdown)]
    if len(names) > 1:
        others = [f"{name} speedup" for name in names if name != _BASELINE]
        parts.append(format_table(["category", "questions", *others], by_category, markdown))
    return "\n\n".join([*parts, _origin(report)])


def _origin(report: dict[str, Any]) -> str:
    p, s = report["provenance"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in p["versions"].items())
    return (
        f"{s['num_questions']} questions of {s['questions']}, {s['dtype']}, concurrency {s['concurrency']}, greedy, "
        f"at most {s['max_tokens']} tokens each; tau counts the bonus token.  {p['hardware']['cpu']}, "
        f"{p['hardware']['cores']} cores; {versions}; commit {p['commit']}; baseline: {p['baseline']}; "
        f"{p['date'][:10]}; command: `{p['command']}`"
    )


# Command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``specplug bench``."""
    parser.add_argument("--model", metavar="DIR", help="the target (default: SmolLM2-135M-Instruct, prepared here)")
    parser.add_argument("--methods", default="plain,ngram,eagle-chain,eagle2", metavar="A,B:LABEL", help="%(default)s")
    parser.add_argument(
        "--method-config", action="append", default=[], metavar="NAME=JSON", help="change a method's configuration"
    )
    parser.add_argument("--questions", type=Path, metavar="FILE", help="JSONL: Spec-Bench, HumanEval or GSM8K layout")
    parser.add_argument("--limit", type=int, metavar="N", help="take N questions at even distances")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--concurrency", type=int, default=1, metavar="C", help="questions per batch")
    parser.add_argument("--kv-gib", type=int, default=1, metavar="G", help="key/value cache of each engine")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the Markdown table of such a file")
    parser.add_argument("--into", type=Path, metavar="README", help=f"with --table: write it behind {_MARKS[0]}")


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments ask for and return the report."""
    if args.questions is None:
        raise ValueError("--questions FILE is needed (or --table FILE to print earlier results)")
    for name in ("max_tokens", "concurrency", "kv_gib", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    from .smollm2 import prepare

    methods = parse_methods(args.methods, args.method_config)
    questions = read_questions(args.questions, args.limit)
    engine = {
        "model": str(args.model or prepare()),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(8, args.concurrency),
        "enable_prefix_caching": False,  # every answer pays for its own prompt
        "disable_log_stats": False,
    }
    batches = make_batches(questions, args.concurrency)
    results, peaks = measure(methods, batches, engine, args.max_tokens, args.kv_gib)
    settings = {key: engine[key] for key in ("dtype", "max_model_len", "max_num_seqs", "enable_prefix_caching")}
    settings |= {"questions": args.questions.name, "num_questions": len(questions), "max_tokens": args.max_tokens}
    settings |= {"concurrency": args.concurrency, "kv_gib": args.kv_gib, "model": Path(engine["model"]).name}
    return build_report(methods, results, peaks, settings)


def write_table(table: str, page: Path) -> None:
    """Replace what stands between the marks of a Markdown page."""
    head, begin, rest = page.read_text().partition(_MARKS[0])
    _, end, tail = rest.partition(_MARKS[1])
    if not begin or not end:
        raise ValueError(f"{page} has no {_MARKS[0]} ... {_MARKS[1]}")
    page.write_text(f"{head}{begin}\n{table}\n{end}{tail}")


def run(args: argparse.Namespace) -> None:
    """``specplug bench``."""
    if args.table is not None:
        table = render(json.loads(args.table.read_text()), markdown=True)
        print(table) if args.into is None else write_table(table, args.into)
        return
    report = run_benchmark(args)
    print(render(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
