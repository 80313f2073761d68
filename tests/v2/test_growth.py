"""Growth of EAGLE trees on the V2 runner: the kernels against their torch references, and bounds on rows and memory."""

from types import SimpleNamespace

import pytest
import torch

from tests.hosts.conftest import runner_of
from tests.v2.conftest import ENGINE, answers, same
from tests.v2.test_identity import TREE
from vllm_specplug.config import ConfigError
from vllm_specplug.core import draft_sampling
from vllm_specplug.core.growth import TORCH_STATIC
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.pool import NEVER
from vllm_specplug.gpu.drafters import eagle as eagle_v2
from vllm_specplug.gpu.drafters.eagle import TreeEagleSpeculator
from vllm_specplug.gpu.kernels.growth import KERNELS, likeliest, start_levels
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def stable_likeliest(logits, top_k, draft_ids=None):
    """The reference with ties to the lower index, which ``torch.topk`` leaves open."""
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return draft_sampling.Children(order if draft_ids is None else draft_ids[order], log_probs.gather(1, order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "top_k"), [(7, 3), (160, 10), (5000, 10), (9000, 1)])
def test_likeliest(dtype, vocab, top_k):
    """Over several chunks of the vocabulary; 16-bit logits tie often."""
    logits = (torch.randn(6, vocab, generator=seeded(vocab)) * 3).to(dtype)
    logits[1] = 0.0
    logits[1, ::2] = -0.0  # equal to 0
    logits[2, 5:] = float("-inf")
    logits[3] = logits[3].abs() * -1
    draft_ids = torch.randperm(vocab, generator=seeded(0)) + 100
    for ids in (None, draft_ids):
        expected = stable_likeliest(logits, top_k, ids)
        found = likeliest(logits.to(DEVICE), top_k, None if ids is None else ids.to(DEVICE))
        exists = expected.log_probs > NEVER
        assert torch.equal(found.token_ids.cpu()[exists], expected.token_ids[exists])
        assert torch.allclose(found.log_probs.cpu()[exists], expected.log_probs[exists], rtol=0, atol=2e-6)
        assert (found.log_probs.cpu()[~exists] == NEVER).all()
    agreed = draft_sampling.likeliest(logits.float()[[0, 4, 5]], top_k)  # torch itself, where nothing ties
    if dtype == torch.float32:
        assert torch.equal(agreed.token_ids, likeliest(logits.to(DEVICE), top_k).token_ids.cpu()[[0, 4, 5]])


def test_a_row_of_nans_drafts_nothing():
    logits = torch.randn(2, 50)
    logits[0, 7] = float("nan")
    found = likeliest(logits.to(DEVICE), 4)
    assert found.log_probs[0].isnan().all() and found.log_probs[1].isfinite().all()
    assert ((found.token_ids >= 0) & (found.token_ids < 50)).all()


