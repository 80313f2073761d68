"""Whole steps on a toy attention model, against plain decoding that keeps no cache at all."""

import functools
import math

import pytest
import torch

from tests.doubles import oracle, reference_step
from tests.doubles.attention_reference import tree_attention
from tests.doubles.oracle_tensors import to_rows, to_tree
from tests.doubles.reference_step import ReferenceRunner
from vllm_specplug.core.layout import lay_out
from vllm_specplug.types import TreeLayout

VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 11, 4, 2, 6, 2
HIDDEN = HEADS * HEAD_DIM


def rotate(x, positions):
    """Rotary embedding of ``x`` ``[R, W, heads, HEAD_DIM]`` at ``positions`` ``[R, W]``."""
    angles = positions[:, :, None, None] / torch.tensor([1.0, 7.0, 50.0], dtype=x.dtype)
    left, right = x.chunk(2, dim=3)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=3)


class ToyTarget:
    """Random attention layers without MLPs in float64, dense caches; samples by per-request seeded noise."""

    def __init__(self, temperature=0.0, num_reqs=1):
        generator = torch.Generator().manual_seed(1)

        def weight(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])

        self.embedding = weight(VOCAB, HIDDEN) * 3
        self.layers = [
            (weight(HIDDEN, HIDDEN), weight(HIDDEN, KV_HEADS * HEAD_DIM), weight(HIDDEN, KV_HEADS * HEAD_DIM))
            for _ in range(LAYERS)
        ]
        self.head = weight(HIDDEN, VOCAB) * 4
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(50 + request) for request in range(num_reqs)]

    def new_caches(self, num_reqs, max_len):
        """Keys and values of each layer; NaN stands in slots never written."""
        shape = (num_reqs, max_len, KV_HEADS, HEAD_DIM)
        return [torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2 * LAYERS)]

    def forward(self, token_ids, layout, context_lens, caches):
        num_reqs, width = token_ids.shape
        requests = torch.arange(num_reqs).unsqueeze(1)
        slots = context_lens.unsqueeze(1) + torch.arange(width)
        hidden = self.embedding[token_ids.clamp(min=0)]
        for layer, weights in enumerate(self.layers):
            query, key, value = (
                (hidden @ weight).unflatten(2, (heads, HEAD_DIM))
                for weight, heads in zip(weights, (HEADS, KV_HEADS, KV_HEADS), strict=True)
            )
            query, key = rotate(query, layout.positions), rotate(key, layout.positions)
            key_cache, value_cache = caches[2 * layer : 2 * layer + 2]
            scale = HEAD_DIM**-0.5
            mixed = tree_attention(query, key_cache, value_cache, key, value, layout.mask, scale, context_lens)
            key_cache[requests, slots], value_cache[requests, slots] = key, value
            hidden = hidden + mixed.flatten(2)
        return hidden @ self.head, hidden

    def sample(self, logits, active):
        if self.temperature == 0.0:
            return logits.argmax(dim=1)
        tokens = torch.full((len(logits),), -5)
        for request in active.nonzero().flatten().tolist():  # One draw per emitted token, as in plain decoding.
            noise = torch.empty(VOCAB, dtype=torch.float64).exponential_(generator=self.generators[request])
            tokens[request] = ((logits[request] / self.temperature).softmax(0) / noise).argmax()
        return tokens


def causal(size):
    """Layout of ``size`` consecutive tokens without context."""
    return TreeLayout(torch.arange(size).unsqueeze(0), torch.ones(1, size, size).tril().bool())


def plain_decode(target, prompt, num_tokens, request=0):
    """Recompute the whole sequence for each token, causally and without a cache: (tokens, hidden states)."""
    tokens, active = list(prompt), torch.tensor([True])
    target.generators = target.generators[request : request + 1]
    for _ in range(num_tokens):
        size = len(tokens)
        no_context = torch.zeros(1, dtype=torch.int64)
        logits, hidden = target.forward(torch.tensor([tokens]), causal(size), no_context, target.new_caches(1, size))
        tokens.append(int(target.sample(logits[:, -1], active)))
    return tokens[len(prompt) :], hidden[0]


