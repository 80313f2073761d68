"""Above temperature 0 on the V2 runner: coupled drafts, typical acceptance and rejection, on the device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams

from tests.doubles.no_syncs import NoLookAtTheDevice
from tests.hosts.conftest import acceptance_length, counters, runner_of, token_ids
from tests.v2.conftest import ENGINE, GREEDY, watch_rounds
from vllm_specplug.core.typical import accept_typical, path_token_ids
from vllm_specplug.gpu import settling
from vllm_specplug.gpu.draft_sampling import DeviceDraftSampling
from vllm_specplug.gpu.settling import RejectionSettling

TREE = {"num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
#: Limits that no probability exceeds.
NEVER = {"typical_epsilon": 1.0, "typical_delta": 1e6}
KINDS = ({}, {"top_p": 0.8, "top_k": 12}, {"repetition_penalty": 1.2}, {"min_p": 0.05}, {"temperature": 0.0})


def parameters(count, **changes):
    settings = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    return [SamplingParams(**{**settings, "seed": i, **KINDS[i % len(KINDS)], **changes}) for i in range(count)]


@pytest.fixture(scope="module")
def many(prompts):
    return [prompts[i % len(prompts)] for i in range(5)]


@pytest.fixture(scope="module")
def coupled(engine):
    return engine("eagle", TREE, **ENGINE)


# ---- coupled drafts


def test_coupled_drafts_keep_the_seeds_tokens(coupled, plainly, many):
    params = parameters(5)
    assert token_ids(coupled.generate(many, params, use_tqdm=False)) == plainly(many, params)[0]


def test_coupled_drafts_are_accepted_more_often(coupled, many, monkeypatch):
    params, many = [replace_seed(one, i) for i, one in enumerate(parameters(1) * 3)], many[:3]
    taus = []
    for couples in (True, False):
        monkeypatch.setattr(runner_of(coupled)._slot_params, "_couples", couples)
        before = counters(coupled)
        coupled.generate(many, params, use_tqdm=False)
        taus.append(acceptance_length(coupled, before))
    assert taus[0] > taus[1] + 0.1


def replace_seed(params, seed):
    found = params.clone()
    found.seed = seed
    return found


@pytest.mark.wide
def test_control_noise_of_another_position(coupled, many, monkeypatch):
    """Drafts that look at other noise are accepted less often; the tokens stay."""
    params = [replace_seed(one, i) for i, one in enumerate(parameters(1) * 5)]
    found = []
    for offset in (0, 1):
        honest = DeviceDraftSampling.children
        monkeypatch.setattr(
            DeviceDraftSampling, "children",
            lambda self, *args, by=offset, of=honest: of(replace(self, positions=self.positions + by), *args),
        )  # fmt: skip
        before = counters(coupled)
        found.append((token_ids(coupled.generate(many, params, use_tqdm=False)), acceptance_length(coupled, before)))
        monkeypatch.setattr(DeviceDraftSampling, "children", honest)
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1] + 0.1


def test_sampling_never_waits_for_the_device(coupled, many, monkeypatch):
    rounds = watch_rounds(coupled, monkeypatch)
    runner = runner_of(coupled)
    growths = runner.speculator._growths
    sampled = (max(runner.speculator.depths), True)
    monkeypatch.setitem(growths, sampled, watched_growth(growths[sampled], rounds))
    coupled.generate(many[:2], parameters(2), use_tqdm=False)
    assert "sampled" in rounds


def watched_growth(growth, rounds):
    def call(*args):
        rounds.append("sampled")
        with NoLookAtTheDevice():
            return growth(*args)

    return call


# ---- typical acceptance


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "trees.jsonl"


@pytest.fixture(scope="module")
def typical(engine, trace_file):
    return engine("eagle", {**TREE, "verification": "typical", "trace_trees": str(trace_file)}, **ENGINE)


def test_typical_accepts_more_with_lower_limits(typical, plainly, many):
    """By requests in one batch; where nothing passes, the sampler draws all tokens with the requests' seeds."""
    taus = []
    for limits in (NEVER, {"typical_epsilon": 0.0, "typical_delta": 0.0}):
        params = parameters(5, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, extra_args=limits)[:4]
        before = counters(typical)
        found = token_ids(typical.generate(many[:4], params, use_tqdm=False))
        taus.append(acceptance_length(typical, before))
        plain = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]
        assert (found == plainly(many[:4], plain)[0]) == (limits is NEVER)
    assert taus[1] > 3 > taus[0]


