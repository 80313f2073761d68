"""Multi-candidate rejection and coupled drafts, on a toy target and drafter whose distributions are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.core import draft_sampling, rejection
from vllm_specplug.core.draft_sampling import DraftSampling
from vllm_specplug.core.noise import gumbel_noise, upcoming_seeds
from vllm_specplug.core.rejection import accept_rejection
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.proposers.medusa.drafting import choose_tree, fill_tree
from vllm_specplug.proposers.medusa.sparse_tree import in_draw_order
from vllm_specplug.types import PADDING

VOCAB, DEPTH, TOP_K, TRIALS = 5, 3, 3, 30000
#: A context's code: its tokens as digits from 1 on, in a number of base VOCAB + 1.
NUM_CODES = (VOCAB + 1) ** (DEPTH + 1)


def tables(seed: int, spread: float = 1.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of target and drafter by context, float32 ``[NUM_CODES, VOCAB]``."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(NUM_CODES, VOCAB, generator=generator) * spread
    drafter = target + torch.randn(NUM_CODES, VOCAB, generator=generator) * spread
    return target.log_softmax(1), drafter.log_softmax(1)


def make_sampling(seed: int, coupled: bool = False, temperature: float = 1.0) -> DraftSampling:
    generator = torch.Generator().manual_seed(seed)
    return DraftSampling(
        temperature=torch.full((TRIALS,), temperature),
        top_k=torch.full((TRIALS,), VOCAB),
        top_p=torch.ones(TRIALS),
        seeds=torch.randint(0, 2**31, (TRIALS, DEPTH, 1 if coupled else TOP_K), generator=generator),
        coupled=torch.full((TRIALS,), coupled),
    )


def draft_eagle(drafter: torch.Tensor, sampling: DraftSampling):
    """Trees that ``grow_tree`` cuts to the best nodes; a feature is its context's code."""
    roots = torch.zeros(TRIALS, 1)

    def score(level, hidden, top_k):
        return sampling.children(drafter[hidden.squeeze(1).long()], level, top_k)

    def forward(level, token_ids, features, mask):
        codes = features * (VOCAB + 1) + token_ids.unsqueeze(2) + 1
        return DraftFeatures(codes, codes)

    return grow_tree(
        torch.zeros(TRIALS, dtype=torch.int64), DraftFeatures(roots, roots), score, forward,
        num_nodes=6, draft_depth=DEPTH, draft_top_k=TOP_K, min_node_value=0.15,
    )  # fmt: skip


def draft_medusa(drafter: torch.Tensor, sampling: DraftSampling, dynamic: bool):
    heads = drafter[: DEPTH * 7 : 7].expand(TRIALS, -1, -1)
    roots = torch.zeros(TRIALS, dtype=torch.int64)
    if dynamic:
        return choose_tree(roots, heads, None, num_nodes=7, draft_top_k=TOP_K, sampling=sampling)
    return fill_tree(roots, heads, None, ((0,), (2,), (0, 1), (0, 0), (2, 1), (0, 1, 0)), sampling)


def codes_of(tree) -> torch.Tensor:
    """Codes of the contexts that end in each row."""
    codes = torch.zeros_like(tree.token_ids)
    for row in range(1, tree.token_ids.shape[1]):
        before = codes.gather(1, tree.parents[:, row : row + 1].clamp(min=0)).squeeze(1)
        codes[:, row] = before * (VOCAB + 1) + tree.token_ids[:, row] + 1
    return codes.clamp(0, NUM_CODES - 1)


def emit_two(draft, target: torch.Tensor) -> torch.Tensor:
    """The first two tokens of each trial; what the walk leaves open is drawn from the target."""
    codes = codes_of(draft.tree)

    def target_probs(rows):
        return target[codes.gather(1, rows.unsqueeze(1)).squeeze(1)].exp()

    generator = torch.Generator().manual_seed(99)
    uniform = torch.rand(TRIALS, DEPTH, TOP_K + 1, generator=generator, dtype=torch.float64)
    active = torch.ones(TRIALS, dtype=torch.bool)
    tokens = accept_rejection(draft.tree, draft.proposal, target_probs, uniform, active, DEPTH)[:, :2].clone()
    accepted.append((tokens[:, 1] != PADDING).float().mean().item())
    codes = torch.zeros(TRIALS, dtype=torch.int64)
    for depth in range(2):
        drawn = torch.multinomial(target[codes].exp(), 1, generator=generator).squeeze(1)
        tokens[:, depth] = torch.where(tokens[:, depth] == PADDING, drawn, tokens[:, depth])
        codes = codes * (VOCAB + 1) + tokens[:, depth] + 1
    return tokens