class ToyDrafter:
    """Random trees, into which the true continuation is planted for some tokens among decoys."""

    def __init__(self, rng, continuations, max_nodes):
        self.rng, self.continuations, self.max_nodes = rng, continuations, max_nodes
        self.done = [0] * len(continuations)
        self.entries = [[] for _ in continuations]  # Per request: (token, hidden state) as re-seeded.

    def propose(self, root_token_ids):
        trees = []
        for root, future, done in zip(root_token_ids.tolist(), self.continuations, self.done, strict=True):
            rows, tip = [(root, -1)], 0
            planted = future[done : done + self.rng.randrange(5)]
            while len(rows) <= self.max_nodes:
                parent = self.rng.choice([tip, self.rng.randrange(len(rows))])
                if planted and self.rng.random() < 0.5:
                    rows.append((planted.pop(0), tip))
                    tip = len(rows) - 1
                else:
                    rows.append((self.rng.randrange(VOCAB), parent))
                if not planted and self.rng.random() < 0.2:
                    break
            trees.append(rows)
        return to_tree(trees, self.max_nodes + 1)

    def reseed(self, hidden, walk):
        for request, size in enumerate(walk.num_emitted.tolist()):
            self.done[request] += size
            emitted = walk.output_token_ids[request, :size].tolist()
            self.entries[request] += zip(emitted, hidden[request, :size], strict=True)


@functools.cache
def plain_decodes(temperature):
    """``plain_decode`` of every prompt."""
    return [
        plain_decode(ToyTarget(temperature, len(PROMPTS)), prompt, NUM_TOKENS + 20, request)
        for request, prompt in enumerate(PROMPTS)
    ]


PROMPTS = [[3], [1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1], [9, 0, 9]]
NUM_TOKENS, MAX_NODES = 24, 12


def decode(temperature, seed):
    """Decode all prompts by reference steps: (tokens, plain tokens, drafter, plain hidden states, steps, moves)."""
    num_reqs = len(PROMPTS)
    plain = plain_decodes(temperature)
    target = ToyTarget(temperature, num_reqs)
    caches = target.new_caches(num_reqs, max(map(len, PROMPTS)) + NUM_TOKENS + 2 * MAX_NODES)
    for request, prompt in enumerate(PROMPTS):  # Prefill; the last token's slot is the first root's, written again.
        own = [cache[request : request + 1] for cache in caches]
        target.forward(torch.tensor([prompt]), causal(len(prompt)), torch.zeros(1, dtype=torch.int64), own)
    roots = torch.tensor([prompt[-1] for prompt in PROMPTS])
    context_lens = torch.tensor([len(prompt) - 1 for prompt in PROMPTS])
    drafter = ToyDrafter(oracle.seeded(seed), [tokens for tokens, _ in plain], MAX_NODES)
    outputs, steps, moves = [[] for _ in PROMPTS], 0, 0
    runner = ReferenceRunner(drafter, target, caches, context_lens)
    while min(map(len, outputs)) < NUM_TOKENS and max(map(len, outputs)) < NUM_TOKENS + 10:
        walk, plan = runner.step(roots)
        for output, tokens, size in zip(
            outputs, walk.output_token_ids.tolist(), walk.num_emitted.tolist(), strict=True
        ):
            output += tokens[:size]
        roots = torch.tensor([output[-1] for output in outputs])
        steps, moves = steps + 1, moves + int((plan.source_rows != plan.target_rows).sum())
    return outputs, plain, drafter, steps, moves


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_steps_equal_plain_decoding(temperature, seed):
    """Greedy and with seeded noise: same seed, same tokens, and the drafter gets the target's true hidden states."""
    outputs, plain, drafter, steps, moves = decode(temperature, seed)
    for prompt, output, (tokens, hidden), entries in zip(PROMPTS, outputs, plain, drafter.entries, strict=True):
        assert len(output) >= 10
        assert output == tokens[: len(output)]
        assert [token for token, _ in entries] == output
        features = torch.stack([feature for _, feature in entries])
        # The feature of an emitted token is the hidden state that predicted it, one position earlier.
        torch.testing.assert_close(features, hidden[len(prompt) - 1 :][: len(entries)], rtol=0, atol=1e-9)
    emitted = sum(map(len, outputs))
    assert moves > 15 and emitted > 1.5 * steps * len(PROMPTS)  # Branches were accepted and did need moving.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_skipping_the_moves_is_caught(monkeypatch, temperature):
    monkeypatch.setattr(reference_step, "move_rows", lambda cache, plan, slots: cache)
    outputs, plain, drafter, _, _ = decode(temperature, seed=0)
    assert any(output != tokens[: len(output)] for output, (tokens, _) in zip(outputs, plain, strict=True))


