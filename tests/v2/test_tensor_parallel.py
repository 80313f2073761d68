"""Two tensor-parallel ranks of the V2 runner, in processes of their own: plain decoding's tokens, on both ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.doubles.forked import answer_in_new_process, needs_two_cores
from tests.hosts.conftest import ENGINE as HOSTS_ENGINE
from tests.hosts.conftest import acceptance_length, make_prompts, token_ids
from tests.v2.conftest import ENGINE, compute_in_torch

#: The last request has neither a seed nor temperature 0.
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=None if i == 3 else i, max_tokens=8, ignore_eos=True)
    for i in range(4)
]
TREE = {"num_speculative_tokens": 7, "draft_depth": 3, "draft_top_k": 3}
EAGLE = {"method": "eagle2", **TREE, "budget": "fixed"}

#: In ``make test``, two tensor-parallel ranks run on V1, and two data-parallel ones here.
pytestmark = [
    pytest.mark.wide,
    needs_two_cores,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the program interprets Triton"),
]


def kept(worker: Any) -> dict[str, Any]:
    """Return the tokens of this rank's requests, and what it has learned."""
    states, speculator = worker.model_runner.req_states, getattr(worker.model_runner, "speculator", None)
    found = {"tokens": states.all_token_ids.gpu.tolist(), "lengths": states.total_len.gpu.tolist()}
    if learning := getattr(speculator, "learning", None):
        found["tables"] = [table.tolist() for _, table in learning._proposer.tables()]
    return found


def spoil(worker: Any) -> None:
    """Let the second rank draft other tokens than the first one."""
    speculator = worker.model_runner.speculator
    if worker.rank == 1:
        honest = speculator.propose
        speculator.propose = lambda *args, **kwargs: (honest(*args, **kwargs) + 1) % 40


def break_second(worker: Any) -> None:
    """Let the drafter of the second rank raise an error, which vLLM itself would not hear of."""
    if worker.rank == 1:
        for growth in worker.model_runner.speculator._growths.values():
            growth._grow = None


def stops(llm: LLM) -> bool:
    """Return whether an error in one rank's drafter stops the server."""
    llm.collective_rpc(break_second)
    try:
        llm.generate(make_prompts(2, longest=40), PARAMS[:2], use_tqdm=False)
    except Exception:
        return True
    return False


def program(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Answer twice in two ranks, a third time while the second rank drafts other tokens, and once while it fails."""
    compute_in_torch(pytest.MonkeyPatch())  # to the end of this process
    llm = LLM(model, **HOSTS_ENGINE | options)
    round_budget = getattr(llm.llm_engine.engine_core.engine_core.scheduler, "round_budget", None)
    if round_budget:
        turns = itertools.cycle((7, 0, 7, 7))
        round_budget.plan = lambda _: next(turns)
    results, tau = [], 1.0
    for number in range(3):
        if number == 2:
            tau = acceptance_length(llm)
            llm.collective_rpc(spoil)
            llm.reset_prefix_cache()
        outputs = llm.generate(make_prompts(4, longest=40), PARAMS, use_tqdm=False)
        results.append({"tokens": token_ids(outputs), "ranks": llm.collective_rpc(kept)})
    return {"results": results, "tau": tau, "stops": stops(llm)}


def run(model: Path, speculative: dict, folder: Path, **options) -> dict:
    options = {**ENGINE, "tensor_parallel_size": 2, "speculative_config": speculative, **options}
    return answer_in_new_process(program, "tests.v2.conftest", folder, str(model), options)


@pytest.fixture(scope="module")
def plain(plainly):
    """Plain vLLM's answers of one rank."""
    return plainly(make_prompts(4, longest=40), PARAMS)[0]


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
    assert found["stops"]


def test_union_that_learns(checkpoints, plain, tmp_path):
    """What the lookup of a union learns changes its trees: both ranks learn the same at the same step."""
    eagle = {"method": "eagle2", **TREE, "model": str(checkpoints["eagle"])}
    union = {"method": "union", "sources": [eagle, {"method": "lookup"}], "budget": "fixed"}
    found = run(checkpoints["target"], {**union, "num_speculative_tokens": 12}, tmp_path)
    check(found, plain)
    first, second, _ = (result["ranks"][0]["tables"] for result in found["results"])
    assert first != second
    assert found["tau"] > 1.1


def test_measured_budget_and_a_reduced_vocabulary(checkpoints, plain, tmp_path):
    """The first rank's clock decides which steps are timed at start; the scheduler decides what is drafted.  Here it
    takes turns: in the interpreter drafts cost more than they save, so that it might draft nothing.  The rows of the
    drafter's LM head lie on both ranks."""
    speculative = {**EAGLE, "model": str(checkpoints["reduced"]), "budget": "measured"}
    found = run(checkpoints["target"], speculative, tmp_path, max_num_seqs=4)
    check(found, plain)
    assert found["tau"] > 1.1