accepted: list[float] = []


def surprise(tokens: torch.Tensor, target: torch.Tensor) -> float:
    """Probability of a chi-square as large as that of the emitted pairs."""
    first = target[0].exp()
    expected = torch.stack([first[a] * target[a + 1].exp() for a in range(VOCAB)]).flatten().double() * TRIALS
    seen = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB).double()
    usual = expected >= 5
    statistic = ((seen - expected)[usual] ** 2 / expected[usual]).sum()
    return float(chi2.sf(float(statistic), int(usual.sum()) - 1))


DRAFTS = {
    "eagle2": draft_eagle,
    "medusa": lambda drafter, sampling: draft_medusa(drafter, sampling, dynamic=False),
    "dynamic medusa": lambda drafter, sampling: draft_medusa(drafter, sampling, dynamic=True),
}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("seed", range(4))
def test_pairs_follow_the_target(kind, seed):
    target, drafter = tables(seed)
    accepted.clear()
    assert surprise(emit_two(DRAFTS[kind](drafter, make_sampling(seed)), target), target) > 1e-3
    assert accepted[0] > 0.2  # paths were walked


def test_nodes_are_cut():
    """The trees above are not whole: some nodes of low value are left out."""
    sizes = draft_eagle(tables(0)[1], make_sampling(0)).tree.num_rows
    assert sizes.min() < sizes.max() <= 7


def test_control_values_that_know_the_token(monkeypatch):
    """Nodes kept for the probability of their own token bias the output."""
    honest = DraftSampling.children

    def greedy_values(self, logits, *args):
        found = honest(self, logits, *args)
        return replace(found, log_probs=logits.log_softmax(1).gather(1, found.token_ids))

    monkeypatch.setattr(DraftSampling, "children", greedy_values)
    target, drafter = tables(0)
    assert surprise(emit_two(draft_eagle(drafter, make_sampling(0)), target), target) < 1e-6


def test_values_of_independent_drafts_do_not_know_their_tokens():
    """The same distribution gives the same values, whatever is drawn from it."""
    children = make_sampling(3).children(tables(5)[1][:1].expand(TRIALS, -1), 0, 2)
    assert len(children.token_ids.unique(dim=0)) > 3
    assert torch.equal(children.log_probs, children.log_probs[:1].expand_as(children.log_probs))


def test_control_residual_not_taken(monkeypatch):
    """Without the residual of p the output is biased towards the drafts."""
    monkeypatch.setattr(rejection, "_normalised", lambda values, otherwise: otherwise)
    target, drafter = tables(0)
    assert surprise(emit_two(draft_eagle(drafter, make_sampling(0)), target), target) < 1e-6


def test_children_are_drawn_without_replacement():
    """Their pairs follow q(a) q(b) / (1 - q(a))."""
    _, drafter = tables(5)
    q = drafter[0].exp()
    children = make_sampling(3).children(drafter[:1].expand(TRIALS, -1), 0, 2)
    seen = torch.bincount(children.token_ids[:, 0] * VOCAB + children.token_ids[:, 1], minlength=VOCAB**2).double()
    expected = (q.unsqueeze(1) * q / (1 - q).unsqueeze(1)).fill_diagonal_(0).flatten().double() * TRIALS
    assert seen[expected == 0].sum() == 0
    usual = expected > 5
    statistic = ((seen - expected)[usual] ** 2 / expected[usual]).sum()
    assert chi2.sf(float(statistic), int(usual.sum()) - 1) > 1e-3


