"""Runs one step of ``gpu.py`` in its own process: the question as JSON, rows as lines of JSON.

A row is printed as soon as it is measured; ``problem`` in it says what is wrong with the result.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: From the reference, relative to the largest output: rounded to bfloat16, twice where parts are merged.
MAX_DEVIATION = 0.012
#: Of a token's log-probability, in float32.
MAX_LOGPROB_DEVIATION = 1e-3

SHAPE_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 16384,
}  # fmt: skip
#: Medusa heads for that target as this project trains them: the target's LM head over a part of the vocabulary.
NUM_HEADS, DRAFT_VOCAB = 4, 32768

Row = dict[str, Any]


def main() -> None:
    question = json.loads(sys.argv[1])
    if question["interpret"]:
        from tests.doubles.interpreter import use_interpreter

        use_interpreter()
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    for row in PARTS[question["part"]](question):
        print("ROW " + json.dumps(row), flush=True)


def describe(question: Row) -> Iterator[Row]:
    """Describe the device, and which ``tree_attention`` it cannot run, with the reason."""
    import torch
    import triton

    found: Row = {"name": "none: Triton's interpreter", "triton": triton.__version__}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found = {
            **found,
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "bandwidth_gb_s": round(bandwidth_gb_s(), 1),
        }
    elif not question["interpret"]:
        raise RuntimeError("there is no CUDA device; --interpret checks the script itself, on a CPU")
    paths = {name: attention_path(name, SHAPE_8B["head_dim"], on_gpu) for name in ("flash", "xformers")}
    yield {**found, "unavailable": {name: reason for name, reason in paths.items() if isinstance(reason, str)}}


def bandwidth_gb_s() -> float:
    """Measure the bytes that the device's memory reads and writes per second."""
    import torch

    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copy_ms = device_ms(lambda: buffer[: 1 << 29].copy_(buffer[1 << 29 :]))
    return 2 * (1 << 29) / copy_ms / 1e6


