"""Two tensor-parallel ranks on the V2 runner, in processes of their own: plain decoding's tokens, on both ranks."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import make_prompts
from tests.hosts.test_tensor_parallel import needs_two_cores, run
from tests.v2.conftest import ENGINE

PROGRAM = """
import os
from tests.doubles.interpreter import use_interpreter
use_interpreter()  # each rank imports this file
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
import json, sys
from tests.doubles import interpreted
from tests.hosts.conftest import ENGINE, acceptance_length, make_prompts, token_ids
from tests.v2.test_tensor_parallel import make_params
from vllm import LLM

def kept(worker):
    runner, states = worker.model_runner, worker.model_runner.req_states
    trees = runner.speculator.trees
    return {"tokens": states.all_token_ids.gpu.tolist(), "parents": trees.parents.tolist(),
            "drafts": states.draft_tokens.tolist(), "traces": runner.trace.is_on,
            "counts": any(runner.speculator.timer._counters.values())}

if __name__ == "__main__":
    model, options, runs, out = sys.argv[1:]
    llm = LLM(model, **ENGINE | json.loads(options))
    outputs = llm.generate(make_prompts(4, seed=7, longest=40), make_params(), use_tqdm=False)
    results = [{"tokens": token_ids(outputs), "ranks": llm.collective_rpc(kept)}]
    with open(out, "w") as file:
        json.dump({"results": results, "tau": acceptance_length(llm)}, file)
"""


def make_params() -> list[SamplingParams]:
    """Greedy, seeded, one that is sampled depth by depth, and one without a seed."""
    kinds = ({"temperature": 0}, {"seed": 1}, {"seed": 2, "repetition_penalty": 1.3}, {})
    return [SamplingParams(max_tokens=8, ignore_eos=True, **kind) for kind in kinds]


@needs_two_cores
@pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are CPU processes")
def test_same_as_plain(checkpoints, plainly, tmp_path):
    """A drafter with a reduced vocabulary, whose rows of the LM head lie on both ranks, and lookup."""
    eagle = {"method": "eagle2", "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
    sources = [{**eagle, "model": str(checkpoints["reduced"])}, {"method": "lookup"}]
    trace = tmp_path / "trees.jsonl"
    union = {"method": "union", "sources": sources, "num_speculative_tokens": 12, "trace_trees": str(trace)}
    found = run(checkpoints["target"], union, tmp_path, text=PROGRAM, **ENGINE)
    (result,) = found["results"]
    plain, _ = plainly(make_prompts(4, seed=7, longest=40), make_params())
    assert result["tokens"][:3] == plain[:3]
    first, second = result["ranks"]
    for name in ("tokens", "parents", "drafts"):
        assert first[name] == second[name], name
    assert found["tau"] > 1.1
    assert (first["traces"], second["traces"]) == (True, False)
    assert (first["counts"], second["counts"]) == (True, False)
    assert trace.read_text()
