"""Time of the measured budget's own decisions: which drafters run, which nodes are verified, and learning from them.

    SPECPLUG_QUESTIONS=spec_bench.jsonl python -m pytest -s benchmarks/micro/test_decision.py

``test_decision`` decides over chains of eight nodes, without an engine.  ``test_decision_in_the_engine`` measures in
the engine, where other work has emptied the caches, by method and number of questions at once, beside the step's time.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_specplug.bench.methods import METHODS, Method
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.bench.workers import PROBE_MODULE, started
from vllm_specplug.budget.choose import Budget, StepRecord
from vllm_specplug.budget.cost import StepCost
from vllm_specplug.budget.planner import Arm
from vllm_specplug.core.tree import from_flat
from vllm_specplug.types import Draft
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare

NUM_NODES, PROMPT = 8, 100
SIZES, MAX_TOKENS = (1, 8, 32), 64
OUTPUT = Path(__file__).parents[2] / ".benchmarks" / "decision.json"


@pytest.fixture(params=[1, 8, 32])
def num_reqs(request):
    return request.param


def test_decision(benchmark, num_reqs):
    line = {1: 1e-3, 512: 1.1e-3}
    cost = StepCost({"verify": {1: 0.02, 512: 0.0201}, "read": line, "level": line}, 512)
    arm = Arm("eagle2", model=True, model_free=False)
    budget = Budget(cost, (arm,), num_nodes=NUM_NODES, max_levels=6, level_width=3, max_rows=512)
    parents = torch.arange(-1, NUM_NODES).repeat(num_reqs, 1)
    tree = from_flat(torch.arange(NUM_NODES + 1).repeat(num_reqs, 1), parents, torch.full((num_reqs,), NUM_NODES + 1))
    log_values = torch.linspace(0, -3, NUM_NODES + 1).repeat(num_reqs, 1)
    draft, names = Draft(tree, log_values), [str(i) for i in range(num_reqs)]
    wanted, num_tokens = np.ones(num_reqs, dtype=bool), np.full(num_reqs, PROMPT)
    token_ids = np.zeros((num_reqs, 2048), dtype=np.int32)
    token_ids[:, PROMPT : PROMPT + NUM_NODES] = np.arange(1, NUM_NODES + 1)

    def decide():
        budget.plan(num_reqs)
        record = StepRecord(num_reqs, NUM_NODES * num_reqs, num_accepted=2 * num_reqs, drafting=1e-3)
        budget.select(draft, names, num_tokens, wanted, record)
        budget.learn(record, 0.021)
        budget.acceptance.learn(names, token_ids, num_tokens + 3)

    benchmark(decide)


@pytest.mark.parametrize("name", ["eagle2", "union"])
def test_decision_in_the_engine(benchmark, name):
    path = os.environ.get("SPECPLUG_QUESTIONS")
    if not path:
        pytest.skip("set SPECPLUG_QUESTIONS to a JSONL file of questions")
    questions = read_questions(Path(path), max(SIZES))
    engine = {"model": str(prepare()), "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": max(SIZES)}
    engine |= {"enable_prefix_caching": False}
    method = Method(name, METHODS[name] | {"budget": "measured"})

    def measure() -> dict[int, dict[str, float]]:
        found = {}
        with started([method], engine, 1, PROBE_MODULE) as [worker]:
            for size in SIZES:
                texts = [questions[i * len(questions) // size].text for i in range(size)]
                worker.send({"texts": texts, "max_tokens": MAX_TOKENS, "together": True})
                found[size] = worker.receive()
            worker.close()
        return found

    found = benchmark.pedantic(measure, rounds=1)
    for size, stages in found.items():
        share = stages["decide_ms"] / stages["round_ms"]
        print(f"{name}, {size} at once: {stages['decide_ms']:.2f} ms of {stages['round_ms']:.1f} ms ({share:.1%})")
    known = json.loads(OUTPUT.read_text())["methods"] if OUTPUT.exists() else {}
    OUTPUT.parent.mkdir(exist_ok=True)
    report = {"provenance": provenance("the whole step, same run"), "methods": known | {name: found}}
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