def device_ms(call: Callable[[], Any], rounds: int = 50) -> float:
    """Measure the median milliseconds of a call on the device; on a CPU, one wall time."""
    import torch

    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    flush = torch.empty(
        1 << 26, dtype=torch.int32, device="cuda"
    )  # writing it removes the last call's data from the cache
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[rounds // 2]


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error: for figures beside a row's main one."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- one layer's attention


def attention_path(name: str, head_size: int, on_gpu: bool) -> Any:
    """Return the attention of a path, or why it cannot run; without a GPU the reference replaces FlashAttention."""
    from tests.doubles.attention_reference import ReferenceContext
    from vllm_specplug.kernels.merged_tree_attention import merged_tree_attention
    from vllm_specplug.kernels.triton_tree_attention import tree_attention
    from vllm_specplug.kernels.xformers_context import XformersContext

    if name == "triton":
        return tree_attention
    makers: dict[str, Any] = {"flash": ReferenceContext, "xformers": functools.partial(XformersContext, head_size)}
    if on_gpu:
        from vllm_specplug.hosts.attention.flash_context import FlashContext

        makers["flash"] = functools.partial(FlashContext, head_size)
    try:
        return functools.partial(merged_tree_attention, makers[name](), uniform=True)
    except (ValueError, ImportError) as error:
        return str(error)


def time_attention(question: Row) -> Iterator[Row]:
    """Time the attention of the path ``name``; ``chain`` is vLLM's own."""
    import torch

    from tests.doubles.attention_inputs import make_inputs
    from vllm_specplug.core.layout import ancestor_bits
    from vllm_specplug.kernels.tree_attention import TOKEN_LAYOUT, tree_attention_reference

    on_gpu, name = torch.cuda.is_available(), question["name"]
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    heads = (32, 8, 128) if on_gpu else (2, 1, 16)
    attend = None if name == "chain" else attention_path(name, heads[2], on_gpu)
    if isinstance(attend, str):
        raise RuntimeError(attend)
    bytes_per_ms = bandwidth_gb_s() * 1e6 if on_gpu else None
    for nodes, context, batch in itertools.product(question["nodes"], question["contexts"], question["batches"]):
        rows = nodes + 1
        row: Row = {"nodes": nodes, "context": context, "batch": batch}
        inputs = make_inputs(
            (context,) * batch, (rows,) * batch, num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2],
            block_size=16, dtype=dtype, kv_layout=TOKEN_LAYOUT, garbage=0.0, gap=0,
        )  # fmt: skip
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
        if name == "chain":
            yield {**row, "ms": device_ms(host_chain(inputs, batch, context, rows))}
            continue
        # A token's heads side by side, as in vLLM's default layout.
        inputs["kv_cache"] = inputs["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2)
        expected = torch.empty_like(inputs["output"], dtype=torch.float32)
        tree_attention_reference(**{**inputs, "output": expected})
        del inputs["kv_layout"]
        inputs["bits"] = ancestor_bits(inputs.pop("mask"))
        inputs["output"].fill_(float("nan"))
        call = functools.partial(attend, **inputs, max_query_len=rows, max_context_len=context)
        call()
        row["deviation"] = float((inputs["output"].float() - expected).abs().max() / expected.abs().max())
        row["ms"] = device_ms(call)
        if not row["deviation"] <= MAX_DEVIATION:
            row["problem"] = (
                f"{row['deviation']:.3g} from the reference: {nodes} nodes, context {context}, batch {batch}"
            )
        if name == "triton":
            splits = (1, 2, 4, 8, 16, 32) if on_gpu else (2,)
            row["ms_by_splits"] = {n: device_ms(functools.partial(call, num_splits=n)) for n in splits}
        if bytes_per_ms is not None:
            row["floor_ms"] = batch * context * heads[1] * 2 * heads[2] * 2 / bytes_per_ms
        yield row


def host_chain(inputs: Row, batch: int, context: int, rows: int) -> Callable[[], Any]:
    """Return vLLM's FlashAttention over as many rows as a chain, on pages that hold them."""
    import torch
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    blocks = -(-(context + rows) // 16)
    cache = torch.randn(batch * blocks, 16, inputs["kv_cache"].shape[1], inputs["kv_cache"].shape[3], device="cuda")
    key, value = cache.to(torch.bfloat16).split(inputs["query"].shape[2], dim=-1)
    table = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
    query = torch.randn(batch * rows, *inputs["query"].shape[1:], device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), context + rows, dtype=torch.int32, device="cuda")
    output = torch.empty_like(query)
    return lambda: flash_attn_varlen_func(
        q=query, k=key, v=value, out=output, cu_seqlens_q=starts, max_seqlen_q=rows, seqused_k=lens,
        max_seqlen_k=context + rows, softmax_scale=inputs["scale"], causal=True, block_table=table,
        fa_version=get_flash_attn_version(),
    )  # fmt: skip


# ---- a draft phase of lookup


def time_lookup(question: Row) -> Iterator[Row]:
    """Time what ``name`` says: ``search``, ``trees`` from the matches, or their ``union`` with others."""
    import torch

    from tests.doubles.contexts import make_match_inputs
    from vllm_specplug.kernels.triton_lookup import match_keys
    from vllm_specplug.proposers.lookup import device as lookup
    from vllm_specplug.proposers.lookup.options import LookupOptions
    from vllm_specplug.proposers.union.device import merge_drafts

    place = "cuda" if torch.cuda.is_available() else "cpu"
    name, room = question["name"], 4096 if place == "cuda" else 64
    for nodes, context, batch in itertools.product(question["nodes"], question["contexts"], question["batches"]):
        row: Row = {"nodes": nodes, "context": context, "batch": batch}
        # So many different tokens that about as much matches as in text.
        inputs = make_match_inputs([context] * batch, context + room, vocab_size=100)
        known = {key: values.to(place) for key, values in inputs.items()}
        options = LookupOptions(num_speculative_tokens=nodes, traffic_tokens=0)
        if name == "search":
            if nodes != question["nodes"][0]:
                continue
            search = functools.partial(match_keys, **known, min_match=1, max_match=options.max_match)
            expected = lookup.match_keys(**inputs, min_match=1, max_match=options.max_match)
            if not torch.equal(search().cpu(), expected):
                row["problem"] = f"not what the reference finds: context {context}, batch {batch}"
            yield {**row, "ms": device_ms(search)}
            continue
        sources = [options]
        if name == "union":
            sources.append(LookupOptions(num_speculative_tokens=nodes, min_match=2, max_match=4, traffic_tokens=0))

        def grow(num_reqs, slots, roots, known=known, sources=sources, find=match_keys, nodes=nodes):
            drafts = [
                lookup.draft_matches(known["token_ids"], slots, known["lens"], roots, source, find)
                for source in sources
            ]
            tree = (merge_drafts(drafts, nodes) if len(drafts) > 1 else drafts[0]).tree
            return tree.token_ids, tree.parents

        yield {**row, **time_growth(grow, inputs, known, lookup.match_keys)}


def time_growth(grow: Callable[..., Any], inputs: Row, known: Row, reference: Callable[..., Any]) -> Row:
    """Time a draft phase as it is and, on a GPU, recorded as a graph; compare both with one on the CPU."""
    import torch

    from vllm_specplug.hosts.v2.growth import Growth

    given = known["slots"], known["token_ids"][known["slots"].long(), known["lens"].long() - 1].long()
    batch = len(given[0])
    expected = grow(batch, *(values.cpu() for values in given), known=inputs, find=reference)
    found = {"ms": device_ms(functools.partial(grow, batch, *given))}
    calls = {"eager": grow}
    if given[0].is_cuda:
        calls["recorded"] = growth = Growth(grow, batch)
        growth.record(*(torch.zeros_like(values) for values in given))
        found["recorded_ms"] = device_ms(functools.partial(growth, batch, *given))
    for how, call in calls.items():
        trees = [(got.cpu() == wanted).all(dim=1) for got, wanted in zip(call(batch, *given), expected, strict=True)]
        same = found[f"{how}_same"] = int((trees[0] & trees[1]).sum())
        # The device's logarithms may break a few ties differently.
        if same < 0.9 * batch:
            found["problem"] = f"{how}: {same} of {batch} trees are those of a CPU"
    return found


# ---- engines


def write_models(folder: Path, tiny_ones: bool) -> dict[str, Path]:
    """Write a target, an EAGLE head and Medusa heads with random weights; vLLM fills large ones where it can."""
    import torch
    from safetensors.torch import save_file

    from tests.doubles import tiny

    paths = {name: folder / name for name in ("target", "eagle", "medusa")}
    shape = tiny.llama_config(**({} if tiny_ones else SHAPE_8B))
    h, i, draft_vocab = shape["hidden_size"], shape["intermediate_size"], min(DRAFT_VOCAB, shape["vocab_size"])
    paths["medusa"].mkdir()
    (paths["medusa"] / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}))
    heads = {f"{head}.0.linear.weight": (h, h) for head in range(NUM_HEADS)}
    heads |= {f"{head}.0.linear.bias": (h,) for head in range(NUM_HEADS)}

    def save(name: str, shapes: dict[str, tuple[int, ...]], **others: torch.Tensor) -> None:
        tensors = {key: torch.randn(size, dtype=torch.bfloat16) * 0.02 for key, size in shapes.items()}
        save_file({**tensors, **others}, paths[name] / "model.safetensors", metadata={"format": "pt"})

    save("medusa", heads, d2t=torch.zeros(draft_vocab, dtype=torch.int64))
    if tiny_ones:
        tiny.write_target(paths["target"])
        tiny.write_drafter(paths["eagle"])
        return paths
    for name, changes in (("target", {}), ("eagle", {"num_hidden_layers": 1, "bias": False})):
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(json.dumps({**shape, **changes}))
    # The plugin reads a drafter's file before vLLM starts.
    kv = SHAPE_8B["num_key_value_heads"] * SHAPE_8B["head_dim"]
    layer = {
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
        "post_attention_layernorm": (h,),
    }
    save("eagle", {"fc.weight": (h, 2 * h), **{f"layers.0.{name}.weight": size for name, size in layer.items()}})
    return paths


