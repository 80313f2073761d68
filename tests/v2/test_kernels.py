"""Every Triton kernel against its torch reference, on inputs of the same factories."""

import functools
from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl

from tests.doubles.attention_inputs import attend_on_device, make_inputs
from tests.doubles.contexts import make_match_inputs as make_keys_inputs
from tests.doubles.lookup_reference import match_keys as reference_keys
from tests.doubles.reference_step import move_rows as reference_moves
from tests.doubles.reference_step import walk_tokens
from tests.unit.kernels.test_tree_attention import TOLERANCE
from tests.unit.kernels.test_tree_attention import exact as exact_with
from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.layout import ancestor_bits, ancestor_mask, lay_out
from vllm_specplug.core.step import plan_step
from vllm_specplug.core.tree import depths_from_parents, from_flat
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.gpu.kernels import tree_attention as triton_tree_attention
from vllm_specplug.gpu.kernels.lookup import match_keys
from vllm_specplug.gpu.kernels.step import cache_pointers, move_rows, stage_rows, store_trees, walk_rows
from vllm_specplug.gpu.kernels.step import plan_step as plan_by_kernel
from vllm_specplug.gpu.kernels.tiles import warm_up
from vllm_specplug.gpu.kernels.tree_attention import _find_part, tree_attention
from vllm_specplug.types import PADDING, Walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(values):
    return {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in values.items()}


def exact(inputs):
    """The reference's output in float64 arithmetic, with the traits of the inputs."""
    traits = inputs.get("traits", NO_TRAITS)
    return exact_with({name: value for name, value in inputs.items() if name != "traits"}, traits)


def traits_on_device(traits):
    return AttentionTraits(**on_device({field.name: getattr(traits, field.name) for field in fields(traits)}))


def run_attention(inputs, **changes):
    """The kernel on a copy of ``inputs``; the output on the CPU."""
    device = on_device({**inputs, "output": inputs["output"].clone()})
    if "traits" in device:
        device["traits"] = traits_on_device(device["traits"])
    attend_on_device(tree_attention, **device, **changes)
    return device["output"].cpu()


def assert_matches(inputs, **changes):
    expected = exact(inputs)
    output = run_attention(inputs, **changes).double()
    written = ~expected.isnan()
    assert written.any()
    assert torch.equal(written, ~output.isnan()), "rows named by no request were written, or garbage leaked"
    deviation = (output - expected)[written].abs().max() / expected[written].abs().max()
    # Weights are rounded to 16 bits too, for the tensor cores; the interpreter truncates where hardware rounds.
    assert deviation <= TOLERANCE[inputs["query"].dtype] * (1 if inputs["query"].dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("context", [0, 1, 100, 200])
def test_attention_context(dtype, num_splits, context):
    inputs = make_inputs((context, 5), (17, 3), block_size=16, dtype=dtype, kv_layout=TOKEN_LAYOUT)
    assert_matches(inputs, num_splits=num_splits)


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_size, block_size", [(4, 4, 32, 16), (8, 2, 128, 32), (7, 1, 80, 48), (2, 1, 256, 16)]
)
def test_attention_shapes(num_heads, num_kv_heads, head_size, block_size):
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size)
    assert_matches(make_inputs((70, 0), (9, 1), kv_layout=TOKEN_LAYOUT, **heads))


@pytest.mark.parametrize("rows, nodes", [(1, 1), (8, 60), (61, 61), (10, 130), (4, 0)])
def test_attention_tree_lengths(rows, nodes):
    """Query and tree rows differ in number at a drafter's levels; trees may need several words and tiles."""
    inputs = make_inputs((40, 7, 3), (rows, 2, 0), tree_lens=(nodes, 3, 0), kv_layout=TOKEN_LAYOUT)
    assert_matches(inputs)


