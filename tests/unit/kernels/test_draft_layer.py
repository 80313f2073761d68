"""An EAGLE head's draft phase in C++ operators, against the same layer in torch and trees grown level by level."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from vllm_specplug.cpu.drafters.levels import Growth
from vllm_specplug.cpu.kernels.byte_linear import ByteLinear, can_multiply_bytes
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.draft_layer import DraftLayer, DraftLinear, DraftVocabulary, LayerWeights
from vllm_specplug.cpu.kernels.extra_logits import extra_logits
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.cpu.kernels.row_linear import make_row_linear
from vllm_specplug.cpu.kernels.tree_attention import pack_pages
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree

pytestmark = pytest.mark.skipif(operators() is None, reason="the C++ operators cannot be built")
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCAB, PAGE = 64, 4, 2, 16, 96, 50, 32
MAX_POSITION = 90
CAPACITY = 9
needs_bytes = pytest.mark.skipif(not can_multiply_bytes(), reason="this CPU does not multiply 8-bit numbers")


def linear_of(weight, bias=None):
    packed, codes, outputs = make_row_linear(weight).operands
    return DraftLinear(packed, codes, bias, outputs)


def byte_linear_of(weight, bias, parts):
    linear = ByteLinear(weight, parts)
    return DraftLinear(linear.packed, None, bias, linear.num_outputs, linear.scales)


class Reference:
    """The layer in torch, in float64, with all tokens' keys and values in one list for each request."""

    def __init__(self, dtype, has_bias):
        generator = torch.Generator().manual_seed(3)

        def random(*shape):
            return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

        self.embedding, self.norm = random(VOCAB, HIDDEN), random(HIDDEN)
        width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        shapes = {"fc": (HIDDEN, 2 * HIDDEN), "qkv": (width, HIDDEN), "o": (HIDDEN, HEADS * HEAD_SIZE)}
        shapes |= {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = {name: random(*shape) for name, shape in shapes.items()}
        self.bias = {"fc": random(HIDDEN)} if has_bias else {}
        angles = torch.arange(MAX_POSITION + 1)[:, None] / 100 ** (torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def operator(self, in_int8=False, kv_cache=None, isa="vec"):
        def make(name, weight):
            bias = self.bias.get(name)
            return byte_linear_of(weight, bias, 1 + (name == "fc")) if in_int8 else linear_of(weight, bias)

        linear = {name: make(name, weight) for name, weight in self.weights.items()}
        sizes = (1e-5, HEAD_SIZE**-0.5, HEADS)
        parts = (linear[name] for name in ("fc", "qkv", "o", "gate_up", "down"))
        weights = LayerWeights(self.embedding, self.cos_sin, self.norm, *sizes, *parts, MAX_POSITION)
        return DraftLayer(weights, CAPACITY, SimpleNamespace(kv_cache=kv_cache, isa=isa))

    def linear(self, name, x):
        bias = self.bias.get(name)
        return F.linear(x, self.weights[name].double(), None if bias is None else bias.double())

    def project(self, token_ids, positions, hidden):
        """Residuals, queries, and keys and values ``[n, heads, HEAD_SIZE]``."""
        residual = self.linear("fc", torch.cat((self.embedding[token_ids], hidden), dim=1).double())
        projected = self.linear("qkv", residual).unflatten(1, (-1, HEAD_SIZE))
        cos, sin = self.cos_sin.double()[positions, None].chunk(2, dim=-1)
        rotated, value = projected[:, : HEADS + KV_HEADS], projected[:, HEADS + KV_HEADS :]
        lower, upper = rotated.chunk(2, dim=-1)
        rotated = torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1)
        return residual, rotated[:, :HEADS], rotated[:, HEADS:], value

    def finish(self, residual, query, key, value, visible):
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, key) * HEAD_SIZE**-0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        residual = residual + self.linear("o", torch.einsum("hnm,mhd->nhd", weights, value).flatten(1))
        normed = F.rms_norm(residual, (HIDDEN,), self.norm.double(), 1e-5)
        gate, up = self.linear("gate_up", normed).chunk(2, dim=1)
        return residual + self.linear("down", F.silu(gate) * up)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv_layout", "in_int8", "tolerance"),
    [
        (torch.float32, "vec", False, 1e-5),
        (torch.float16, "vec", False, 0.01),
        (torch.bfloat16, "vec", False, 0.06),
        (torch.bfloat16, "amx", False, 0.06),
        pytest.param(torch.float32, "vec", True, 0.06, marks=needs_bytes),
        pytest.param(torch.bfloat16, "vec", True, 0.08, marks=needs_bytes),
    ],
)
def test_a_draft_phase(dtype, kv_layout, in_int8, tolerance, has_bias):
    """Two requests: one whose context is in the pages, and a new one whose prompt takes two pages."""
    reference = Reference(dtype, has_bias)
    generator = torch.Generator().manual_seed(4)
    starts, counts = torch.tensor([30, 0]), torch.tensor([4, 40])
    token_ids = torch.randint(VOCAB, (3, 80), generator=generator, dtype=torch.int32)
    hidden = torch.randn(60, HIDDEN, generator=generator).to(dtype)
    rows = torch.randperm(60, generator=generator)[:44]
    block_table = torch.tensor([[4, 1, 9], [5, 0, 9]], dtype=torch.int32)

    # What the pages hold of the first request.
    old = torch.randn(2, 30, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    key, value = torch.zeros(2, 6, KV_HEADS, PAGE, HEAD_SIZE, dtype=dtype)
    key[4, :, :30], value[4, :, :30] = old.transpose(1, 2)
    layer = reference.operator(in_int8, pack_pages(key, value, kv_layout), kv_layout)

    found = layer.first(token_ids, starts, counts, hidden, rows, block_table)
    contexts, expected = [], []
    for request, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        first, ids = (0, 4)[request], token_ids[request, start + 1 : start + count + 1].long()
        residual, query, new_key, new_value = reference.project(
            ids, torch.arange(start, start + count), hidden[rows[first : first + count]]
        )
        context = [torch.cat((old[side, :start].double(), new)) for side, new in enumerate((new_key, new_value))]
        contexts.append(context)
        visible = torch.ones(1, start + count, dtype=torch.bool)
        expected.append(reference.finish(residual[-1:], query[-1:], *context, visible))
    assert_close(found, torch.cat(expected), tolerance)

    masks = [torch.eye(3, dtype=torch.bool), torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1]])]
    trees = [[], []]
    for number, mask in enumerate(masks):
        ids = torch.randint(VOCAB, (2, 3), generator=generator)
        features = torch.randn(2, 3, HIDDEN, generator=generator).to(dtype)
        found = layer.forward(number, ids, features, mask.bool().expand(2, -1, -1))
        for request in range(2):
            position = min(int(starts[request] + counts[request]) + number, MAX_POSITION)
            residual, query, *key_value = reference.project(ids[request], torch.full((3,), position), features[request])
            trees[request].append(key_value)
            context = contexts[request]
            key, value = (torch.cat((context[side], *(one[side] for one in trees[request]))) for side in range(2))
            visible = torch.cat((torch.ones(3, len(context[0])), mask), dim=1).bool()
            assert_close(found[request], reference.finish(residual, query, key, value, visible), tolerance)


