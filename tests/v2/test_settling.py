"""The parts of sampled drafts and their verification on the V2 runner, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from tests.doubles.constants import with_constants
from tests.doubles.device_work import DeviceWork
from tests.unit.core import test_rejection as toy
from vllm_specplug.config import parse_options
from vllm_specplug.core.tree import from_flat
from vllm_specplug.core.typical import accept_typical, path_token_ids
from vllm_specplug.core.walk import settled_rows
from vllm_specplug.gpu import draft_sampling, settling
from vllm_specplug.gpu.draft_sampling import DeviceDraftSampling, Proposals, sampler_noise
from vllm_specplug.gpu.late_trace import LateTrace
from vllm_specplug.gpu.sampler import TreeRejectionSampler
from vllm_specplug.gpu.settling import RejectionSettling, VerifiedRows
from vllm_specplug.gpu.slot_params import SlotParams
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.types import PADDING, Walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_is_the_samplers(use_fp64):
    """On flat logits the sampler picks the token with the largest noise."""
    count, vocab = 12, 40
    seeds = torch.randint(-(2**62), 2**62, (count,), device=DEVICE)
    pos = torch.arange(7, 7 + count, device=DEVICE)
    slots, ones = torch.arange(count, device=DEVICE), torch.ones(count, device=DEVICE)
    ids = torch.arange(vocab, device=DEVICE).expand(count, -1)

    def sample(temperature):
        logits = torch.zeros(count, vocab, device=DEVICE)
        return gumbel_sample(logits, slots, temperature, seeds, pos, True, False, use_fp64=use_fp64)

    assert torch.equal(sampler_noise(ids, seeds, pos, use_fp64).argmax(dim=1), sample(ones))
    assert not torch.equal(sampler_noise(ids, seeds, pos + 1, use_fp64).argmax(dim=1), sample(ones))
    some = torch.tensor([3, 17, 39], device=DEVICE).expand(count, -1)
    assert torch.equal(sampler_noise(some, seeds, pos), sampler_noise(ids, seeds, pos)[:, some[0]])


def device_sampling(count, **changes):
    """Of requests with positions and seeds of their own."""
    given = {
        "temperature": torch.full((count,), 0.7, device=DEVICE),
        "top_k": torch.full((count,), 200, device=DEVICE),
        "top_p": torch.ones(count, device=DEVICE),
        "seeds": torch.arange(count, device=DEVICE) * 7919 + 13,
        "coupled": torch.ones(count, dtype=torch.bool, device=DEVICE),
        "positions": torch.arange(count, device=DEVICE) * 3 + 5,
    }
    return DeviceDraftSampling(**{**given, "rejects": True, "use_fp64": False, **changes})


@pytest.mark.parametrize("rejects", [False, True])
def test_a_perfect_drafter_drafts_what_is_sampled(rejects):
    """At every level: the first child of each node is the token that the host's sampler picks from its logits."""
    count, width, vocab = 4, 3, 50
    sampling, slots = (
        device_sampling(count, rejects=rejects),
        torch.arange(count, device=DEVICE).repeat_interleave(width),
    )
    logits = torch.randn(count * width, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 2
    for level in range(2):
        pos = (sampling.positions + level).repeat_interleave(width)
        sampled = gumbel_sample(logits, slots, sampling.temperature, sampling.seeds, pos, True, False)
        assert torch.equal(sampling.children(logits, level, 3).token_ids[:, 0], sampled)
    if not rejects:
        return
    # Drafts for rejection do not look at the sampler's noise.
    own = replace(sampling, coupled=torch.zeros(count, dtype=torch.bool, device=DEVICE))
    assert not torch.equal(own.children(logits, level, 3).token_ids[:, 0], sampled)


@pytest.mark.interpreted
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("vocab", [9, 200])
def test_children_in_three_launches(vocab, use_fp64):
    """Those of the torch operations, with estimates: greedy requests, truncated ones, and a draft vocabulary."""
    count, width, top_k = 5, 4, 8
    sampling = device_sampling(
        count,
        temperature=torch.tensor([0.0, 0.7, 1.3, 1.0, 0.4], device=DEVICE),
        top_k=torch.tensor([200, 200, 5, 40, 1], device=DEVICE),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.6, 0.9], device=DEVICE),
        use_fp64=use_fp64,
    )
    fused = replace(sampling, rejects=False)
    logits = torch.randn(count * width, vocab, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 3
    draft_ids = torch.randperm(vocab, device=DEVICE) + 7
    for level in (0, 3):
        expected, found = (one.children(logits, level, top_k, draft_ids) for one in (sampling, fused))
        drawn = expected.log_probs > float("-inf")
        assert torch.equal(found.token_ids[drawn], expected.token_ids[drawn])
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=2e-5)
        assert drawn.any() and not drawn.all()
        assert all(len(set(tokens)) == top_k for tokens in found.token_ids.tolist())
    with DeviceWork() as work:
        fused.children(logits, 1, top_k, draft_ids)
    assert sum(work.launches.values()) == 3
    with DeviceWork() as work:
        sampling.children(logits, 1, top_k, draft_ids)
    assert sum(work.launches.values()) > 50