@triton.jit
def _find_parts_kernel(found_ptr, num_items, num_reqs, context_lens_ptr, WINDOW: tl.constexpr):
    item = tl.program_id(0)
    request, part, share = _find_part(item, num_items, num_reqs, context_lens_ptr, WINDOW, 64)
    tl.store(found_ptr + 3 * item, request)
    tl.store(found_ptr + 3 * item + 1, part)
    tl.store(found_ptr + 3 * item + 2, share)


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("num_reqs", [1, 3, 130])
def test_parts_of_uneven_contexts(num_reqs, window):
    """Every context is covered once, by parts of one length."""
    context_lens = ints(*([9000, 0, 129] + [640, 1] * 70)[:num_reqs])
    num_items = num_reqs + 6
    found = torch.zeros(num_items, 3, dtype=torch.int32, device=DEVICE)
    _find_parts_kernel[(num_items,)](found, num_items, num_reqs, context_lens, window)
    first = (context_lens + 1 - window).clamp(min=0) // 64 if window else torch.zeros_like(context_lens)
    tiles = (-(-context_lens // 64) - first).tolist()
    share = max(-(-sum(tiles) // 6), 2)
    expected = [[r, part, share] for r in range(num_reqs) for part in range(max(1, -(-tiles[r] // share)))]
    assert found[: len(expected)].tolist() == expected
    assert (found[len(expected) :, 0] >= num_reqs).all()


@pytest.mark.parametrize("window", [0, 300])
def test_attention_over_uneven_contexts(window):
    inputs = trait_inputs(AttentionTraits(window=window), (900, 0, 130), (3, 2, 4))
    assert_matches(inputs, num_splits=4)


def test_number_of_splits(monkeypatch):
    """As many programs as an H100 runs at once: one of 8 warps or two of 4 on each of 132 multiprocessors."""
    monkeypatch.setattr(triton_tree_attention, "_num_processors", lambda _: 132)
    wide, narrow = {"num_warps": 8, "BLOCK_N": 64}, {"num_warps": 4, "BLOCK_N": 64}

    def splits(num_programs, longest, tiles):
        return triton_tree_attention._num_splits(torch.device("cuda"), num_programs, longest, 0, tiles)

    assert [splits(16 * batch, None, wide) for batch in (1, 2, 4, 8, 9)] == [8, 4, 2, 1, 1]
    assert [splits(8, longest, narrow) for longest in (None, 8192, 1024, 100)] == [32, 32, 8, 1]


def test_warm_up_launches_every_variant(monkeypatch):
    """Whatever rows and splits a step has, its kernels were compiled at start."""
    launched, run = set(), triton_tree_attention._tree_attention_kernel.run
    names = ("SPLIT", "BLOCK_M", "BLOCK_N", "HEAD_SIZE", "PAGE", "GROUP", "num_warps", "num_stages", "WINDOW")

    def noted(*args, **kwargs):
        launched.add(tuple(kwargs[name] for name in names))
        return run(*args, **kwargs)

    monkeypatch.setattr(triton_tree_attention._tree_attention_kernel, "run", noted)
    inputs = on_device(trait_inputs(AttentionTraits(window=20), rows=(70, 3, 0), contexts=(300, 5, 0)))
    attends = [functools.partial(tree_attention, num_splits=splits) for splits in (1, 2)]
    warm_up(attends, inputs["kv_cache"], 4, ancestor_bits(inputs["mask"]), inputs["traits"])
    warmed = set(launched)
    assert len(warmed) == 2 * len({16, 32, 64, 128})
    for rows in (1, 7, 9, 17, 40, 70):
        for num_splits in (1, 2, 5):
            made = trait_inputs(AttentionTraits(window=20), (300,), (rows,))
            assert_matches(made, num_splits=num_splits)
    assert launched == warmed


def test_attention_control_with_a_wrong_bit():
    """The negative control: one ancestor more or less must be seen."""
    inputs = make_inputs((20,), (9,), kv_layout=TOKEN_LAYOUT)
    inputs["mask"][0, 8, 1] ^= True
    wrong = run_attention(inputs)
    inputs["mask"][0, 8, 1] ^= True
    right = run_attention(inputs)
    row = int(inputs["query_start"][0]) + 8
    assert not torch.allclose(wrong[row], right[row])


# ---- traits of a layer


def per_head(num_heads, factor=1.0):
    return factor * torch.randn(num_heads, generator=torch.Generator().manual_seed(3)).abs()


#: The heads are 4; trees of 17 rows are about 5 deep.
TRAITS = {
    "window over all": AttentionTraits(window=100),
    "window in the context": AttentionTraits(window=20),
    "window in the tree": AttentionTraits(window=3),
    "window of one": AttentionTraits(window=1),
    "soft cap": AttentionTraits(soft_cap=0.4),
    "sinks": AttentionTraits(sinks=per_head(4)),
    "high sinks": AttentionTraits(sinks=per_head(4) + 30),
    "alibi": AttentionTraits(alibi_slopes=per_head(4, 0.1)),
    "all": AttentionTraits(window=7, soft_cap=2.0, sinks=per_head(4), alibi_slopes=per_head(4, 0.1)),
}


def trait_inputs(traits, contexts=(57, 5, 0), rows=(17, 3, 2), **changes):
    sizes = dict(num_heads=4, num_kv_heads=2, head_size=32, block_size=16, kv_layout=TOKEN_LAYOUT)
    return make_inputs(contexts, rows, **{**sizes, **changes}) | {"traits": traits}


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("name", TRAITS)
def test_attention_traits(name, num_splits):
    contexts = (57, 5, 0) if num_splits == 1 else (200, 5, 0)  # a part has 128 keys at least
    assert_matches(trait_inputs(TRAITS[name], contexts), num_splits=num_splits)


@pytest.mark.parametrize("name", ["window in the tree", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_traits_in_half(name, dtype):
    assert_matches(trait_inputs(TRAITS[name], dtype=dtype))


@pytest.mark.parametrize("window", [9, 66, 70])
@pytest.mark.parametrize("slopes", [None, per_head(4, 0.02)])
def test_attention_traits_over_words_of_the_mask(window, slopes):
    """Chains of more than 64 rows: distances go on over the mask's words."""
    traits = AttentionTraits(window=window, alibi_slopes=slopes)
    assert_matches(trait_inputs(traits, (40,), (5,), tree_lens=(130,), causal=True))


def test_a_window_does_not_read_what_it_hides():
    """vLLM may have given the pages before a window to another request, or holes in the table."""
    inputs = trait_inputs(AttentionTraits(window=20), (64,), (9,))
    expected = run_attention(inputs)
    inputs["kv_cache"][inputs["block_table"][0, :2].long()] = float("nan")
    assert torch.equal(run_attention(inputs).nan_to_num(7), expected.nan_to_num(7))
    # Position 45 is the first that the root sees.
    inputs["kv_cache"][inputs["block_table"][0, 2].long(), :, 45 - 32] = float("nan")
    assert not torch.equal(run_attention(inputs).nan_to_num(7), expected.nan_to_num(7))


def changed(traits, **changes):
    return replace(traits, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"window": 6}, {"window": 8}, {"window": 0}, {"soft_cap": 0.0}, {"soft_cap": 2.1}, {"sinks": None},
     {"alibi_slopes": None}],
)  # fmt: skip
def test_controls_of_traits(changes):
    """The negative controls: each change must be seen."""
    inputs = trait_inputs(TRAITS["all"])
    expected = exact(inputs)
    output = run_attention({**inputs, "traits": changed(TRAITS["all"], **changes)}).double()
    written = ~expected.isnan()
    assert (output - expected)[written].abs().max() / expected[written].abs().max() > 1e-3


def make_trees(num_rows=(12, 1, 7, 70), width=70, seed=0, chain=False, vocab=4):
    """Random trees of few different tokens, one per request; some hold the placeholder token."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((len(num_rows), width), PADDING)
    for r, rows in enumerate(num_rows):
        for i in range(1, rows):
            parents[r, i] = i - 1 if chain else int(torch.randint(max(0, i - 9), i, (1,), generator=g))
    tokens = torch.randint(0, vocab, (len(num_rows), width), generator=g)
    tokens[torch.rand(tokens.shape, generator=g) < 0.1] = PADDING
    return from_flat(tokens, parents, torch.tensor(num_rows))


def kept(tree, num_slots=6, slots=(4, 0, 5, 2)):
    """The trees in slots, as ``store_trees`` keeps them."""
    num_reqs, width = tree.parents.shape
    slots = torch.tensor(slots[:num_reqs], device=DEVICE)
    parents = torch.full((num_slots, width), 77, device=DEVICE)
    depths, bits = torch.full_like(parents, 77), torch.full((num_slots, width, -(-width // 64)), 77, device=DEVICE)
    store_trees(tree.parents.to(DEVICE), slots, parents, depths, bits, int(tree.depths.max()))
    return slots, parents, depths, bits


@pytest.mark.parametrize("chain", [False, True])
def test_store_trees(chain):
    tree = make_trees(chain=chain)
    slots, parents, depths, bits = (t.cpu() for t in kept(tree))
    assert torch.equal(parents[slots], tree.parents)
    assert torch.equal(depths[slots], depths_from_parents(tree.parents))
    assert torch.equal(bits[slots], ancestor_bits(ancestor_mask(tree)))
    assert (parents[1] == 77).all() and (bits[3] == 77).all()  # other slots stay


def test_store_trees_makes_faulty_trees_harmless():
    """Parents at or below their child, far outside, of padding, and nodes deeper than was said: none is a node."""
    faulty = torch.tensor([[-1, 0, 2, 1, 4, 2, -9, 6, 1 << 40, 99, 3, 10]])
    right = torch.tensor([[-1, 0, -1, 1, -1, -1, -1, -1, -1, -1, 3, -1]])  # depths 0, 1, 2 and 3; the limit is 3
    kept = []
    for tree_parents in (faulty, right):
        slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        parents, depths = (torch.full((1, 12), 77, device=DEVICE) for _ in range(2))
        bits = torch.full((1, 12, 1), 77, device=DEVICE)
        store_trees(tree_parents.to(DEVICE), slots, parents, depths, bits, 3)
        kept.append((parents.tolist(), depths.tolist(), bits.tolist()))
    assert kept[0] == kept[1] and kept[0][0] == right.tolist()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_stage_rows():
    """Trees cut by the scheduler behind rows of a prefill, a request without drafts, and padding."""
    tree = make_trees()
    slots, _, depths, slot_bits = kept(tree)
    num_rows, before, context = torch.tensor([12, 1, 5, 70]), torch.tensor([0, 3, 2, 0]), torch.tensor([9, 4, 0, 30])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (before + num_rows).cumsum(0)])
    positions = torch.full((int(starts[-1]) + 3,), -5, device=DEVICE)
    tree_start, tree_lens, context_lens = ints(*[9] * 6), ints(*[9] * 6), ints(*[9] * 6)
    bits = torch.full((6, 70, 2), 77, device=DEVICE)
    seq_lens = (before + context + num_rows).to(DEVICE, torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), num_rows.cumsum(0)]).to(DEVICE, torch.int32)
    query_start_loc = starts.to(DEVICE, torch.int32)
    stage_rows(
        slots, query_start_loc, seq_lens, offsets, depths, slot_bits, positions, context_lens, tree_start, tree_lens,
        bits, 5,
    )  # fmt: skip
    layout = lay_out(tree, before + context)
    assert tree_lens.tolist() == [12, 0, 5, 70, 0, 9]
    assert context_lens.tolist() == [9, 0, 2, 30, 0, 9]  # without a tree there is nothing to attend to
    for r in (0, 2, 3):
        rows, first = int(num_rows[r]), int(starts[r + 1] - num_rows[r])
        assert int(tree_start[r]) == first
        assert torch.equal(positions[first : first + rows].cpu(), layout.positions[r, :rows])
        assert torch.equal(bits[r, :rows].cpu(), ancestor_bits(layout.mask)[r, :rows])
    assert (positions[int(starts[1]) : int(starts[2])] == -5).all()  # no tree: the host's own positions


@pytest.mark.parametrize("seed", [0, 1, 3, 4])  # of 2, no accepted row has to move
def test_walk_and_moves(seed):
    tree = make_trees(seed=seed, vocab=2)
    num_reqs, width = tree.parents.shape
    slots, parents, *_ = kept(tree)
    lens = tree.num_rows
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    sampled = torch.randint(0, 2, (int(offsets[-1]),), generator=torch.Generator().manual_seed(seed))
    flat = torch.cat([tree.token_ids[r, : lens[r]] for r in range(num_reqs)])
    row_tokens = torch.zeros(num_reqs, width, dtype=torch.int64)
    for r in range(num_reqs):
        row_tokens[r, : lens[r]] = sampled[offsets[r] : offsets[r + 1]]
    expected = walk_tokens(tree, row_tokens)
    output, path, num_emitted = walk_rows(
        slots, offsets.to(DEVICE, torch.int32), flat.to(DEVICE, torch.int32), sampled.to(DEVICE), parents
    )
    assert expected.num_emitted.max() > 1
    assert torch.equal(output.cpu(), expected.output_token_ids.long())
    assert torch.equal(path.cpu(), expected.path_rows)
    assert torch.equal(num_emitted.cpu().long(), expected.num_emitted)

    # Rows of the forward lie in shuffled slots of paged caches.
    caches = [torch.randn(9, 2, 16, 24) for _ in range(3)]
    slot_mapping = torch.randperm(9 * 16)[: int(offsets[-1])]
    rows = [cache.transpose(1, 2).flatten(0, 1).clone() for cache in caches]
    for cache in rows:
        reference_moves(cache, plan_step(expected, offsets[:-1], int(offsets[-1])), slot_mapping)
    moved = [cache.clone().to(DEVICE) for cache in caches]
    walk = Walk(output, path, num_emitted)
    planned = plan_step(walk, offsets[:-1].to(DEVICE, torch.int32), int(offsets[-1]))
    plan = plan_by_kernel(walk, offsets[:-1].to(DEVICE, torch.int32), int(offsets[-1]))
    assert all(torch.equal(*pair) for pair in zip(vars(plan).values(), vars(planned).values(), strict=True))
    move_rows(cache_pointers(moved), moved[0], slot_mapping.to(DEVICE), plan.source_rows, plan.target_rows)
    for cache, before, after in zip(moved, caches, rows, strict=True):
        assert torch.equal(cache.cpu().transpose(1, 2).flatten(0, 1), after)
        assert not torch.equal(cache.cpu(), before)


@pytest.mark.parametrize("num_flat_rows", [25, 700])
def test_plan_of_a_mixed_step(num_flat_rows):
    """Other rows before, between and behind the trees keep their places; nothing may be sampled for a request."""
    path = torch.tensor([[0, 2, 4, -1], [0, -1, -1, -1], [0, 1, -1, -1], [0, -1, -1, -1]]).to(DEVICE)
    walk = Walk(path, path, torch.tensor([3, 1, 2, 0]).to(DEVICE, torch.int32))
    starts = torch.tensor([2, 9, 16, 21]).to(DEVICE, torch.int32)
    expected = plan_step(walk, starts, num_flat_rows)
    found = plan_by_kernel(walk, starts, num_flat_rows)
    assert all(torch.equal(*pair) for pair in zip(vars(found).values(), vars(expected).values(), strict=True))


def test_layers_that_share_a_cache_move_its_rows_once():
    """Moved twice at the same time, a row that came late may go on to a place before."""
    first, second = torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)
    assert len(cache_pointers([first, second, first])) == 2


def test_caches_of_one_shape_are_required():
    with pytest.raises(ValueError, match="caches differ"):
        cache_pointers([torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 16)])


# ---- the search of lookup


@pytest.mark.parametrize("max_len", [40, 2100])
@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 16), (3, 5)])
def test_match_keys(max_len, min_match, max_match):
    """Contexts from nothing to the last place, over several blocks of the kernel."""
    inputs = make_keys_inputs([0, 1, 2, max_len // 2, max_len, max_len], max_len, seed=max_len + max_match)
    for slots in (inputs["slots"], torch.tensor([4, 2], dtype=torch.int32)):
        inputs["slots"] = slots
        expected = reference_keys(**inputs, min_match=min_match, max_match=max_match)
        assert (expected > 0).any()
        found = match_keys(**on_device(inputs), min_match=min_match, max_match=max_match)
        assert torch.equal(found.cpu(), expected)
