"""Requests of several kinds in one batch: structured output with drafts, speculation turned off, and free ones."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from tests.doubles import tiny
from tests.doubles.constants import constants_of
from tests.hosts.conftest import runner_of, some
from tests.hosts.test_sampling import check_same
from tests.v2.conftest import ENGINE, PLAIN
from vllm_specplug.config import Eagle2Options
from vllm_specplug.gpu import scheduler as v2_scheduler
from vllm_specplug.vllm import grammars

#: With a tokenizer, which grammars need.
OPTIONS = {"skip_tokenizer_init": False}
NUM_NODES = 8
#: Trees with siblings from the head; what the grammar makes repeat is found by lookup.
SPECULATIVE = {"method": "union", "num_speculative_tokens": NUM_NODES, "budget": "fixed"}
EAGLE = {"method": "eagle2", "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
REGEX = r"(ab|er|[a-e]{2,5}): (true|false|er){3,20}[0-9]{1,12}"
STRUCTURED = StructuredOutputsParams(regex=REGEX)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=1, max_tokens=17, structured_outputs=STRUCTURED, logprobs=1),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"speculation": False}),
    SamplingParams(temperature=0, max_tokens=17, structured_outputs=STRUCTURED, repetition_penalty=1.3),
]
FREE, SEEDED, OFF, PENALISED = range(4)


@pytest.fixture(scope="module", autouse=True)
def drafts_without_noise():
    """The interpreter needs seconds for the noise of coupled drafts, see test_verification."""
    with constants_of(Eagle2Options, coupled=False):
        yield


@pytest.fixture(scope="module", autouse=True)
def host_without_its_mask_kernel():
    """The host's kernel for grammar masks does not run in the interpreter: the same in torch."""

    def apply(self, logits, input_batch, req_ids, bitmask):
        rows, masks = [], []
        equal = grammars.since_033(StructuredOutputManager)  # numbers of masks
        for req_id in req_ids:
            place, first = input_batch.req_ids.index(req_id), len(masks)
            own = range(int(input_batch.cu_num_logits_np[place]), int(input_batch.cu_num_logits_np[place + 1]))
            masks += [first + i if i < len(own) else None for i in range(self.mask_stride if equal else len(own))]
            rows += own
        assert len(masks) == len(bitmask)
        bitmask = bitmask[[i for i in masks if i is not None]]
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
    sources = [{**EAGLE, "model": str(checkpoints["eagle"])}, {"method": "lookup", "num_speculative_tokens": 6}]
    sources[1]["traffic_tokens"] = 1024
    speculative = {**SPECULATIVE, "sources": sources}
    return lambda **options: engine(speculative_config=speculative, **OPTIONS, **ENGINE, **options)


@pytest.fixture(scope="module")
def requests(prompts):
    return [*prompts, prompts[0]]


@pytest.fixture(scope="module")
def expected(engine, start, requests):
    return engine(**OPTIONS, **PLAIN).generate(requests, PARAMS, use_tqdm=False)


@pytest.fixture
def watch(monkeypatch):
    """``watch(llm)``: by place of the request, the nodes and accepted nodes of its verifications, and its rows."""

    def watch(llm):
        runner, seen, first = runner_of(llm), defaultdict(list), int(llm.request_counter.counter)
        honest = runner.rejection_sampler

        def look(logits, input_batch, *args):
            output = honest(logits, input_batch, *args)
            for place, req_id in enumerate(input_batch.req_ids):
                drafted = int(input_batch.num_draft_tokens_per_req[place])
                rows = int(input_batch.num_scheduled_tokens[place])
                seen[int(req_id.split("-")[0]) - first].append((drafted, int(output.num_sampled[place]) - 1, rows))
            return output

        monkeypatch.setattr(runner, "rejection_sampler", look)
        return seen

    return watch


def check(llm, requests, expected, watch):
    seen = watch(llm)
    found = llm.generate(requests, PARAMS, use_tqdm=False)
    check_same(found, expected)
    assert re.fullmatch(REGEX, found[SEEDED].outputs[0].text) or found[SEEDED].outputs[0].finish_reason == "length"
    for place in (FREE, SEEDED, PENALISED):
        assert max(drafted for drafted, _, _ in seen[place]) == NUM_NODES
    for place in (SEEDED, PENALISED):
        assert sum(accepted for _, accepted, _ in seen[place]) > 2
    # A request without drafts has one row in a step of trees (behind its prompt).
    assert seen[OFF][1:]
    assert all(drafted == 0 and rows == 1 for drafted, _, rows in seen[OFF][1:])


def test_same_as_plain(start, requests, expected, watch):
    check(start(), requests, expected, watch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the default")
def test_asynchronous_scheduling(start, requests, expected, asynchronous, watch):
    llm = start(seed=0)
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, v2_scheduler.AsyncTreeScheduler)
    check(llm, requests, expected, watch)


@pytest.mark.wide
@pytest.mark.parametrize("rows", [1, 6])
def test_rows_without_a_mask_are_not_accepted(start, requests, expected, watch, monkeypatch, rows):
    """Two grammars share the masked rows: each gets masks for its root only, or for two nodes beside it."""
    monkeypatch.setattr(v2_scheduler, "MASKED_ROWS", rows)
    llm = start()
    seen = watch(llm)
    check_same(llm.generate(requests, PARAMS, use_tqdm=False), expected)
    accepted = [accepted for _, accepted, _ in seen[SEEDED] + seen[PENALISED]]
    assert max(accepted) <= max(rows // 2 - 1, 0) or rows > 1  # the rows of one grammar alone are more
    assert rows == 1 or sum(accepted) > 0


def chain_masks(monkeypatch):
    """The host's masks, which take a tree for a chain."""
    monkeypatch.setattr(
        v2_scheduler.TreeRequests, "get_grammar_bitmask",
        lambda self, output: v2_scheduler.Scheduler.get_grammar_bitmask(self, output),
    )  # fmt: skip


def masks_of_the_root(monkeypatch):
    honest = grammars.walk_grammar

    def careless(manager, request, token_ids, parents, visit):
        honest(manager, request, token_ids, parents, lambda row, grammar, _: visit(row, None if row else grammar, ()))

    monkeypatch.setattr(grammars, "walk_grammar", careless)


def all_acceptable(monkeypatch):
    """The worker accepts nodes whose rows have no mask."""
    monkeypatch.setattr(v2_scheduler, "MASKED_ROWS", 1)
    honest = v2_scheduler.TreeRequests._masked_tree

    def careless(self, req_id, scheduled, most):
        return honest(self, req_id, scheduled, most)[0], len(scheduled)

    monkeypatch.setattr(v2_scheduler.TreeRequests, "_masked_tree", careless)


def drafts_for_all(monkeypatch):
    monkeypatch.setattr(v2_scheduler, "decodes_plainly", lambda _: False)


CONTROLS = (chain_masks, masks_of_the_root, all_acceptable, drafts_for_all)


@pytest.mark.parametrize("spoil", some(CONTROLS, [all_acceptable, drafts_for_all]))
def test_controls(start, requests, expected, watch, monkeypatch, spoil):
    """Each spoils the answers, or what is drafted."""
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        check(start(), requests, expected, watch)