class StubStates:
    """What is read of the host's sampling states."""

    max_num_reqs, vocab_size = 4, 100

    def __init__(self):
        self.temperature, self.top_k, self.top_p, self.seeds = (SimpleNamespace(np=np.zeros(4)) for _ in range(4))
        self.top_k.np[:], self.top_p.np[:] = 100, 1


def slot_params(given, use_flashinfer=False, processors=(), **constants):
    """``SlotParams`` of a server's options, and a function that adds a request."""
    states = StubStates()
    sampler = SimpleNamespace(
        sampling_states=states, use_flashinfer=use_flashinfer, use_fp64_gumbel=False, logits_processors=processors
    )
    options = parse_options({"method": "eagle2", "model": "x", **given})
    found = SlotParams(with_constants(options, **constants), sampler, torch.device(DEVICE))

    def add(slot, params):
        states.temperature.np[slot], states.seeds.np[slot] = params.temperature, params.seed or 99
        states.top_k.np[slot] = params.top_k or 100
        found.add(slot, params)
        found.upload()

    return found, add


def test_what_is_kept_of_a_request():
    everything = torch.arange(4, device=DEVICE)
    for given, couples, sampled, settled, coupled in (
        ({}, True, [1, 0, 1, 1], [0] * 4, [1] * 4),
        ({}, False, [0] * 4, [0] * 4, [0] * 4),
        ({"verification": "typical"}, True, [0] * 4, [1, 0, 0, 1], [0] * 4),
        ({"verification": "rejection"}, True, [1, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]),
    ):
        params, add = slot_params(given, coupled=couples)
        add(0, SamplingParams(temperature=0.5, seed=7, top_k=9))
        add(1, SamplingParams(temperature=0.0, seed=8))
        add(2, SamplingParams(temperature=0.9, repetition_penalty=1.2, extra_args={"speculation": False}))
        add(3, SamplingParams(temperature=1.0, extra_args={}))
        assert params.speculates.tolist() == [True, True, False, True]
        assert (params.samples.tolist(), params.settles.tolist()) == (sampled, settled)
        assert params.coupled(everything).tolist() == coupled
        temperature, top_k, _ = params.draft_shape(everything)
        assert [value > 0 for value in temperature.tolist()] == sampled
        if params.is_read:
            assert (top_k.tolist(), params.seeds(everything).tolist()) == ([9, 100, 100, 100], [7, 8, 99, 99])


def test_what_the_sampler_draws_otherwise_is_not_coupled():
    params, add = slot_params({}, use_flashinfer=True)
    add(0, SamplingParams(temperature=1.0, top_k=5))
    add(1, SamplingParams(temperature=1.0, top_k=5, seed=3))
    add(2, SamplingParams(temperature=1.0))
    assert params.samples.tolist() == [False, True, True, False]


def test_custom_processors_are_walked_exactly():
    params, add = slot_params({"verification": "typical"}, processors=(object(),))
    add(0, SamplingParams(temperature=1.0))
    assert not params.settles.any()


def toy_batch(tree, trials, width):
    """Requests whose sampled rows are the rows of ``tree``, as vLLM describes them."""
    offsets = torch.arange(trials + 1) * width
    return SimpleNamespace(
        idx_mapping=torch.arange(trials),
        idx_mapping_np=np.arange(trials),
        cu_num_logits=offsets,
        cu_num_logits_np=offsets.numpy(),
        num_draft_tokens_per_req=np.full(trials, width - 1),
        seq_lens_cpu_upper_bound=torch.zeros(trials),
        expanded_idx_mapping=torch.arange(trials).repeat_interleave(width),
        expanded_local_pos=torch.arange(width).repeat(trials),
    )