def test_positions_beyond_the_rotary_table_are_not_read():
    """Such a table has fewer positions than the target."""
    reference = Reference(torch.float32, has_bias=False)
    reference.cos_sin = reference.cos_sin[:8]
    token_ids, hidden = torch.zeros(1, 80, dtype=torch.int32), torch.zeros(9, HIDDEN)
    cache = pack_pages(*torch.zeros(2, 6, KV_HEADS, PAGE, HEAD_SIZE), "vec")
    block_table = torch.tensor([[4, 1, 9]], dtype=torch.int32)
    starts, counts = torch.tensor([0]), torch.tensor([9])
    with pytest.raises(RuntimeError, match="request 0: rows out of range"):
        reference.operator(kv_cache=cache).first(token_ids, starts, counts, hidden, None, block_table)


def assert_close(found, expected, tolerance):
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "vocabulary", ["the target's", "a draft one", "with extra tokens", "each request with extra tokens"]
)
@pytest.mark.parametrize(
    ("num_nodes", "draft_depth", "min_node_value", "level_floor"),
    [
        (8, 4, 0.0, 0.0),
        (30, 4, 0.0, 0.0),  # more nodes than are drafted
        (2, 4, 0.0, 0.0),  # soon no deeper node can be among the best
        (8, 4, 0.05, 0.0),
        (8, 4, 0.0, 0.8),
        (8, 1, 0.0, 0.0),
    ],
)
def test_trees_in_one_call(dtype, vocabulary, num_nodes, draft_depth, min_node_value, level_floor):
    """They are the trees that grow level by level, their values included."""
    layer, root_token_ids, root, weight = begun(dtype)
    head, generator = make_row_linear(weight), torch.Generator().manual_seed(6)
    ids, rows, others = None, None, None
    if vocabulary != "the target's":
        ids = torch.randperm(VOCAB, generator=generator)
    if "with" in vocabulary:
        rows = (torch.randn(5, HIDDEN, generator=generator) / 2).to(dtype)
        ids = torch.cat((ids, torch.arange(100, 105)))
    if "each request" in vocabulary:
        others = torch.tensor([[False, True, False, True, True], [True, False, False, True, False]])

    def score(_, hidden, top_k):
        extra = None if rows is None else extra_logits(hidden, rows, others)
        return likeliest(head(hidden, weight, None), top_k, ids, extra)

    def forward(*level):
        return DraftFeatures(*[layer.forward(*level)] * 2)

    options = {"num_nodes": num_nodes, "draft_top_k": 3, "min_node_value": min_node_value}
    floors = [0.0, level_floor, level_floor][: draft_depth - 1]
    growth = Growth(floors)
    expected = grow_tree(
        root_token_ids,
        DraftFeatures(root, root),
        score,
        forward,
        **options,
        draft_depth=draft_depth,
        may_grow=growth.may_grow,
    )
    drafted_from = DraftVocabulary(linear_of(weight), ids, rows, others)
    found, beams, seconds = layer.grow(root_token_ids, root, drafted_from, **options, level_floors=floors)
    assert_same_draft(found, expected)
    assert beams == pytest.approx(growth.beams) and len(seconds) == len(beams) and all(one > 0 for one in seconds)
    assert (found.tree.num_rows > 1).all() and (min(draft_depth, num_nodes) < 4 or found.tree.depths.max() > 1)


