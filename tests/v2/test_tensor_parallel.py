"""Two tensor-parallel ranks of the V2 runner, in processes of their own: plain decoding's tokens, on both ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams, envs

from tests.hosts.conftest import make_prompts
from tests.v2.conftest import ENGINE

PROGRAM = """
import itertools, json, sys
from tests.hosts import conftest
from tests.doubles import interpreted_ranks
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, options, params, out = sys.argv[1:]
    llm = LLM(model, **conftest.ENGINE | json.loads(options))
    round_budget = getattr(llm.llm_engine.engine_core.engine_core.scheduler, "round_budget", None)
    if round_budget:
        turns = itertools.cycle((7, 0, 7, 7))
        round_budget.plan = lambda _: next(turns)
    params = [SamplingParams(**one) for one in json.loads(params)]
    results, tau = [], 1
    for number in range(3):
        if number == 2:
            tau = conftest.acceptance_length(llm)
            llm.collective_rpc("spoil")
            llm.reset_prefix_cache()
        outputs = llm.generate(conftest.make_prompts(4, longest=40), params, use_tqdm=False)
        results.append({"tokens": conftest.token_ids(outputs), "ranks": llm.collective_rpc("kept")})
    with open(out, "w") as file:
        json.dump({"results": results, "tau": tau}, file)
    llm.llm_engine.engine_core.shutdown()
"""
#: Imported by Python at its start: the ranks are new processes.
SITE = "from tests.doubles.interpreter import use_interpreter\n\nuse_interpreter()\n"

#: The last request has neither a seed nor temperature 0.
PARAMS = [
    {"temperature": 0.8 * (i % 2), "seed": None if i == 3 else i, "max_tokens": 8, "ignore_eos": True} for i in range(4)
]
EAGLE = {"method": "eagle2", "num_speculative_tokens": 7, "draft_depth": 3, "draft_top_k": 3}

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the program interprets Triton"),
]


def run(model: Path, speculative: dict, folder: Path, **options) -> dict:
    """Answer twice in two ranks, and a third time while the second rank drafts other tokens."""
    program, out, site = folder / "program.py", folder / "out.json", folder / "site"
    site.mkdir()
    program.write_text(PROGRAM)
    (site / "sitecustomize.py").write_text(SITE)
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "PYTHONPATH": os.pathsep.join((str(site), str(Path(__file__).parents[2]))),
        "XDG_CACHE_HOME": str(folder),
        "VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT,
    }
    options = {
        **ENGINE,
        "tensor_parallel_size": 2,
        "speculative_config": speculative,
        "worker_extension_cls": "tests.doubles.interpreted_ranks.Rank",
        **options,
    }
    command = [sys.executable, str(program), str(model), json.dumps(options), json.dumps(PARAMS), str(out)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain(plainly):
    """Plain vLLM's answers of one rank."""
    return plainly(make_prompts(4, longest=40), [SamplingParams(**one) for one in PARAMS])[0]


def seeded(tokens: list) -> list:
    """Without the request that has neither a seed nor temperature 0."""
    return tokens[:3]


def check(found: dict, plain: list) -> None:
    """Plain decoding's tokens; both ranks hold the same tokens, of the request without a seed too.  Not so where the
    ranks draft differently."""
    same = [
        seeded(result["tokens"]) == seeded(plain) and result["ranks"][0] == result["ranks"][1]
        for result in found["results"]
    ]
    assert same == [True, True, False]


def test_reduced_vocabulary(checkpoints, plain, tmp_path):
    """The rows of the drafter's LM head lie on both ranks."""
    found = run(checkpoints["target"], {**EAGLE, "model": str(checkpoints["reduced"])}, tmp_path)
    check(found, plain)
    assert found["tau"] > 1.1


def test_union_that_learns(checkpoints, plain, tmp_path):
    """What the lookup of a union learns changes its trees: both ranks learn the same at the same step."""
    union = {"method": "union", "sources": [{**EAGLE, "model": str(checkpoints["eagle"])}, {"method": "lookup"}]}
    found = run(checkpoints["target"], {**union, "num_speculative_tokens": 12}, tmp_path)
    check(found, plain)
    first, second, _ = (result["ranks"][0]["tables"] for result in found["results"])
    assert first != second
    assert found["tau"] > 1.1


def test_measured_budget(checkpoints, plain, tmp_path):
    """The first rank's clock decides which steps are timed at start; the scheduler decides what is drafted.  Here it
    takes turns: in the interpreter drafts cost more than they save, so that it might draft nothing."""
    speculative = {**EAGLE, "model": str(checkpoints["eagle"]), "budget": "measured"}
    found = run(checkpoints["target"], speculative, tmp_path, max_num_seqs=4)
    check(found, plain)
    assert found["tau"] > 1.1