@pytest.mark.parametrize("rows_at_once", [4, 10**6])
def test_typical_settles_what_the_reference_accepts(monkeypatch, rows_at_once):
    """By chunks of requests, as the host bounds its copies of logits."""
    monkeypatch.setattr(settling, "get_max_chunk_logits", lambda _: rows_at_once)
    target, drafter = toy.tables(2)
    monkeypatch.setattr(toy, "TRIALS", 40)
    tree = toy.draft_eagle(drafter, toy.make_sampling(1)).tree
    width = tree.token_ids.shape[1]
    trees = DeviceTrees(40, width - 1, toy.DEPTH, 16, torch.device("cpu"))
    trees.parents, trees.depths = tree.parents, tree.depths
    epsilon, delta = torch.full((40,), 0.3), torch.linspace(0, 2, 40)
    settles = np.arange(40) % 5 > 0
    params = SimpleNamespace(limits=lambda slots: (epsilon[slots], delta[slots]), settles=settles)
    logits = target[toy.codes_of(tree)]
    batch, pos = toy_batch(tree, 40, width), torch.zeros(40 * width, dtype=torch.int64)
    rows = VerifiedRows(logits.flatten(0, 1), batch, tree.token_ids.flatten(), pos)
    sampler = SimpleNamespace(apply_sampling_params=lambda logits, *_: logits)
    settled = settling.TypicalSettling(params, trees, sampler)(rows)
    log_probs = logits.log_softmax(-1)
    last = accept_typical(tree, lambda r, row: log_probs[r, row], epsilon, delta, torch.from_numpy(settles))
    assert torch.equal(settled, settled_rows(tree, path_token_ids(tree, last)))
    assert len(last.unique()) > 3
    wrong = settling.TypicalSettling(params, trees, sampler)
    trees.parents = tree.parents.roll(1, dims=0)  # control: another request's tree
    assert not torch.equal(wrong(rows), settled)


