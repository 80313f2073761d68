"""Times the whole verification step of a tree against vLLM's step of a chain of as many tokens.

    python -m pytest -s benchmarks/micro/test_verification_step.py --benchmark-json=out.json

SmolLM2-135M-Instruct in bf16, batch 1, both engines alive, taking turns.  A step is everything except drafting:
inputs, forward, logits, walk and key/value commit.  Read ``extra_info.ratio_to_chain``: median over median.
"""

import statistics

import pytest

from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.utils.step_probe import StepProbe

BAR = 1.10
TURNS = 6


@pytest.fixture(scope="module", params=[16, 32, 60])
def engines(request):
    tree = {"method": "eagle2", "model": "smollm2-135m-instruct", "num_speculative_tokens": request.param}
    chain = {"method": "ngram", "num_speculative_tokens": request.param, "prompt_lookup_max": 2}
    model = str(prepare())
    whole = {"budget": "fixed", "draft_depth": 4, "draft_top_k": 8, "min_node_value": 0.0, "min_level_value": 0.0}
    pair = StepProbe(model, tree | whole), StepProbe(model, chain)
    yield request.param, *pair
    for engine in pair:
        engine.close()


@pytest.mark.parametrize("context", [100, 1000])
def test_step(benchmark, engines, context):
    num_nodes, tree, chain = engines
    seconds = {"tree": [], "chain": []}

    def turn():
        for name, engine in (("chain", chain), ("tree", tree)):
            seconds[name] += engine.ask({"context": context, "max_tokens": 24})["seconds"]

    turn()  # warm-up
    for steps in seconds.values():
        steps.clear()
    benchmark.pedantic(turn, rounds=TURNS, iterations=1)
    medians = {name: statistics.median(steps) for name, steps in seconds.items()}
    ratio = medians["tree"] / medians["chain"]
    benchmark.extra_info.update(provenance(baseline="stock vLLM, chain of as many tokens, same run, taking turns"))
    benchmark.extra_info.update({"ratio_to_chain": ratio, "bar": BAR, "within_bar": ratio <= BAR, "median_s": medians})
    print(
        f"\n{num_nodes} nodes, context {context}: tree {medians['tree'] * 1e3:.1f} ms, "
        f"chain {medians['chain'] * 1e3:.1f} ms, ratio {ratio:.2f} (bar {BAR:.2f})"
    )