def begun(dtype):
    """A layer after the first forward of two requests, the requests' roots, its outputs, and weights of an LM head."""
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(VOCAB, (2, 40), generator=generator, dtype=torch.int32)
    hidden = torch.randn(22, HIDDEN, generator=generator).to(dtype)
    kv_cache, block_table = torch.zeros(3, KV_HEADS, PAGE, 2 * HEAD_SIZE, dtype=dtype), torch.tensor([[1], [2]]).int()
    starts, counts = torch.zeros(2, dtype=torch.int64), torch.tensor([12, 10])
    layer = Reference(dtype, False).operator(kv_cache=kv_cache)
    root = layer.first(token_ids, starts, counts, hidden, None, block_table)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) / 2
    return layer, token_ids[torch.arange(2), counts].long(), root, weight.to(dtype)


def assert_same_draft(found, expected):
    for name in ("token_ids", "parents", "depths", "num_rows"):
        assert torch.equal(getattr(found.tree, name), getattr(expected.tree, name)), name
    assert torch.equal(found.log_values, expected.log_values)


def test_trees_without_usable_logits():
    layer, root_token_ids, root, weight = begun(torch.float32)
    head = linear_of(torch.full_like(weight, math.nan))
    options = {"num_nodes": 4, "draft_top_k": 3, "level_floors": [0.0, 0.0]}
    found, beams, _ = layer.grow(root_token_ids, root, DraftVocabulary(head, None), **options)
    assert beams == []
    assert found.tree.num_rows.tolist() == [1, 1]
    assert found.tree.token_ids[:, 0].tolist() == root_token_ids.tolist()
    assert (found.tree.token_ids[:, 1:] == -1).all() and torch.isneginf(found.log_values[:, 1:]).all()


def test_rows_out_of_range():
    layer = Reference(torch.float32, False).operator(kv_cache=torch.zeros(2, KV_HEADS, PAGE, 2 * HEAD_SIZE))
    hidden = torch.zeros(4, HIDDEN)
    token_ids, table = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)

    def first(start=0, count=2, token=1, rows=None, hidden=hidden):
        ids = torch.full_like(token_ids, token)
        return layer.first(ids, torch.tensor([start]), torch.tensor([count]), hidden, rows, table)

    with pytest.raises(RuntimeError, match="must follow `first`"):
        layer.forward(0, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, HIDDEN), torch.ones(1, 1, 1).bool())
    assert first().shape == (1, HIDDEN)
    with pytest.raises(RuntimeError, match="rows out of range"):
        long, table = torch.zeros(1, 200, dtype=torch.int32), torch.zeros(1, 9, dtype=torch.int32)
        start, count = torch.tensor([MAX_POSITION]), torch.tensor([2])
        layer.first(long, start, count, hidden, None, table)
    for wrong in ({"start": 7}, {"count": 0}, {"token": VOCAB}, {"rows": torch.tensor([0, 4])}, {"count": 5}):
        with pytest.raises(RuntimeError, match="draft_layer: "):
            first(**wrong)
    with pytest.raises(RuntimeError, match="must follow `first`"):
        layer.forward(4, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, HIDDEN), torch.ones(1, 3, 15).bool())