def test_typical_is_exact_where_it_must_be(typical, plainly, many):
    params = [one for one, kind in zip(parameters(5), KINDS, strict=True) if kind and "top_p" not in kind]
    assert token_ids(typical.generate(many[:3], params, use_tqdm=False)) == plainly(many[:3], params)[0]


def test_typical_follows_the_reference(typical, many, monkeypatch):
    """What is accepted on the device is what ``core.typical`` accepts, and no value is read back."""
    chosen, settle = runner_of(typical).rejection_sampler._settling, settling.TypicalSettling.settle
    compared = []

    def compare(self, tree, rows, active):
        found = settle(self, tree, rows, active)
        first, slots = rows.batch.cu_num_logits[:-1].long(), rows.batch.idx_mapping

        def log_probs(requests, nodes):
            temperature = self.sampler.sampling_states.temperature.gpu[slots[requests]].unsqueeze(1)
            return (rows.logits[first[requests] + nodes] / temperature).log_softmax(-1)

        epsilon, delta = self.params.limits(slots)
        compared.append((path_token_ids(tree, accept_typical(tree, log_probs, epsilon, delta, active)), found))
        return found

    monkeypatch.setattr(type(chosen), "settle", compare)
    limits = {"typical_epsilon": 0.02, "typical_delta": 0.9}
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=12, extra_args=limits) for i in range(4)]
    typical.generate(many[:4], params, use_tqdm=False)
    assert sum(int((found >= 0).sum()) for _, found in compared) > 4
    for wanted, found in compared:
        assert torch.equal(wanted, found[:, : wanted.shape[1]]) and not (found[:, wanted.shape[1] :] >= 0).any()


def test_typical_never_waits_for_the_device(typical, many, monkeypatch):
    rounds = watch_rounds(typical, monkeypatch)
    typical.generate(many[:2], parameters(2, extra_args={"typical_epsilon": 0.0}), use_tqdm=False)
    assert len(rounds) > 4


def test_trace(typical, trace_file, many):
    """The verified trees are in the file when the next step ends; the accepted paths are the answer."""
    trace_file.write_text("")
    (output,) = typical.generate(many[:1], GREEDY, use_tqdm=False)
    steps = [json.loads(line) for line in trace_file.read_text().splitlines()]
    emitted = []
    for step in steps:
        assert len(step["token_ids"]) == len(step["parents"]) == 10
        rows = step["accepted_rows"]
        assert [step["parents"][row] for row in rows[1:]] == rows[:-1]
        emitted += [step["token_ids"][row] for row in rows]
    answer = list(output.outputs[0].token_ids)
    assert emitted == answer[: len(emitted)] and len(emitted) >= len(answer) - 4


# ---- rejection


@pytest.fixture(scope="module")
def rejection(engine):
    return engine("eagle", {**TREE, "verification": "rejection"}, **ENGINE)


def test_rejection_keeps_seeds_and_exact_requests(rejection, plainly, many, monkeypatch):
    """Same seed, same tokens, which are not plain decoding's; requests that cannot be rejected keep plain tokens."""
    settled, settle = [], RejectionSettling.settle
    monkeypatch.setattr(RejectionSettling, "settle", lambda *args: settled.append(settle(*args)) or settled[-1])
    rounds = watch_rounds(rejection, monkeypatch)
    params = parameters(5, max_tokens=8)
    first, second = (token_ids(rejection.generate(many, params, use_tqdm=False)) for _ in range(2))
    assert rounds and first == second
    plain = plainly(many, params)[0]
    assert first[2:] == plain[2:] and first[:2] != plain[:2]
    assert sum(int((tokens >= 0).sum()) for tokens in settled) > 10