def test_perfect_drafters_are_always_right():
    """Where q is p, rejection accepts the first child, and a coupled draft is the sampler's token."""
    target, _ = tables(1)
    draft = draft_eagle(target, make_sampling(1))
    tokens = emit_two(draft, target)
    assert torch.equal(tokens[:, 0], draft.tree.token_ids[:, 1])
    sampling = make_sampling(2, coupled=True)
    sampled = (target[0] + gumbel_noise(sampling.seeds[:, 0], torch.arange(VOCAB))).argmax(dim=1)
    assert torch.equal(draft_eagle(target, sampling).tree.token_ids[:, 1], sampled)


def test_coupled_drafts_are_right_more_often():
    target, drafter = tables(6, spread=0.8)
    sampling = make_sampling(4, coupled=True)
    sampled = (target[0] + gumbel_noise(sampling.seeds[:, 0], torch.arange(VOCAB))).argmax(dim=1)
    logits = drafter[:1].expand(TRIALS, -1)
    coupled = (sampling.children(logits, 0, 1).token_ids[:, 0] == sampled).float().mean()
    likeliest = (draft_sampling.likeliest(logits, 1).token_ids[:, 0] == sampled).float().mean()
    assert coupled > likeliest + 0.05


def test_temperature_0_takes_the_likeliest():
    _, drafter = tables(7)
    found = make_sampling(0, temperature=0.0).children(drafter[:1].expand(TRIALS, -1), 0, TOP_K)
    wanted = draft_sampling.likeliest(drafter[:1], TOP_K)
    assert torch.equal(found.token_ids, wanted.token_ids.expand(TRIALS, -1))
    assert torch.allclose(found.log_probs, wanted.log_probs.expand(TRIALS, -1))


def test_top_k_and_top_p_bound_what_is_drawn():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(200, -1)
    sampling = replace(make_sampling(0), temperature=torch.ones(200), seeds=torch.arange(600).view(200, 1, 3),
                       coupled=torch.zeros(200, dtype=torch.bool))  # fmt: skip
    for limits, kept in (((2, 1.0), 2), ((4, 0.7), 2), ((4, 0.85), 3), ((1, 0.1), 1)):
        limited = replace(sampling, top_k=torch.full((200,), limits[0]), top_p=torch.full((200,), limits[1]))
        found = limited.children(logits, 0, 4)
        assert found.token_ids[found.log_probs > float("-inf")].unique().tolist() == list(range(kept))
        assert torch.allclose(found.candidate_probs.sum(1), torch.ones(200))


def test_noise_is_splitmix64():
    """Against integers without a width."""
    mask = 2**64 - 1

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    for seed, token in ((0, 0), (1, 7), (2**31 - 1, 49151), (123456789, 3)):
        bits = mix(mix(seed) + (token + 1) * 0x9E3779B97F4A7C15 & mask) >> 11
        expected = -torch.log(-torch.log(torch.tensor((bits + 0.5) * 2.0**-53, dtype=torch.float64)))
        found = gumbel_noise(torch.tensor(seed), torch.tensor(token))
        assert found.item() == pytest.approx(expected.item(), abs=1e-5)


def test_upcoming_seeds_are_not_drawn():
    generators = [torch.Generator().manual_seed(3), None, torch.Generator().manual_seed(4)]
    seeds = upcoming_seeds(generators, 4)
    assert seeds[1].tolist() == [0] * 4
    for row in (0, 2):
        drawn = [int(torch.randint(0, 2**31, (1,), generator=generators[row])) for _ in range(4)]
        assert seeds[row].tolist() == drawn


def test_siblings_in_the_order_of_the_draw():
    assert in_draw_order(((1,), (3,), (1, 2), (1, 0), (3, 5))) == ((0,), (1,), (0, 0), (0, 1), (1, 0))


def test_options():
    assert parse_options({"method": "eagle2", "model": "x", "verification": "rejection"}).verification == "rejection"
    with pytest.raises(ConfigError, match="needs draft probabilities, which lookup does not have"):
        parse_options({"method": "lookup", "verification": "rejection"})
    with pytest.raises(ConfigError, match="needs budget='fixed'"):
        parse_options({"method": "hass", "model": "x", "verification": "rejection", "budget": "measured"})
