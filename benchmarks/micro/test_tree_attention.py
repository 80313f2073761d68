"""Times tree attention against vLLM's chain attention on as many tokens.

    python -m pytest -s benchmarks/micro/test_tree_attention.py

One layer of SmolLM2-135M, batch 1, trees of random shape.  The two kernels alternate call by call, so that both run
under the same load.  Read ``extra_info.ratio_to_chain`` (``--benchmark-json``; also printed): tree time over chain time
of the fastest calls, lower is better.  With one thread no barrier stalls if other work uses the machine.
"""

import time

import pytest
import torch

from tests.doubles.attention_inputs import cpu_arguments, make_inputs
from tests.unit.kernels.test_tree_attention import vllm_chain_attention
from vllm_specplug.cpu.kernels.tree_attention import select_backend, tree_attention

ROUNDS = 200


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_nodes", [16, 32, 60])
@pytest.mark.parametrize("context", [100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_verification(benchmark, threads, dtype, context, num_nodes):
    ops = pytest.importorskip("vllm._custom_ops")
    inputs = make_inputs((context,), (num_nodes + 1,), dtype=dtype, garbage=0.0)
    chain = vllm_chain_attention(ops, inputs, "vec")
    chain_seconds = []

    def timed_chain():
        start = time.perf_counter()
        chain()
        chain_seconds.append(time.perf_counter() - start)

    benchmark.extra_info["backend"] = select_backend()
    sizes = {"rounds": ROUNDS, "iterations": 1, "warmup_rounds": 5}
    benchmark.pedantic(tree_attention, kwargs=cpu_arguments(**inputs), setup=timed_chain, **sizes)
    seconds, ratio = benchmark.stats.stats.min, benchmark.stats.stats.min / min(chain_seconds)
    benchmark.extra_info["ratio_to_chain"] = ratio
    case = f"{threads} threads, {dtype}, context {context}, {num_nodes} nodes"
    print(f"{case}: {seconds * 1e6:.0f} us, ratio {ratio:.2f}")
