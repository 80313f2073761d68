"""vLLM engines on the V2 runner: answers compared with plain decoding's, and the time of their steps.

Modes, from the least of vLLM's machinery to all of it:

eager     ``enforce_eager``
graphs    no compilation; full CUDA graphs of decoding
defaults  what vLLM does without being asked: compiled, piecewise and full graphs
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Skip, attempt, idle_share
from benchmarks.gpu.models import heads_for, smollm2, write_models

#: Of a token's log-probability, in float32.
MAX_LOGPROB_DEVIATION = 1e-3
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "defaults": {},
}
TOPICS = ("tides", "glass", "bridges", "bees", "maps", "ink", "trains", "salt")

Row = dict[str, Any]


def speculation(method: str, nodes: int, models: dict[str, str], path: str | None = None) -> Row:
    """Return the arguments of ``LLM`` for a method; ``path`` is the option ``tree_attention``."""
    if method == "plain":
        return {}
    size = {"num_speculative_tokens": nodes}
    if method == "chain":
        return {"speculative_config": {"method": "eagle", "model": models["chain"], **size}}
    depth, top_k = (6, 10) if nodes > 20 else (3, 3) if nodes < 13 else (5, 6)
    lookup = {"method": "lookup", **size}
    trees = {"method": "eagle2", "model": models["eagle"], "draft_depth": depth, "draft_top_k": top_k, **size}
    chosen = {
        "eagle2": trees,
        "medusa": {"method": "medusa", "model": models.get("medusa"), **size},
        "lookup": lookup,
        "union": {"method": "union", "sources": [trees, lookup], **size},
    }[method]
    attention = {"tree_attention": path} if path else {}
    return {"speculative_config": {**chosen, "budget": "fixed", **attention}}  # rows are compared by numbers of nodes


@contextlib.contextmanager
def engine(target: str, question: Row, **options: Any) -> Iterator[Any]:
    """Start an engine; afterwards its memory is free for the next one of the process."""
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM
    except ImportError as error:
        raise Skip(f"vLLM cannot be imported: {error}") from error
    if question["interpret"]:
        import tests.doubles.interpreted  # noqa: F401

        options |= {"block_size": 32, "kv_cache_memory_bytes": 64 << 20}
        options.setdefault("dtype", "float32")
    llm = LLM(target, seed=0, disable_log_stats=False, **MODES[question["mode"]], **options)
    try:
        yield llm
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        if torch.cuda.is_initialized():
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        gc.collect()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def drafted(llm: Any) -> tuple[int, int]:
    """Return the number of drafts so far, and of their accepted tokens."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    return tuple(int(values.get(name, 0)) for name in names)


def tau(llm: Any, before: tuple[int, int]) -> float | None:
    """Return the tokens per step since then, the bonus token counted."""
    drafts, accepted = (now - then for now, then in zip(drafted(llm), before, strict=True))
    return round(1 + accepted / drafts, 3) if drafts else None


# ---- the same answers


@functools.lru_cache(maxsize=8)
def _plain(folder: str) -> dict[str, Row]:
    """Keep plain decoding's answers for the other methods of this process, by sampling."""
    return {}


@functools.lru_cache(maxsize=1)
def _tiny_models() -> dict[str, str]:
    return {name: str(path) for name, path in write_models(Path(tempfile.mkdtemp()), tiny_ones=True).items()}


def check_identity(question: Row) -> Iterator[Row]:
    """Yield greedy and seeded float32 answers of ``method``, compared with plain decoding's."""
    # vLLM's Triton attention would otherwise multiply float32 as TF32; ours does not.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    interpret, method, models = question["interpret"], question["method"], dict(_tiny_models())
    texts, tokens = _texts(interpret), 8 if interpret else 48
    options: Row = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
    if not interpret:
        options |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
    known = _plain(models["target"])
    # The first method of a process asks for plain decoding's answers, always without graphs.
    if not known and not question["dry_run"]:
        with engine(models["target"], {**question, "mode": "eager"}, **options) as llm:
            known.update({row["sampling"]: row for row in answers(llm, texts, tokens)})
    if method == "medusa":
        models["medusa"] = heads_for(models["target"], texts, known["greedy"]["token_ids"] if known else texts)
    with engine(models["target"], question, **options, **speculation(method, 12, models)) as llm:
        for row in answers(llm, texts, tokens):
            row = compared(row, known[row["sampling"]])
            if method != "plain":
                growths = runner_of(llm).speculator._growths.values()
                row["recorded"] = sorted({size for growth in growths for size in growth._recorded})
            yield row


