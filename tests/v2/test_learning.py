"""Learning on the V2 model runner: V1's outcomes, some steps late, and what was learned reaches the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.doubles.contexts import context
from tests.doubles.union_reference import merge_drafts
from tests.hosts.conftest import runner_of
from tests.v2.conftest import ENGINE, GREEDY, answers, same, watch_rounds
from tests.v2.test_lookup import LOOKUP, SOURCE, trees_of
from tests.v2.test_union import EAGLE
from vllm_specplug.budget import calibration
from vllm_specplug.core.guard import Guard
from vllm_specplug.gpu.drafters.base import TreeSpeculator
from vllm_specplug.gpu.late_copies import LateCopies
from vllm_specplug.gpu.late_learning import MOST_REQUESTS, LateLearning
from vllm_specplug.proposers.lookup.device_proposer import kernel_table
from vllm_specplug.proposers.lookup.drafting import LookupProposer
from vllm_specplug.proposers.union import device_proposer
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Walk

#: Long enough for some fits.
LONG = GREEDY.clone()
LONG.max_tokens = 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def repeating(prompts):
    return [{"prompt_token_ids": prompt["prompt_token_ids"][:9] * 3} for prompt in prompts]


def outcomes_of(learner, monkeypatch):
    """The list gets model, features and outcome of each node that is learned from."""
    seen, honest = [], learner.calibration.learn

    def learn(models, features, accepted):
        seen.extend(zip(models.tolist(), map(tuple, features[:, :5].tolist()), accepted.tolist(), strict=True))
        honest(models, features, accepted)

    monkeypatch.setattr(learner.calibration, "learn", learn)
    return seen


@pytest.fixture
def quick_fits(monkeypatch):
    """Fits after few outcomes: answers are short here."""
    monkeypatch.setattr(calibration, "BATCH", 8)


def rounded(outcomes):
    return sorted((model, tuple(round(value, 6) for value in features), right) for model, features, right in outcomes)


@pytest.mark.usefixtures("quick_fits")
def test_lookup_learns_what_v1_learns(engine, repeating, plainly, monkeypatch):
    """And the device gets it, at the address that recorded graphs read."""
    llm = engine(speculative_config=LOOKUP, **ENGINE)
    answers(llm, repeating[:1])  # buffers are made by the first draft phase
    proposer = runner_of(llm).speculator._proposer
    before, address = proposer._buffers.table.clone(), proposer._buffers.table.data_ptr()
    rounds = watch_rounds(llm, monkeypatch)  # first: what the test reads itself is not watched
    drafted, seen = trees_of(llm, monkeypatch), outcomes_of(proposer.learner, monkeypatch)
    assert same(answers(llm, repeating, LONG), plainly(repeating, LONG)) and len(rounds) > 10
    on_v1, expected = {}, []
    for slot, known, _, _ in drafted:
        if slot not in on_v1:
            on_v1[slot] = LookupProposer(replace(proposer._options, min_node_value=0.0, traffic_tokens=0))
            expected.append(outcomes_of(on_v1[slot], monkeypatch))
        on_v1[slot].propose(context([known], max_len=256))
    expected = [outcome for of_request in expected for outcome in of_request]
    assert rounded(seen) == rounded(expected) and len({accepted for *_, accepted in seen}) == 2
    table = proposer._buffers.table
    assert table.data_ptr() == address and not torch.equal(table, before)
    assert table.tolist() == kernel_table(proposer.learner.calibration.weights).tolist()


@pytest.mark.usefixtures("quick_fits")
def test_a_union_and_its_source_learn(engine, checkpoints, prompts, plainly, monkeypatch):
    """All merged nodes whose parent was right have an outcome; the merge reads what was learned."""
    source = {**EAGLE, "model": str(checkpoints["eagle"])}
    union = {"method": "union", "sources": [source, SOURCE], "num_speculative_tokens": 12, "budget": "fixed"}
    llm = engine(speculative_config=union, **ENGINE)
    answers(llm, prompts[:1])
    proposer = runner_of(llm).speculator._proposer
    lookup, merging = proposer._sources[0], proposer._merging
    outcomes, of_lookup = [], outcomes_of(lookup.learner, monkeypatch)
    honest, merged = proposer.learner.learn, device_proposer.merge_drafts
    checked = []

    def learn(valued, requests, token_ids, rows, starts, ends):
        """Check the outcomes path by path."""
        nodes, accepted = honest(valued, requests, token_ids, rows, starts, ends)
        expected = []
        for request, row, count in zip(requests.tolist(), rows.tolist(), ends.tolist(), strict=True):
            emitted, paths = token_ids[row, :count].tolist(), {}
            tokens, parents = (values[request].tolist() for values in (valued.pool.token_ids, valued.pool.parents))
            for column, parent in enumerate(parents[: valued.merged.counts[request]]):
                paths[column] = path = [*paths.get(parent, ()), tokens[column]]
                if len(path) <= count and path[:-1] == emitted[: len(path) - 1]:
                    expected.append(path == emitted[: len(path)])
        outcomes.extend(accepted.tolist())
        checked.append(accepted.tolist() == expected)
        return nodes, accepted

    def merge(drafts, num_nodes, merging):
        found = merged(drafts, num_nodes, merging)
        reference = merge_drafts(drafts, num_nodes, merging.weights)
        checked.append(torch.equal(found.tree.token_ids, reference.tree.token_ids))
        return found

    monkeypatch.setattr(proposer.learner, "learn", learn)
    monkeypatch.setattr(device_proposer, "merge_drafts", merge)
    texts = [*prompts[:2], {"prompt_token_ids": prompts[2]["prompt_token_ids"][:9] * 3}]
    assert same(answers(llm, texts, LONG), plainly(texts, LONG))
    assert len(checked) > 10 and all(checked) and set(outcomes) == {True, False} and of_lookup
    assert torch.equal(merging.weights.cpu(), torch.from_numpy(proposer.learner.calibration.weights))
    assert not np.array_equal(proposer.learner.calibration.weights, start_weights(2))


# ---- without an engine


class Pupil:
    """A ``DeviceLearner`` that keeps what it is taught; its drafts are numbers."""

    def __init__(self, num_reqs=20):
        self.values = torch.arange(num_reqs, device=DEVICE)
        self.known, self.table = np.zeros(1), torch.zeros(1, dtype=torch.float64, device=DEVICE)
        self.taught = []

    def drafted(self):
        return (self.values,)

    def tables(self):
        return [(self.known, self.table)]

    def learn(self, drafted, outcome):
        tokens = outcome.token_ids[outcome.token_rows, 0].tolist() if len(outcome.requests) else []
        numbers = drafted[0].numpy()[outcome.requests].tolist()
        self.taught += zip(numbers, tokens, outcome.num_tokens.tolist(), strict=True)
        self.known[:] += len(numbers)


def step(learning, req_ids, drafts=None, prefilling=None, at_once=99):
    """Verify the last phase, then a draft phase; request "r7" emits the token 70."""
    count = len(req_ids)
    batch = SimpleNamespace(
        req_ids=req_ids,
        num_draft_tokens_per_req=np.array(drafts or [3] * count),
        is_prefilling_np=np.array(prefilling or [False] * count),
    )
    tokens = torch.tensor([[10 * int(name[1:]), -1] for name in req_ids], device=DEVICE)
    learning.verified(batch, Walk(tokens, tokens, torch.ones(count, dtype=torch.int32, device=DEVICE)))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    learning.begin_phase()
    learning.drafted(req_ids, at_once)


def started(pupil):
    learning = LateLearning(pupil, DEVICE)
    step(learning, ["r1"])
    step(learning, ["r1"])
    assert not pupil.taught  # not before it is started
    learning.start()
    return learning


def test_drafts_meet_the_tokens_of_their_requests():
    pupil = Pupil()
    learning = started(pupil)
    step(learning, ["r0", "r1", "r2", "r3"])
    # Another order; r1 was preempted, r2 had no drafts, r3 still reads its prompt.
    step(learning, ["r3", "r9", "r2", "r0"], [3, 3, 0, 3], [True, False, False, False])
    assert pupil.taught == [(0, 0, 1)] and pupil.table.tolist() == [1]
    step(learning, ["r3", "r9", "r2", "r0"])
    assert pupil.taught[1:] == [(0, 30, 1), (1, 90, 1), (2, 20, 1), (3, 0, 1)] and pupil.table.tolist() == [5]


def test_a_phase_without_verification_teaches_nothing():
    pupil = Pupil()
    learning = started(pupil)
    step(learning, ["r1"])
    learning.begin_phase()  # behind a step without drafts
    step(learning, ["r1"])
    assert not pupil.taught


def test_all_requests_of_a_large_batch_are_learned_from_in_turns():
    pupil, names = Pupil(), [f"r{number}" for number in range(20)]
    learning = started(pupil)
    counts = []
    for _ in range(6):
        step(learning, names)
        counts.append(len(pupil.taught))
    assert max(np.diff(counts)) == MOST_REQUESTS
    assert {number for number, *_ in pupil.taught} == set(range(20))
    assert all(10 * number == token for number, token, _ in pupil.taught)


def test_of_a_batch_in_parts_the_last_one_is_learned_from():
    pupil, names = Pupil(), [f"r{number}" for number in range(7)]
    learning = started(pupil)
    for _ in range(2):
        step(learning, names, at_once=3)
    assert pupil.taught == [(0, 60, 1)]  # row 0 of the buffers is the batch's last request


def test_nothing_waits_for_copies():
    pupil = Pupil()
    learning = started(pupil)
    step(learning, ["r1"])
    waiting = SimpleNamespace(query=lambda: False)
    honest = learning._copies.add
    learning._copies.add = lambda copies: learning._copies._running.append((waiting, copies))
    step(learning, ["r1"])
    assert not pupil.taught and pupil.table.tolist() == [0]
    learning._copies.add = honest
    waiting.query = lambda: True
    step(learning, ["r1"])
    assert len(pupil.taught) == 2 and pupil.table.tolist() == [2]


def test_which_answers_are_kept():
    """Those of ended requests that speculated, once the server serves, up to their ends."""
    kept = []

    class Remembers:
        def finish(self, ended):
            kept.append(ended)

    speculator = TreeSpeculator.__new__(TreeSpeculator)
    speculator._proposer, speculator.guard, speculator.learning = Remembers(), Guard("lookup"), None
    speculator.slot_params = SimpleNamespace(speculates=np.array([True, False, True]), namespaces="names")
    tokens = torch.zeros(3, 9)
    speculator._req_states = SimpleNamespace(
        req_id_to_index={"b": 0, "silent": 1, "a": 2},
        all_token_ids=SimpleNamespace(gpu=tokens),
        total_len=SimpleNamespace(gpu="lens"),
        prompt_len=SimpleNamespace(np=np.array([5, 6, 7])),
    )
    ended = {"b", "silent", "a", "never started"}
    speculator.finish(ended, {})
    assert not kept
    speculator.start_serving()
    assert kept == [(tokens, "lens", "names", 0, 9, 9)]  # of no token
    kept.clear()
    speculator.finish(ended, {"a": 8})
    assert kept == [(tokens, "lens", "names", 2, 7, 8), (tokens, "lens", "names", 0, 5, 9)]
    speculator._proposer = object()  # keeps nothing
    speculator.finish(ended, {})
    assert len(kept) == 2 and not speculator.guard.failures


def test_copies_with_a_lag():
    """Tensor-parallel ranks take the same copies before the same step, whenever these arrive."""
    copies = LateCopies(torch.device("cpu"), lag=2)
    taken = []
    for step in range(5):
        copies.add(step)
        taken.append(list(copies.take()))
    assert taken == [[], [], [0], [1], [2]]
    assert list(copies.take(wait=True)) == [3, 4]
