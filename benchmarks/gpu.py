"""Everything there is to measure on a CUDA machine, by one command; writes JSON with provenance.

    python benchmarks/gpu.py --output gpu.json                     # all parts
    python benchmarks/gpu.py --output gpu.json --parts steps       # one of them
    python benchmarks/gpu.py --output self.json --interpret        # self-check on a CPU: tiny sizes, no meaningful time

Parts, each in processes of its own, so that one that fails leaves the others' figures:

tests       ``tests/v2``: every kernel against its reference, token identity of the engine, the negative controls
attention   one layer of an 8B model, by nodes, context and batch: each ``tree_attention`` against the reference
            (deviation) and the host's chain attention of as many tokens (time), and against the time in which the
            memory delivers the context's key/value
steps       an 8B-shaped target with random weights and an EAGLE head: verification, drafting and the share of a step in
            which the device idles, for plain decoding, the stock chain and trees with each ``tree_attention``
end_to_end  tokens/s of ``--model`` with ``--drafter``, beside plain decoding
projection  speedups from the measured steps and published acceptance lengths: no measurement

``tree_attention`` in the output is the table from which the default is to be chosen (whole steps where they were
measured, else one layer's attention), and which one won: the least geometric mean of time over the best of each row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("tests", "attention", "steps", "end_to_end")
#: Values of the option ``tree_attention``.
PATHS = ("triton", "flash", "xformers")
#: From the reference, relative to the largest output: bfloat16, rounded twice where parts are merged.
MAX_DEVIATION = 0.012
#: Published tau for LLaMA-2-chat 7B at T = 0, mean of three tasks, the bonus token counted (HASS paper).
PUBLISHED_TAU = {"eagle2": 4.61, "hass": 5.15}
#: The strongest published speedups on vLLM, by concurrent requests.
PUBLISHED_SPEEDUP = {1: 2.83, 8: 1.72, 64: 1.14}

SHAPE_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 16384,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--nodes", default="16,60")
    parser.add_argument("--model", help="a real target, for end_to_end")
    parser.add_argument("--drafter", help="its EAGLE head")
    parser.add_argument("--timeout", type=int, default=540, help="seconds for each process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    if args.output is None:
        parser.error("--output is missing")
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    run(args)
    return 0


# ---- the parent: one process per measurement


def run(args: argparse.Namespace) -> None:
    from vllm_specplug.environment import provenance

    results: dict[str, Any] = {"provenance": provenance("the host's own kernels and steps, same run")}
    results["interpreted"] = args.interpret
    parts = args.parts.split(",")
    contexts = [64] if args.interpret else [int(word) for word in args.contexts.split(",")]
    batches = [1, 2] if args.interpret else [int(word) for word in args.batches.split(",")]
    nodes = [6] if args.interpret else [int(word) for word in args.nodes.split(",")]
    common = {"interpret": args.interpret, "nodes": nodes, "contexts": contexts}

    def save() -> None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")

    results["device"] = ask({**common, "part": "device"}, args.timeout)
    if "tests" in parts:
        results["tests"] = run_tests(args.timeout)
        save()
    if "attention" in parts:
        results["attention"] = ask({**common, "part": "attention", "batches": batches}, args.timeout)
        save()
    if "steps" in parts:
        results["steps"] = {}
        for method, path, count in [
            ("plain", None, 0),
            *(("chain", None, count) for count in nodes),
            # The others run on CUDA only; of the interpreter's steps, one shows that the part works.
            *(("tree", path, count) for count in nodes for path in (PATHS[:1] if args.interpret else PATHS)),
        ]:
            question = {**common, "part": "steps", "method": method, "path": path, "nodes": count, "batches": batches}
            name = " ".join(str(word) for word in (method, path, count) if word)
            results["steps"][name] = ask(question, args.timeout)
            save()
    results["tree_attention"] = choose(results)
    if "steps" in parts:
        best = results["tree_attention"].get("best", PATHS[0])
        results["projection"] = project(results["steps"], f"tree {best} {nodes[-1]}")
    if "end_to_end" in parts and args.model and args.drafter:
        results["end_to_end"] = {}
        for method in ("plain", "tree"):
            question = {**common, "part": "end_to_end", "method": method, "model": args.model, "drafter": args.drafter}
            question |= {"nodes": nodes[-1], "path": results["tree_attention"].get("best", PATHS[0])}
            results["end_to_end"][method] = ask({**question, "batches": batches}, args.timeout)
            save()
    save()
    print(json.dumps(results, indent=1))
    print(path_table(results["tree_attention"]))


def ask(question: dict[str, Any], timeout: int) -> Any:
    """One worker's answer, or what went wrong."""
    command = [sys.executable, __file__, "--worker", json.dumps(question)]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if done.returncode or not lines:
        return {"error": "\n".join(done.stderr.splitlines()[-15:])}
    return {**json.loads(lines[-1].removeprefix("ANSWER ")), "seconds": round(time.perf_counter() - started, 1)}