def speculation(method: str, nodes: int, path: str | None, eagle: str, medusa: str) -> dict[str, Any]:
    """Return the arguments of ``LLM``."""
    if method == "plain":
        return {}
    if method == "chain":
        return {"speculative_config": {"method": "eagle", "model": eagle, "num_speculative_tokens": nodes}}
    depth, top_k = (6, 10) if nodes > 20 else (3, 3)
    size = {"num_speculative_tokens": nodes}
    trees = {"method": "eagle2", "model": eagle, "draft_depth": depth, "draft_top_k": top_k, **size}
    lookup = {"method": "lookup", **size}
    chosen = {
        "eagle2": trees,
        "medusa": {"method": "medusa", "model": medusa, **size},
        "lookup": lookup,
        "union": {"method": "union", "sources": [trees, lookup], **size},
    }[method]
    return {"speculative_config": {**chosen, **({"tree_attention": path} if path else {})}}


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


def check_identity(question: Row) -> Iterator[Row]:
    """Yield greedy and seeded answers of the method ``name``, compared with ``plain`` unless that is the method."""
    # vLLM's Triton attention would otherwise multiply float32 as TF32; ours does not.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    from vllm import LLM

    from tests.doubles import tiny

    draw = random.Random(0)
    texts = [[draw.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (7, 40, 19)]
    texts += [text[:9] * 3 for text in texts]  # for lookup
    plain = {row["sampling"]: row for row in question.get("plain", [])}
    options: Row = {"gpu_memory_utilization": 0.3}
    if question["interpret"]:
        import tests.doubles.interpreted  # noqa: F401

        texts = texts[1:5]
        options = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder), tiny_ones=True)
        if question["name"] == "medusa" and plain:
            known = list(zip(texts, plain["greedy"]["token_ids"], strict=True))
            features = tiny.extract_features(models["target"], known, Path(folder) / "features")
            models["medusa"] = tiny.write_medusa(Path(folder) / "fitted", models["target"], features)
        chosen = speculation(question["name"], 12, None, str(models["eagle"]), str(models["medusa"]))
        llm = LLM(
            str(models["target"]), skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4, seed=0,
            disable_log_stats=False, **options, **chosen,
        )  # fmt: skip
    for row in answers(llm, texts, 12 if question["interpret"] else 48):
        if chosen:
            row = compared(row, plain.get(row["sampling"]))
            row["recorded"] = sorted(runner_of(llm).speculator._growth._recorded)
        yield row


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