def test_late_trace(tmp_path):
    """Also the trees of the last step, when the server ends."""
    path = tmp_path / "trees.jsonl"
    tree = from_flat(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
    walk = Walk(torch.tensor([[7, 9, -1]]), torch.tensor([[0, 2, -1]]), torch.tensor([2]))
    trace = LateTrace(str(path), torch.device("cpu"))
    assert trace.is_on and not LateTrace(None, torch.device("cpu")).is_on
    trace.add(["a"], tree, walk)
    waiting = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    trace._copies._running.append((waiting, (["b"], tree, walk)))
    trace.add(["c"], tree, walk)  # its copy has arrived; those before it are written first
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [{"request_id": "a", "token_ids": [5, 6, 7], "parents": [-1, 0, 0], "accepted_rows": [0, 2]}]
    trace.close()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


@pytest.fixture
def toys(monkeypatch):
    """``emit(seed, spoil)``: pairs of tokens that a toy target's requests emit, drafted and verified as on V2."""

    def emit(target, drafter, spoil=lambda proposal: proposal):
        trials = toy.TRIALS
        params = SimpleNamespace(
            seeds=lambda slots: torch.arange(trials)[slots.long()] * 7919 + 13, settles=np.ones(trials, dtype=bool)
        )
        monkeypatch.setattr(draft_sampling, "sampler_noise", lambda ids, *_: torch.zeros(ids.shape))
        slots = torch.arange(trials)
        draft = toy.draft_eagle(
            drafter,
            DeviceDraftSampling(
                torch.ones(trials), torch.full((trials,), toy.VOCAB), torch.ones(trials), params.seeds(slots),
                torch.zeros(trials, dtype=torch.bool), torch.full((trials,), 5), rejects=True, use_fp64=False,
            ),
        )  # fmt: skip
        tree = draft.tree
        width = tree.token_ids.shape[1]
        trees = DeviceTrees(trials, width - 1, toy.DEPTH, 16, torch.device("cpu"))
        trees.parents, trees.depths = tree.parents, tree.depths
        proposals = Proposals(trials)
        proposals.keep(spoil(draft.proposal), slots)
        batch = toy_batch(tree, trials, width)
        sampler = SimpleNamespace(apply_sampling_params=lambda logits, *_: logits)
        logits = target[toy.codes_of(tree)].flatten(0, 1)
        rows = VerifiedRows(logits, batch, tree.token_ids.flatten(), torch.full((trials * width,), 5))
        settle = RejectionSettling(params, trees, sampler, proposals=proposals, num_children=toy.TOP_K)
        return emitted_pairs(tree, settle(rows), target)

    return emit


def emitted_pairs(tree, settled, target):
    """The first two tokens; what is not settled is drawn from the target."""
    generator = torch.Generator().manual_seed(3)
    codes, rows = torch.zeros(toy.TRIALS, dtype=torch.int64), torch.zeros(toy.TRIALS, 1, dtype=torch.int64)
    tokens, on_tree = [], torch.ones(toy.TRIALS, dtype=torch.bool)
    for _ in range(2):
        drawn = torch.multinomial(target[codes].exp(), 1, generator=generator).squeeze(1)
        chosen = settled.gather(1, rows).squeeze(1).where(on_tree, PADDING)
        tokens.append(torch.where(chosen >= 0, chosen, drawn))
        found, child = ((tree.parents == rows) & (tree.token_ids == tokens[-1].unsqueeze(1))).max(dim=1)
        on_tree, rows = on_tree & found, child.unsqueeze(1)
        codes = codes * (toy.VOCAB + 1) + tokens[-1] + 1
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("seed", range(3))
def test_rejected_trees_follow_the_target(toys, seed):
    target, drafter = toy.tables(seed)
    assert toy.surprise(toys(target, drafter), target) > 1e-3


def test_control_other_proposals(toys):
    """Where the kept distributions are not those of the draft, the output is biased."""
    target, drafter = toy.tables(0)
    pairs = toys(target, drafter, lambda proposal: replace(proposal, probs=proposal.probs.roll(1, dims=2)))
    assert toy.surprise(pairs, target) < 1e-6


def test_the_sampler_emits_and_traces_what_was_settled(tmp_path):
    """Without an engine: tokens that were settled replace sampled ones, the walk goes on behind them, and is traced."""
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]])
    tokens = torch.tensor([[5, 1, 2, 3], [6, 1, 2, 3]])
    trees = DeviceTrees(2, 3, 3, 16, torch.device("cpu"))
    trees.keep(parents, torch.arange(2))
    trees.tree_start = torch.tensor([0, 4], dtype=torch.int32)
    batch = toy_batch(from_flat(tokens, parents, torch.full((2,), 4)), 2, 4)
    batch.input_ids, batch.positions = tokens.flatten().int(), torch.tensor([10, 11, 11, 12, 20, 21, 22, 23])
    batch.logits_indices, batch.seq_lens = torch.arange(8), torch.tensor([14, 24], dtype=torch.int32)
    batch.cu_num_logits, batch.req_ids = batch.cu_num_logits.int(), ["a", "b"]
    committed = SimpleNamespace(commit=lambda walk: None)
    sampler = SimpleNamespace(
        compute_nans=False,
        needs_logits_processing=np.zeros(2, dtype=bool),
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.zeros(2, dtype=torch.int32))),
        sampling_states=SimpleNamespace(max_num_logprobs=lambda _: -1),
        sample=lambda logits, *_: (torch.tensor([9, 9, 9, 8, 1, 7, 9, 9]), None),
    )
    path = tmp_path / "trees.jsonl"
    verifier = TreeRejectionSampler.__new__(TreeRejectionSampler)
    verifier.sampler, verifier.runner, verifier.trees = sampler, committed, trees
    verifier._trace = LateTrace(str(path), torch.device("cpu"))
    logits = torch.zeros(8, 10)
    for settled, emitted in ((None, [[9], [1, 7]]), (torch.tensor([[2, -1, 3, -1], [-1] * 4]), [[2, 3, 8], [1, 7]])):
        verifier._settling = lambda rows, settled=settled: settled
        found = verifier(logits, batch)
        assert [row[row >= 0].tolist() for row in found.sampled_token_ids] == emitted
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["request_id"], line["accepted_rows"]) for line in lines[2:]] == [("a", [0, 2, 3]), ("b", [0, 1])]
    # A node whose row has no grammar mask is not accepted.
    verifier._settling = None
    found = verifier(logits, batch, None, torch.arange(8) == 5)
    assert [row[row >= 0].tolist() for row in found.sampled_token_ids] == [[9], [1]]
