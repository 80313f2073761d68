"""Two data-parallel ranks of a mixture-of-experts target, each with half of every expert: plain decoding's tokens.

vLLM runs their target's forwards together, and an empty one where a rank has no requests.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state

from tests.doubles import lockstep
from tests.doubles.architectures import ARCHITECTURES, write_head, write_target
from tests.doubles.forked import answer_in_new_process, needs_two_cores
from tests.hosts.conftest import ENGINE as HOSTS_ENGINE
from tests.hosts.conftest import acceptance_length, make_prompts, token_ids
from tests.v2.conftest import ENGINE, PLAIN, answers, compute_in_torch
from vllm_specplug.gpu.drafters.eagle import alone

PROMPTS = make_prompts(4, longest=40)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8, ignore_eos=True) for i in range(4)]
#: The second rank drafts for one request while the first has three, and then for none.
SHARES = (slice(0, 3), slice(3, 4))
TREE = {"num_speculative_tokens": 7, "draft_depth": 3, "draft_top_k": 3}

pytestmark = [needs_two_cores, pytest.mark.skipif(torch.cuda.is_available(), reason="the program interprets Triton")]


def serve(rank: int, model: str, speculative: dict[str, Any]) -> dict[str, Any]:
    """Answer the requests of a rank."""
    compute_in_torch(pytest.MonkeyPatch())  # to the end of this process
    options = {"speculative_config": speculative, **ENGINE}
    llm = LLM(model, **HOSTS_ENGINE | options)
    before, share = sum(llm.collective_rpc(lockstep.exchanges)), SHARES[rank]
    outputs = llm.generate(PROMPTS[share], PARAMS[share], use_tqdm=False)
    sent = sum(llm.collective_rpc(lockstep.exchanges)) - before
    return {"tokens": token_ids(outputs), "tau": acceptance_length(llm), "exchanges": sent}


def program(model: str, speculative: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    return lockstep.on_two_ranks(serve, Path(folder), model, speculative)


@pytest.fixture(scope="module")
def target(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_head(folder / "head", write_target(folder / "target", ARCHITECTURES["Qwen3-MoE"]))
    checkpoints["experts"] = folder / "target"
    return folder


def test_a_draft_phase_knows_of_no_other_replica():
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2, data_parallel_index=1), cache="kept")
    found = alone(config)
    assert (found.parallel_config.data_parallel_size, found.parallel_config.data_parallel_index) == (1, 1)
    assert found.cache == "kept" and config.parallel_config.data_parallel_size == 2


def test_same_as_plain(engine, target, tmp_path, monkeypatch):
    """Of a head and of lookup; only forwards of the target exchange rows between the ranks."""
    # The process's groups are of its first engine, which may have no experts.
    if parallel_state._TP is not None and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)
    plain, _ = answers(engine(target="experts", **PLAIN), PROMPTS, PARAMS)
    head = {"method": "eagle2", **TREE, "model": str(target / "head")}
    union = {"method": "union", "sources": [head, {"method": "lookup"}], "num_speculative_tokens": 12}
    found = answer_in_new_process(program, "tests.v2.conftest", tmp_path, str(target / "target"), union, str(tmp_path))
    assert list(itertools.chain(*(one["tokens"] for one in found))) == plain
    assert found[0]["exchanges"] == found[1]["exchanges"] > 0
    assert found[0]["tau"] > 1.1