def _texts(interpret: bool) -> list[list[int]]:
    from tests.doubles import tiny

    draw = random.Random(0)
    texts = [[draw.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (7, 40, 19)]
    texts += [text[:9] * 3 for text in texts]  # for lookup
    return texts[2:4] if interpret else texts


def answers(llm: Any, texts: list[list[int]], tokens: int) -> Iterator[Row]:
    """Yield an engine's answers, greedy and seeded, with every token's log-probability and the tau of each."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": text} for text in texts]
    seeded = [{"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2}]
    for name, kinds in (("greedy", [{"temperature": 0}]), ("seeded", seeded)):
        params = [
            SamplingParams(**kinds[i % len(kinds)], max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
            for i in range(len(prompts))
        ]
        before = drafted(llm)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        logprobs = [
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ]
        token_ids = [list(output.token_ids) for output in outputs]
        yield {"sampling": name, "token_ids": token_ids, "logprobs": logprobs, "tau": tau(llm, before)}


def compared(found: Row, plain: Row) -> Row:
    """Count the answers equal to plain decoding's, and how far their log-probabilities differ."""
    row: Row = {"sampling": found["sampling"], "answers": len(found["token_ids"]), "tau": found["tau"]}
    same = [ours == theirs for ours, theirs in zip(found["token_ids"], plain["token_ids"], strict=True)]
    pairs = [
        abs(ours - theirs)
        for is_same, *both in zip(same, found["logprobs"], plain["logprobs"], strict=True)
        if is_same
        for ours, theirs in zip(*both, strict=True)
    ]
    row |= {"same": sum(same), "logprob_deviation": max(pairs, default=0.0)}
    if not all(same):
        return {**row, "problem": f"{row['sampling']}: {row['same']} of {row['answers']} answers are plain decoding's"}
    if not row["logprob_deviation"] <= MAX_LOGPROB_DEVIATION:
        row["problem"] = f"{row['sampling']}: log-probabilities differ by {row['logprob_deviation']:.3g}"
    return row


# ---- time


class StepClock:
    """Times the runner on batches of full drafts: device time of its parts, wall time from step to step."""

    def __init__(self, runner: Any, rows: int):
        self.runner, self.rows = runner, rows
        self.counts = False
        self.reset()
        self._wrap(runner, "execute_model", "verify")
        if runner.speculator is not None:
            self._wrap(runner.speculator, "propose", "draft")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_model":
                scheduled = args[0].num_scheduled_tokens.values()
                self.counts = len(scheduled) > 0 and all(rows == self.rows for rows in scheduled)
                now = time.perf_counter()
                if self.counts and self._last:
                    self.walls.append(now - self._last)
                self._last = now if self.counts else 0.0
            if not self.counts or not torch.cuda.is_available():
                return call(*args, **kwargs)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = call(*args, **kwargs)
            end.record()
            self.parts[part].append((begin, end))
            return result

        setattr(owner, name, timed)

    def medians(self) -> Row:
        def median(values: list[float]) -> float | None:
            values = values[3:] if len(values) > 6 else values  # the first ones overlap with steps of prompts
            return round(sorted(values)[len(values) // 2], 3) if values else None

        result = {"step_ms": median([1000 * wall for wall in self.walls]), "steps_counted": len(self.walls)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            for part, events in self.parts.items():
                result[f"{part}_ms"] = median([begin.elapsed_time(end) for begin, end in events])
        return result

    def reset(self) -> None:
        self.walls: list[float] = []
        self._last = 0.0
        self.parts: dict[str, list[tuple[Any, Any]]] = {"verify": [], "draft": []}


@functools.lru_cache(maxsize=1)
def _large_models() -> dict[str, str]:
    return {name: str(path) for name, path in write_models(Path(tempfile.mkdtemp()), tiny_ones=False).items()}


def time_steps(question: Row) -> Iterator[Row]:
    """Time ``method`` with so many ``nodes`` on ``target``: ``8b`` (random weights) or ``smollm2`` (real text)."""
    interpret, real = question["interpret"], question["target"] == "smollm2"
    if real:
        models = smollm2(question["model"])
        options: Row = {"max_model_len": 2048}
    else:
        models = _tiny_models() if interpret else _large_models()
        options = {"skip_tokenizer_init": True, "max_model_len": 256 if interpret else max(question["contexts"]) + 4096}
        options |= {} if interpret else {"load_format": "dummy"}
    if not interpret:
        options |= {"kv_cache_memory_bytes": (4 if real else 12) << 30}
    options |= {"max_num_seqs": max(question["batches"]), **_batch_tokens(question)}
    chosen = speculation(question["method"], question["nodes"], models, question.get("path"))
    with engine(models["target"], question, **options, **chosen) as llm:
        rows = 1 + llm.llm_engine.vllm_config.num_speculative_tokens
        clock = StepClock(runner_of(llm), rows)
        for batch, context in itertools.product(question["batches"], [0] if real else question["contexts"]):
            # 64 requests of 8192 tokens do not fit beside the weights.
            if batch * context <= 64 * 1024:
                yield {"nodes": rows - 1, "context": context, "batch": batch, **_one_batch(llm, clock, batch, context)}


def _batch_tokens(question: Row) -> Row:
    """Return room for the rows of all trees, more than vLLM gives by itself."""
    rows = (question["nodes"] + 1) * max(question["batches"])
    return {} if question["interpret"] else {"max_num_batched_tokens": max(8192, rows)}


def _one_batch(llm: Any, clock: StepClock, batch: int, context: int) -> Row:
    """Time one batch of random prompts of ``context`` tokens, or of texts where ``context`` is 0."""
    from vllm import SamplingParams

    interpret = not torch.cuda.is_available()
    if context:
        vocab = llm.llm_engine.model_config.get_vocab_size()
        prompts = [{"prompt_token_ids": random.choices(range(3, vocab), k=context)} for _ in range(batch)]
    else:
        tokenizer = llm.get_tokenizer()
        texts = [f"Write a detailed essay of several paragraphs about {TOPICS[i % len(TOPICS)]}." for i in range(batch)]
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = [
            {
                "prompt_token_ids": list(
                    tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                )
            }
            for chat in chats
        ]
    tokens = 4 if interpret else 40 if context else 256
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    generate: Callable[[], list[Any]] = functools.partial(llm.generate, prompts, params, use_tqdm=False)
    generate()
    clock.reset()
    before, start = drafted(llm), time.perf_counter()
    count = sum(len(output.outputs[0].token_ids) for output in generate())
    seconds = time.perf_counter() - start
    row = {"tokens_per_second": round(count / seconds, 1), "tau": tau(llm, before), **clock.medians()}
    if row["step_ms"] is None:
        row["problem"] = f"no step of full drafts was seen: context {context}, batch {batch}"
    return {**row, "idle_share": attempt(functools.partial(idle_share, generate))}
