"""What the measured budget's own decision takes: which drafters to run, which nodes to verify, and learning from it.

    python -m pytest benchmarks/test_decision.py

Chains of eight nodes for so many requests; nothing else runs, no engine.
"""

import numpy as np
import pytest
import torch

from vllm_specplug.budget import Arm, Budget
from vllm_specplug.costs import CostModel
from vllm_specplug.tree import from_flat
from vllm_specplug.types import Draft

NUM_NODES, PROMPT = 8, 100


@pytest.fixture(params=[1, 8, 32])
def num_reqs(request):
    return request.param


def test_decision(benchmark, num_reqs):
    costs = CostModel({"verify": {1: 0.02, 512: 0.0201}}, {"rows": 512, "requests": 64})
    arm = Arm("eagle2", host=True, free=False)
    budget = Budget(costs, (arm,), num_nodes=NUM_NODES, max_levels=6, level_width=3, max_rows=512)
    parents = torch.arange(-1, NUM_NODES).repeat(num_reqs, 1)
    tree = from_flat(torch.arange(NUM_NODES + 1).repeat(num_reqs, 1), parents, torch.full((num_reqs,), NUM_NODES + 1))
    log_values = torch.linspace(0, -3, NUM_NODES + 1).repeat(num_reqs, 1)
    draft, names = Draft(tree, log_values), [str(i) for i in range(num_reqs)]
    wanted, num_tokens = np.ones(num_reqs, dtype=bool), np.full(num_reqs, PROMPT)
    token_ids = np.zeros((num_reqs, 2048), dtype=np.int32)
    token_ids[:, PROMPT : PROMPT + NUM_NODES] = np.arange(1, NUM_NODES + 1)

    def decide():
        budget.plan(num_reqs)
        budget.select(draft, names, num_tokens, wanted, 1e-3)
        budget.learn(names, token_ids, num_tokens + 3)

    benchmark(decide)