def run_tests(timeout: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "tests/v2"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {timeout} s"}
    tail = done.stdout.splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", tail[-1])}
    failed = [line for line in tail if line.startswith(("FAILED", "ERROR", "E  "))]
    return {"returncode": done.returncode, **counts, "failed_tests": failed[:60]}


def choose(results: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each ``tree_attention`` by nodes, context and batch, and which is the best over all of them.

    A path that failed somewhere, or is not the reference's there, cannot win.
    """
    rows: dict[tuple[int, int, int], dict[str, float]] = {}
    wrong = set()
    for row in results.get("attention", {}).get("table", []):
        measured = {path: found["ms"] for path, found in row["paths"].items() if "ms" in found}
        wrong |= {path for path, found in row["paths"].items() if not found.get("deviation", 1) <= MAX_DEVIATION}
        rows[row["rows"] - 1, row["context"], row["batch"]] = measured
    unit = "one layer's attention"
    trees = {name.split()[1]: [] for name in results.get("steps", {}) if name.startswith("tree ")}
    steps = {
        (row["rows"] - 1, row["context"], row["batch"], path): row["step_ms"]
        for path in trees
        for name, found in results["steps"].items()
        if name.startswith(f"tree {path} ")
        for row in found.get("steps", [])
        if row["step_ms"]
    }
    if len(trees) > 1 and steps:
        unit = "whole steps"
        rows = {key[:3]: {} for key in steps}
        for (*key, path), value in steps.items():
            rows[tuple(key)][path] = value
    if not rows:
        return {"error": "nothing was measured"}
    costs = {
        path: math.exp(sum(math.log(row[path] / min(row.values())) for row in rows.values()) / len(rows))
        for path in PATHS
        if all(path in row for row in rows.values())
    }
    able = {path: cost for path, cost in costs.items() if path not in wrong}
    return {
        "measure": unit,
        "table": [dict(zip(("nodes", "context", "batch"), key, strict=True), ms=row) for key, row in rows.items()],
        "cost_over_best": {path: round(cost, 4) for path, cost in costs.items()},
        "wrong": sorted(wrong & costs.keys()),
        **({"best": min(able, key=able.get)} if able else {}),
        **({"note": "interpreted: the times mean nothing"} if results["interpreted"] else {}),
    }


def path_table(chosen: dict[str, Any]) -> str:
    """For people, in Markdown."""
    from vllm_specplug.tables import format_table

    if "table" not in chosen:
        return chosen["error"]

    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row['ms'][path]:.3f}" if path in row["ms"] else "-" for path in PATHS]
        return [*(str(row[name]) for name in ("nodes", "context", "batch")), *times]

    heads = ["nodes", "context", "batch", *(f"{path} ms" for path in PATHS)]
    table = format_table(heads, [cells(row) for row in chosen["table"]], markdown=True)
    return "\n".join([table, f"{chosen['measure']}; best: {chosen.get('best', 'none')}", chosen.get("note", "")])


def project(steps: dict[str, Any], name_of_trees: str) -> dict[str, Any]:
    """Speedup = tau * plain step / (verification + drafting): a projection."""
    projected: dict[str, Any] = {
        "note": "projection from measured step costs and published tau, not a measured speedup",
        "published_on_vllm": PUBLISHED_SPEEDUP,
        "speedup": [],
    }
    plain, tree = (steps.get(name, {}).get("steps", []) for name in ("plain", name_of_trees))
    for before, after in zip(plain, tree, strict=False):
        if not before["step_ms"] or not after["step_ms"]:  # no step was counted
            continue
        for name, tau in PUBLISHED_TAU.items():
            speedup = tau * before["step_ms"] / after["step_ms"]
            row = {"batch": after["batch"], "context": after["context"], "tau_of": name, "tau": tau}
            projected["speedup"].append({**row, "speedup": round(speedup, 2)})
    return projected


# ---- the workers


def worker(question: dict[str, Any]) -> int:
    if question["interpret"]:
        from vllm_specplug.interpreter import use_interpreter

        use_interpreter()
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    parts = {"device": describe, "attention": time_attention, "steps": time_steps, "end_to_end": time_end_to_end}
    print("ANSWER " + json.dumps(parts[question["part"]](question)), flush=True)
    return 0


def describe(_: dict[str, Any]) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"name": "none: Triton's interpreter"}
    properties = torch.cuda.get_device_properties(0)
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copy_ms = cuda_ms(lambda: buffer[: 1 << 29].copy_(buffer[1 << 29 :]))
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "bandwidth_gb_s": round(2 * (1 << 29) / copy_ms / 1e6, 1),
    }


def cuda_ms(call: Any, rounds: int = 50) -> float:
    """Median milliseconds of a call on the device; on a CPU, one wall time."""
    import torch

    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    flush = torch.empty(
        1 << 26, dtype=torch.int32, device="cuda"
    )  # the second-level cache holds nothing of the last call
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


def attention_paths(head_size: int, on_gpu: bool) -> dict[str, Any]:
    """What attends on each path, or why it cannot; off a GPU the reference stands in for FlashAttention."""
    from vllm_specplug.kernels.context_attention import ReferenceContext
    from vllm_specplug.kernels.merged_tree_attention import merged_tree_attention
    from vllm_specplug.kernels.triton_tree_attention import tree_attention
    from vllm_specplug.kernels.xformers_context import XformersContext

    makers: dict[str, Any] = {"flash": ReferenceContext, "xformers": functools.partial(XformersContext, head_size)}
    if on_gpu:
        from vllm_specplug.hosts.flash_context import FlashContext

        makers["flash"] = functools.partial(FlashContext, head_size)
    paths: dict[str, Any] = {"triton": tree_attention}
    for name, make in makers.items():
        try:
            paths[name] = functools.partial(merged_tree_attention, make(), uniform=True)
        except (ValueError, ImportError) as error:
            paths[name] = str(error)
    return paths


def time_attention(question: dict[str, Any]) -> dict[str, Any]:
    import torch

    from vllm_specplug.kernels.tree_attention import TOKEN_LAYOUT, make_inputs, tree_attention_reference
    from vllm_specplug.layout import ancestor_bits

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    heads = (32, 8, 128) if on_gpu else (2, 1, 16)
    bandwidth = describe(question).get("bandwidth_gb_s")
    paths, table = attention_paths(heads[2], on_gpu), []
    for nodes, context, batch in itertools.product(question["nodes"], question["contexts"], question["batches"]):
        rows = nodes + 1
        inputs = make_inputs(
            (context,) * batch, (rows,) * batch, num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2],
            block_size=16, dtype=dtype, kv_layout=TOKEN_LAYOUT, garbage=0.0, gap=0,
        )  # fmt: skip
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
        # A token's heads side by side, as in the host's default layout.
        inputs["kv_cache"] = inputs["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2)
        expected = torch.empty_like(inputs["output"], dtype=torch.float32)
        tree_attention_reference(**{**inputs, "output": expected})
        del inputs["kv_layout"]
        inputs["bits"] = ancestor_bits(inputs.pop("mask"))
        sizes = dict(max_query_len=rows, max_context_len=context)
        row: dict[str, Any] = {"batch": batch, "context": context, "rows": rows, "paths": {}}
        for name, attend in paths.items():
            row["paths"][name] = measure(attend, {**inputs, **sizes}, expected)
        for splits in (1, 2, 4, 8, 16, 32) if on_gpu else (2,):
            call = functools.partial(paths["triton"], **inputs, **sizes, num_splits=splits)
            row[f"triton_ms_{splits}_splits"] = cuda_ms(call)
        if on_gpu:
            row["flash_chain_ms"] = cuda_ms(flash_chain(inputs, batch, context, rows))
            row["ratio_to_chain"] = {
                name: round(found["ms"] / row["flash_chain_ms"], 3)
                for name, found in row["paths"].items()
                if "ms" in found
            }
            row["floor_ms"] = batch * context * heads[1] * 2 * heads[2] * 2 / bandwidth / 1e6
        table.append(row)
    return {"layer": heads, "dtype": str(dtype), "table": table}


def measure(attend: Any, inputs: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Milliseconds of a path, and its largest deviation relative to the largest output."""
    if isinstance(attend, str):
        return {"error": attend}
    inputs["output"].fill_(float("nan"))
    try:
        attend(**inputs)
        deviation = (inputs["output"].float() - expected).abs().max() / expected.abs().max()
        return {"ms": cuda_ms(functools.partial(attend, **inputs)), "deviation": float(deviation)}
    except Exception as error:  # of any library: the other paths are still to be measured
        return {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}


def flash_chain(inputs: dict[str, Any], batch: int, context: int, rows: int) -> Any:
    """The host's FlashAttention over as many rows as a chain, on pages that hold them."""
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


def write_models(folder: Path, tiny_ones: bool) -> tuple[Path, Path]:
    """Configurations of a target and an EAGLE head; the host fills them with random weights (tiny ones: on disk)."""
    from tests import tiny

    if tiny_ones:
        return tiny.write_target(folder / "target"), tiny.write_drafter(folder / "eagle")
    for name, changes in (("target", {}), ("eagle", {"num_hidden_layers": 1, "bias": False})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(tiny.llama_config(**{**SHAPE_8B, **changes})))
    import torch
    from safetensors.torch import save_file

    # The plugin looks into a drafter's file before the host starts.
    h, i = SHAPE_8B["hidden_size"], SHAPE_8B["intermediate_size"]
    kv = SHAPE_8B["num_key_value_heads"] * SHAPE_8B["head_dim"]
    shapes = {
        "fc.weight": (h, 2 * h),
        "layers.0.self_attn.q_proj.weight": (h, h),
        "layers.0.self_attn.k_proj.weight": (kv, h),
        "layers.0.self_attn.v_proj.weight": (kv, h),
        "layers.0.self_attn.o_proj.weight": (h, h),
        "layers.0.mlp.gate_proj.weight": (i, h),
        "layers.0.mlp.up_proj.weight": (i, h),
        "layers.0.mlp.down_proj.weight": (h, i),
        "layers.0.post_attention_layernorm.weight": (h,),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    save_file(tensors, folder / "eagle" / "model.safetensors", metadata={"format": "pt"})
    return folder / "target", folder / "eagle"


def speculative_config(method: str, drafter: str, nodes: int, path: str | None) -> dict[str, Any]:
    if method == "plain":
        return {}
    if method == "chain":
        return {"speculative_config": {"method": "eagle", "model": drafter, "num_speculative_tokens": nodes}}
    depth, top_k = (6, 10) if nodes > 20 else (3, 3)
    tree = {"draft_depth": depth, "draft_top_k": top_k, "budget": "fixed", "min_node_value": 0, "min_level_value": 0}
    tree["tree_attention"] = path
    return {"speculative_config": {"method": "eagle2", "model": drafter, "num_speculative_tokens": nodes, **tree}}


class StepClock:
    """Times what the runner does for batches of full drafts: device time of its parts, wall time from step to step."""

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

    def medians(self) -> dict[str, float]:
        import torch

        def median(values: list[float]) -> float | None:
            values = values[3:] if len(values) > 6 else values  # the first ones still meet the prompts' steps
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


def idle_share(generate: Any) -> float | None:
    """The share of the wall time in which no kernel ran, from a profile of one call."""
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
    # The prompt's own steps are longer than all others: the second half of the time holds decoding only.
    spans = [span for span in spans if span[0] > (spans[0][0] + spans[-1][1]) / 2]
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1 - busy / (spans[-1][1] - spans[0][0]), 4)


def time_steps(question: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    interpret, method, nodes = question["interpret"], question["method"], question["nodes"]
    rows = 1 if method == "plain" else nodes + 1
    tokens = 4 if interpret else 40
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_models(Path(folder), interpret)
        options: dict[str, Any] = {"load_format": "dummy", "max_model_len": max(question["contexts"]) + 4096}
        if interpret:
            options = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "block_size": 32,
                       "kv_cache_memory_bytes": 64 << 20}  # fmt: skip
        llm = LLM(
            str(target), skip_tokenizer_init=True, max_num_seqs=max(question["batches"]), enable_prefix_caching=False,
            **options, **speculative_config(method, str(drafter), nodes, question["path"]),
        )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    clock, table = StepClock(runner, rows), []
    vocab = llm.llm_engine.model_config.get_vocab_size()
    for batch in question["batches"]:
        for context in question["contexts"]:
            prompts = [{"prompt_token_ids": random.choices(range(3, vocab), k=context)} for _ in range(batch)]

            def generate(prompts=prompts):
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                llm.generate(prompts, params, use_tqdm=False)

            generate()
            clock.reset()
            generate()
            row = {"batch": batch, "context": context, "rows": rows, **clock.medians()}
            table.append({**row, "idle_share": idle_share(generate)})
    return {"steps": table}


def time_end_to_end(question: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        question["model"], max_model_len=4096, max_num_seqs=max(question["batches"]), disable_log_stats=False,
        **speculative_config(question["method"], question["drafter"], question["nodes"], question["path"]),
    )  # fmt: skip
    prompts = [
        f"Write a detailed essay of several paragraphs about {topic}."
        for topic in ("tides", "glass", "bridges", "bees", "maps", "ink", "trains", "salt")
    ]
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    table = []
    for batch in question["batches"]:
        messages = [[{"role": "user", "content": prompts[i % len(prompts)]}] for i in range(batch)]
        llm.chat(messages, params, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.chat(messages, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        table.append({"batch": batch, "tokens_per_second": round(count / seconds, 1)})
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts = values.get("vllm:spec_decode_num_drafts", 0)
    tau = round(1 + values["vllm:spec_decode_num_accepted_tokens"] / drafts, 3) if drafts else None
    return {"throughput": table, "tau": tau}


if __name__ == "__main__":
    sys.exit(main())