def compared(found: Row, plain: Row | None) -> Row:
    """Count the answers equal to plain decoding's, and how far their log-probabilities differ."""
    row: Row = {"sampling": found["sampling"], "answers": len(found["token_ids"]), "tau": found["tau"]}
    if plain is None:
        return {**row, "problem": f"{row['sampling']}: there are no answers of plain decoding to compare with"}
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


class StepClock:
    """Times the runner on batches of full drafts: device time of its parts, wall time from step to step."""

    def __init__(self, runner: Any, rows: int):
        self.runner, self.rows = runner, rows
        self.walls: list[float] = []
        self.parts: dict[str, list[tuple[Any, Any]]] = {"verify": [], "draft": []}
        self._last = 0.0
        self._wrap(runner, "execute_model", "verify")
        if runner.speculator is not None:
            self._wrap(runner.speculator, "propose", "draft")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        import torch

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
        import torch

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
        self.walls, self._last = [], 0.0
        self.parts = {part: [] for part in self.parts}


def idle_share(generate: Callable[[], None]) -> float | None:
    """Return the share of the wall time in which no kernel ran, from a profile of one call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    # Steps of prompts are longer than all others: the second half of the time is decoding only.
    spans = [span for span in spans if span[0] > (spans[0][0] + spans[-1][1]) / 2]
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1 - busy / (spans[-1][1] - spans[0][0]), 4)


def time_steps(question: Row) -> Iterator[Row]:
    from vllm import LLM, SamplingParams

    interpret, method, path = question["interpret"], question["method"], question["path"]
    tokens = 4 if interpret else 40
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder), interpret)
        options: Row = {"load_format": "dummy", "max_model_len": max(question["contexts"]) + 4096}
        if interpret:
            import tests.doubles.interpreted  # noqa: F401

            options = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "block_size": 32,
                       "kv_cache_memory_bytes": 64 << 20}  # fmt: skip
        chosen = speculation(method, question["nodes"], path, str(models["eagle"]), str(models["medusa"]))
        llm = LLM(
            str(models["target"]), skip_tokenizer_init=True, max_num_seqs=max(question["batches"]),
            enable_prefix_caching=False, **options, **chosen,
        )  # fmt: skip
    rows = 1 + llm.llm_engine.vllm_config.num_speculative_tokens
    clock = StepClock(runner_of(llm), rows)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    for batch, context in itertools.product(question["batches"], question["contexts"]):
        prompts = [{"prompt_token_ids": random.choices(range(3, vocab), k=context)} for _ in range(batch)]

        def generate(prompts=prompts):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.generate(prompts, params, use_tqdm=False)

        generate()
        clock.reset()
        generate()
        row = {"nodes": rows - 1, "context": context, "batch": batch, **clock.medians()}
        if row["step_ms"] is None:
            row["problem"] = f"no step of full drafts was seen: context {context}, batch {batch}"
        yield {**row, "idle_share": attempt(functools.partial(idle_share, generate))}


def time_end_to_end(question: Row) -> Iterator[Row]:
    from vllm import LLM, SamplingParams

    chosen = speculation(
        question["method"], question["nodes"], question["path"], question["drafter"], question["heads"]
    )
    llm = LLM(
        question["model"], max_model_len=4096, max_num_seqs=max(question["batches"]), disable_log_stats=False, **chosen
    )
    essays = [
        f"Write a detailed essay of several paragraphs about {topic}."
        for topic in ("tides", "glass", "bridges", "bees", "maps", "ink", "trains", "salt")
    ]
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)

    def ask(texts: list[str]) -> list[str]:
        messages = [[{"role": "user", "content": text}] for text in texts]
        return [output.outputs[0] for output in llm.chat(messages, params, use_tqdm=False)]

    copies = [f"Repeat this text word by word:\n\n{answer.text}" for answer in ask(essays)]
    for (text, prompts), batch in itertools.product({"new": essays, "copied": copies}.items(), question["batches"]):
        batch_prompts = [prompts[i % len(prompts)] for i in range(batch)]
        ask(batch_prompts)
        before, start = drafted(llm), time.perf_counter()
        count = sum(len(answer.token_ids) for answer in ask(batch_prompts))
        rate = round(count / (time.perf_counter() - start), 1)
        yield {"text": text, "batch": batch, "tokens_per_second": rate, "tau": tau(llm, before)}


PARTS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "device": describe,
    "identity": check_identity,
    "attention": time_attention,
    "lookup": time_lookup,
    "steps": time_steps,
    "end_to_end": time_end_to_end,
}

if __name__ == "__main__":
    main()