def grown(ops, num_reqs, top_k, depth, num_nodes, seed, coarse, device, min_node_value=0.0):
    """A tree drafted from random children that depend on what is fed, and what was fed."""
    fed = []

    def score(level, hidden, k):
        generator = seeded(seed * 100 + level)
        log_probs = torch.randn(hidden.shape[0], k, generator=generator) - 1.0
        if coarse:  # equal values, values above 0 and below all numbers
            log_probs = torch.randint(-3, 2, log_probs.shape, generator=generator).float()
            log_probs[torch.rand(log_probs.shape, generator=generator) < 0.1] = NEVER
            log_probs[torch.rand(log_probs.shape, generator=generator) < 0.05] = float("nan")
        token_ids = torch.randint(0, 40, log_probs.shape, generator=generator)
        return draft_sampling.Children(token_ids.to(device), log_probs.to(device))

    def forward(level, token_ids, features, mask):
        bits = mask if mask.dtype == torch.int64 else ancestor_bits(mask)
        fed.append([values.cpu().long() for values in (token_ids, features[..., 0], bits)])
        rows = torch.arange(token_ids.numel(), device=device).view(*token_ids.shape, 1) + 1000 * level
        return DraftFeatures(rows, rows)

    rows = torch.arange(num_reqs, device=device).unsqueeze(1)
    draft = grow_tree(
        torch.arange(num_reqs, device=device) + 7,
        DraftFeatures(rows, rows),
        score,
        forward,
        num_nodes=num_nodes,
        draft_depth=depth,
        draft_top_k=top_k,
        min_node_value=min_node_value,
        ops=ops,
    )
    return draft, fed


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("num_reqs", "top_k", "depth", "num_nodes", "floor"),
    [(3, 3, 3, 9, 0.0), (2, 10, 6, 60, 0.0), (1, 1, 4, 3, 0.0), (2, 4, 1, 4, 0.0), (2, 3, 3, 40, 0.0),
     (3, 9, 8, 63, 0.05)],
)  # fmt: skip
def test_growth(num_reqs, top_k, depth, num_nodes, floor, coarse):
    """Equal trees, and equal levels fed on the way: masks of more than one word at 9 nodes and 8 levels."""
    seed = top_k * 10 + depth
    given = (num_reqs, top_k, depth, num_nodes, seed, coarse)
    expected, fed_expected = grown(TORCH_STATIC, *given, "cpu", floor)
    found, fed = grown(KERNELS, *given, DEVICE, floor)
    assert len(fed) == len(fed_expected) == depth - 1
    for got, wanted in zip(fed, fed_expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    for name in ("token_ids", "parents", "depths", "num_rows"):
        assert torch.equal(getattr(found.tree, name).cpu(), getattr(expected.tree, name)), name
    assert torch.equal(found.log_values.cpu(), expected.log_values)
    assert (found.tree.num_rows > 1).any()


def test_a_full_pool_is_refused():
    pool = KERNELS.new_pool(1, 2, 1, DEVICE)
    ids, log_probs = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    assert KERNELS.grow_level(pool, None, ids, log_probs, 2) is None
    with pytest.raises(ValueError, match="the pool holds 2 nodes, 4 would be drafted"):
        KERNELS.grow_level(pool, None, ids, log_probs, 2)


def test_inputs_of_the_levels():
    slots, positions = torch.tensor([4, -1, 0]), torch.tensor([10, 20, 30])
    context_lens, found = start_levels(slots.to(DEVICE), positions.to(DEVICE), 3, 2, 32)
    assert context_lens.tolist() == [11, 0, 31]
    expected = (positions + torch.arange(1, 4).unsqueeze(1)).clamp(max=32).repeat_interleave(2, dim=1)
    assert torch.equal(found.cpu(), expected)


# ---- bounds on rows and memory


def test_a_level_has_at_most_the_rows_that_the_drafter_is_compiled_for(monkeypatch):
    def most(max_num_reqs, max_num_tokens, top_k, vocab=32000):
        speculator = SimpleNamespace(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            options=SimpleNamespace(draft_top_k=top_k),
            level_width=top_k,
        )
        return TreeEagleSpeculator._most_at_once(speculator, vocab)

    assert most(1024, 8192, 10) == 819 and most(256, 2048, 10) == 204 and most(4, 2048, 10) == 4
    with pytest.raises(ConfigError, match="a draft level has 10 rows, .* do not fit in max_num_batched_tokens=4: "):
        most(8, 4, 10)
    assert most(1024, 8192, 3) == 1024 and most(8192, 8192, 3) == 2730
    monkeypatch.setattr(eagle_v2, "get_max_chunk_logits", lambda vocab: 640_000 // vocab)
    assert most(1024, 8192, 10) == 2  # vLLM's bound on copies of logits


@pytest.fixture
def llm(engine):
    return engine("eagle", TREE, **ENGINE)


def watch_levels(speculator, monkeypatch):
    """The list gets the rows of each draft level and whether it has a cache."""
    levels, honest = [], type(speculator)._score

    def score(self, level, hidden, top_k):
        levels.append((len(hidden), self._has_cache))
        return honest(self, level, hidden, top_k)

    monkeypatch.setattr(type(speculator), "_score", score)
    return levels


def growth_of(speculator):
    return speculator._growths[max(speculator.depths), False]


def test_large_batches_are_drafted_in_parts(llm, prompts, plain, monkeypatch):
    speculator = runner_of(llm).speculator
    levels = watch_levels(speculator, monkeypatch)
    assert same(answers(llm, prompts), plain)
    assert max(rows for rows, _ in levels) == 9  # three requests of three nodes
    monkeypatch.setattr(growth_of(speculator), "at_once", 2)
    levels.clear()
    assert same(answers(llm, prompts), plain)
    assert max(rows for rows, _ in levels) == 6


def test_unused_requests_attend_to_no_context(llm, prompts, plain, monkeypatch):
    """And a request that is used needs its context."""
    honest, seen = eagle_v2.DeviceLevels, []

    class Watched(honest):
        def __init__(self, model, rows, slots, *args):
            super().__init__(model, rows, slots, *args)
            seen.append((slots.clone(), self._context_lens.clone()))

    monkeypatch.setattr(eagle_v2, "DeviceLevels", Watched)
    growth = growth_of(runner_of(llm).speculator)
    grow = growth._grow

    def padded(num_reqs, slots, *inputs):
        size = num_reqs + 1
        inputs = [torch.cat([values, values[-1:]]) for values in (slots, *inputs)]
        inputs[0][num_reqs:] = -1
        return tuple(values[:num_reqs] for values in grow(size, *inputs))

    monkeypatch.setattr(growth, "_grow", padded)
    monkeypatch.setattr(runner_of(llm).speculator, "_at_once", 99)
    monkeypatch.setattr(runner_of(llm).speculator, "_rows", None)
    assert same(answers(llm, prompts[:1]), ([plain[0][0]], [plain[1][0]]))
    assert seen and all(torch.equal(slots < 0, lens == 0) and (slots < 0).any() for slots, lens in seen)


def test_memory_of_trees_is_profiled(llm, monkeypatch):
    """Logits of as many rows as a forward can have trees, and a draft phase of as many requests as are served."""
    runner = runner_of(llm)
    rows, compute = [], runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute(hidden))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    levels = watch_levels(runner.speculator, monkeypatch)
    runner.profile_run()
    num_reqs, at_once = min(runner.max_num_reqs, runner.max_num_tokens), growth_of(runner.speculator).at_once
    assert max(rows) == min(runner.max_num_tokens, num_reqs * 10) > num_reqs
    assert levels and not any(has_cache for _, has_cache in levels)
    assert max(found for found, _ in levels) == 3 * min(num_reqs, at_once)
