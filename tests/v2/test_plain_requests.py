"""Requests that are decoded without drafts beside others with them: structured output, and speculation turned off."""

from __future__ import annotations

import re

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from tests.doubles import tiny
from tests.hosts.conftest import TREE, runner_of
from tests.hosts.test_sampling import check_same
from tests.v2.conftest import ENGINE, PLAIN
from vllm_specplug.hosts.v2 import scheduler as v2_scheduler

#: With a tokenizer, which grammars need.
OPTIONS = {"skip_tokenizer_init": False}
SPECULATIVE = {**TREE, "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
REGEX = r"(ab|er|[a-e]{2,5}): [0-9]{1,12}(true|false)"
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=1, max_tokens=9, structured_outputs=StructuredOutputsParams(regex=REGEX)),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"speculation": False}),
]


@pytest.fixture(scope="module", autouse=True)
def host_without_its_mask_kernel():
    """The host's kernel for grammar masks does not run in the interpreter: the same in torch."""

    def apply(self, logits, input_batch, req_ids, bitmask):
        rows = []
        for req_id in req_ids:
            place = input_batch.req_ids.index(req_id)
            rows += range(int(input_batch.cu_num_logits_np[place]), int(input_batch.cu_num_logits_np[place + 1]))
        words = torch.from_numpy(bitmask).unsqueeze(2)
        allowed = (words >> torch.arange(32) & 1).bool().flatten(1)[:, : logits.shape[1]]
        assert len(rows) == len(allowed)
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(StructuredOutputsWorker, "apply_grammar_bitmask", apply)
        yield


@pytest.fixture(scope="module")
def start(engine, checkpoints):
    tiny.write_tokenizer(checkpoints["target"])
    speculative = {**SPECULATIVE, "model": str(checkpoints["eagle"])}
    return lambda **options: engine(speculative_config=speculative, **OPTIONS, **ENGINE, **options)


@pytest.fixture(scope="module")
def expected(engine, start, prompts):
    return engine(**OPTIONS, **PLAIN).generate(prompts, PARAMS, use_tqdm=False)


def drafted_nodes(llm, monkeypatch):
    """By place of the request: the nodes of every verification it took part in."""
    runner, seen = runner_of(llm), {}
    honest = runner.rejection_sampler

    def look(logits, input_batch, *args):
        for req_id, count in zip(input_batch.req_ids, input_batch.num_draft_tokens_per_req.tolist(), strict=True):
            seen.setdefault(int(req_id.split("-")[0]), []).append(count)
        return honest(logits, input_batch, *args)

    monkeypatch.setattr(runner, "rejection_sampler", look)
    return seen


def check(llm, prompts, expected, monkeypatch):
    first = int(llm.request_counter.counter)
    seen = drafted_nodes(llm, monkeypatch)
    found = llm.generate(prompts, PARAMS, use_tqdm=False)
    check_same(found, expected)
    assert re.fullmatch(REGEX, found[1].outputs[0].text) or found[1].outputs[0].finish_reason == "length"
    free, structured, off = (seen.get(first + place, []) for place in range(3))
    assert max(free) == 9
    assert not any(structured) and not any(off)


def test_same_as_plain(start, prompts, expected, monkeypatch):
    check(start(), prompts, expected, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the default")
def test_asynchronous_scheduling(start, prompts, expected, asynchronous, monkeypatch):
    llm = start(seed=0)
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, v2_scheduler.AsyncTreeScheduler)
    check(llm, prompts, expected, monkeypatch)


def test_control(start, prompts, expected, monkeypatch):
    """Where they get drafts, which the host's masks take for a chain, the answers or the counts differ."""
    monkeypatch.setattr(v2_scheduler, "decodes_plainly", lambda _: False)
    with pytest.raises(AssertionError):
        check(start(), prompts, expected, monkeypatch)