def test_moving_the_wrong_way_is_caught(monkeypatch):
    def backwards(cache, plan, slots):
        moved = plan.source_rows != plan.target_rows
        cache[slots[plan.source_rows[moved]]] = cache[slots[plan.target_rows[moved]]]

    monkeypatch.setattr(reference_step, "move_rows", backwards)
    outputs, plain, _, _, _ = decode(0.0, seed=0)
    assert any(output != tokens[: len(output)] for output, (tokens, _) in zip(outputs, plain, strict=True))


def test_reseeding_by_flat_prefix_is_caught(monkeypatch):
    """A chain's code reads rows 0..n-1 as the accepted ones: the tokens stay right, the drafter's features do not."""
    monkeypatch.setattr(reference_step, "rows_to_read", lambda plan: plan.target_rows.clamp(min=0))
    outputs, plain, drafter, _, _ = decode(0.0, seed=0)
    wrong = 0
    for prompt, output, (tokens, hidden), entries in zip(PROMPTS, outputs, plain, drafter.entries, strict=True):
        assert output == tokens[: len(output)]
        features = torch.stack([feature for _, feature in entries])
        wrong += int(((features - hidden[len(prompt) - 1 :][: len(entries)]).abs().amax(1) > 1e-6).sum())
    assert wrong > 5


@pytest.mark.parametrize("context_lens", [[0, 0, 0], [5, 0, 2]])
def test_tree_attention_equals_attention_along_each_path(context_lens):
    rng = oracle.seeded(60)
    generator = torch.Generator().manual_seed(60)
    trees = [oracle.random_tree(rng, 9, 4) for _ in context_lens]
    tree, width = to_tree(trees), max(map(len, trees))
    layout = lay_out(tree, torch.tensor(context_lens))

    def randn(rows, heads):
        return torch.randn(len(trees), rows, heads, HEAD_DIM, generator=generator, dtype=torch.float64)

    query, tree_key, tree_value = randn(width, HEADS), randn(width, KV_HEADS), randn(width, KV_HEADS)
    context_key, context_value = randn(6, KV_HEADS), randn(6, KV_HEADS)
    for request, (rows, context) in enumerate(zip(trees, context_lens, strict=True)):
        for tensor in (context_key, context_value):
            tensor[request, context:] = math.nan  # Never written.
        for tensor in (query, tree_key, tree_value):
            tensor[request, len(rows) :] = math.nan
    mixed = tree_attention(
        query, context_key, context_value, tree_key, tree_value, layout.mask, 0.3, torch.tensor(context_lens)
    )
    for request, (rows, context) in enumerate(zip(trees, context_lens, strict=True)):
        for row in range(len(rows)):
            path = oracle.path_to(rows, row)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = [*context_key[request, :context, kv_head], *tree_key[request, path, kv_head]]
                values = [*context_value[request, :context, kv_head], *tree_value[request, path, kv_head]]
                scores = [math.exp(0.3 * float(query[request, row, head] @ key)) for key in keys]
                expected = sum(score * value for score, value in zip(scores, values, strict=True)) / sum(scores)
                torch.testing.assert_close(mixed[request, row, head], expected)
        assert (mixed[request, len(rows) :] == 0).all()


def test_the_toy_drafter_branches():
    drafter = ToyDrafter(oracle.seeded(0), [[1, 2, 3, 4]], MAX_NODES)
    trees = [to_rows(drafter.propose(torch.tensor([0])), 0) for _ in range(50)]
    assert any(len({parent for _, parent in rows}) < len(rows) - 1 for rows in trees)
