"""Lookup: the index against a slow oracle, and the trees drafted from it."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.constants import with_constants
from tests.doubles.contexts import context
from tests.doubles.lookup_reference import draft_matches
from tests.doubles.oracle_tensors import to_rows
from vllm_specplug.budget.calibration import OnlineLogistic, sigmoid
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.cpu.kernels.cpu_ops import call
from vllm_specplug.proposers.lookup.drafting import LookupProposer
from vllm_specplug.proposers.lookup.index import BREAK, RequestIndex, TrafficIndex
from vllm_specplug.proposers.lookup.matches import LONG_ANCHOR, Matches
from vllm_specplug.proposers.lookup.prefix_tree import REQUEST, build_prefix_tree, make_pool

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def slow_places(tokens, n, count):
    """Ends of earlier occurrences of the last ``n`` tokens, newest first."""
    last = len(tokens) - 1
    gram = tokens[last - n + 1 :]
    found = [end for end in range(last - 1, n - 2, -1) if tokens[end - n + 1 : end + 1] == gram]
    return found[:count]


def slow_match(tokens, end, most):
    """Tokens before and at ``end`` that equal the sequence's end."""
    size = 0
    while size < most and end - size >= 0 and tokens[end - size] == tokens[len(tokens) - 1 - size]:
        size += 1
    return size


def propose(proposer, *sequences, **changes):
    """Return the trees as rows; check that values fall from root to leaf."""
    draft = proposer.propose(context([list(tokens) for tokens in sequences], **changes))
    trees = [to_rows(draft.tree, request) for request in range(len(sequences))]
    for request, rows in enumerate(trees):
        values = draft.log_values[request].tolist()
        assert values[0] == 0 and all(values[row] <= values[parent] for row, (_, parent) in enumerate(rows) if row)
        assert all(value == float("-inf") for value in values[len(rows) :])
        assert len(set(rows)) == len(rows)  # equal tokens under one parent share a node
    return trees


CONSTANTS = ("min_match", "max_match", "max_candidates")


def make(**changes):
    constants = {name: changes.pop(name) for name in CONSTANTS if name in changes}
    return LookupProposer(with_constants(parse_options({"method": "lookup", **changes}), **constants))


# ---- the index


@quick
@given(st.data())
def test_index_equals_the_oracle_while_requests_come_grow_and_go(data):
    """Requests over many steps: extended in pieces, in changing batch order, some ended and their slots reused."""
    rng = random.Random(data.draw(st.integers(0, 2**31)))
    anchors = (3, 1)
    index = RequestIndex(48, anchors)
    alive, born = {}, 0
    for _ in range(12):
        if len(alive) < 3 or rng.random() < 0.3:
            alive[f"r{born}"] = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            born += 1
        if len(alive) > 2 and rng.random() < 0.2:
            gone = rng.choice(list(alive))
            index.drop(gone)
            del alive[gone]
        ids = rng.sample(list(alive), rng.randint(1, len(alive)))
        for name in ids:
            alive[name] += [rng.randrange(3) for _ in range(rng.randint(0, min(5, 48 - len(alive[name]))))]
        tokens = np.full((len(ids), 48), 1, dtype=np.int32)
        for row, name in zip(tokens, ids, strict=True):
            row[: len(alive[name])] = alive[name]
        rows = index.slots_of(tuple(ids))
        index.extend(rows, tokens, np.array([len(alive[name]) for name in ids]))
        suffixes = index.suffixes(rows, 6)
        for chain in index.chains:
            places, lengths = chain.follow(index.tokens, suffixes, rows, 60)
            for request, name in enumerate(ids):
                own = alive[name]
                start = int(index.start(int(rows[request])))
                if len(own) < chain.n:
                    continue
                found = [int(place) - start for place in places[request] if place > 0]
                good = [end for end, size in zip(found, lengths[request], strict=False) if size >= chain.n]
                assert good == slow_places(own, chain.n, 60)
                assert all(size == slow_match(own, end, 6) for end, size in zip(found, lengths[request], strict=False))
    for name, tokens in alive.items():
        stored = index.stored(name)
        assert stored is None or stored.tolist() == tokens[: len(stored)]


def test_new_requests_replace_old_ones_when_all_slots_are_in_use():
    index = RequestIndex(16, (1,))
    index.MAX_SLOTS = 16
    for name in range(100):
        rows = index.slots_of((str(name),))
        index.extend(rows, np.full((1, 16), name, dtype=np.int32), np.array([5]))
        assert index.stored(str(name)).tolist() == [name] * 5
    assert index.stored("3") is None and len(index.lens) == 16


def test_changed_tokens_under_one_id_are_stored_anew():
    index = RequestIndex(16, (1,))
    rows = index.slots_of(("a",))
    index.extend(rows, np.arange(16, dtype=np.int32)[None], np.array([9]))
    other = np.array([[5, 6, 5, 6, 5] + [0] * 11], dtype=np.int32)
    index.extend(rows, other, np.array([5]))
    assert index.stored("a").tolist() == [5, 6, 5, 6, 5]
    start = int(index.start(int(rows[0])))
    places, _ = index.chains[0].follow(index.tokens, np.array([[5]], dtype=np.int32), rows, 4)
    assert places[0].tolist() == [start + 2, start, 0, 0]


@quick
@given(st.integers(0, 2**31))
def test_traffic_equals_the_oracle_and_never_crosses_sequences(seed):
    rng = np.random.default_rng(seed)
    ring = TrafficIndex(256, 3)
    kept = []
    for _ in range(rng.integers(1, 40)):
        sequence = rng.integers(0, 4, rng.integers(1, 90)).astype(np.int32)
        ring.add(sequence)
        if len(sequence[-64:]) > 3:
            kept.append(sequence[-64:].tolist())
        assert len(ring.tokens) == 257
    if not kept:
        return
    suffix = rng.integers(0, 4, 5).astype(np.int32)
    places, lengths = ring.chain.follow(ring.tokens, suffix[None], np.zeros(1, np.int64), 300)
    wanted = suffix[::-1].tolist()
    for place, size in zip(places[0].tolist(), lengths[0].tolist(), strict=True):
        if place > 0 and size >= 3:
            matched = ring.tokens[place - size + 1 : place + 1].tolist()
            assert BREAK not in matched and matched == wanted[5 - size :]
    # The newest sequence is whole: each of its matches is found.
    newest = kept[-1]
    ends = [end for end in range(2, len(newest) - 1) if newest[end - 2 : end + 1] == wanted[2:]]
    first = ring.cursor - len(newest)
    assert {first + end for end in ends} <= set(places[0].tolist())


def test_more_tokens_than_a_slot_holds_are_refused():
    """Nothing is written: the memory after the slot belongs to another request."""
    index = RequestIndex(16, (1,))
    rows = index.slots_of(("a", "b"))
    for shape, counts in (((2, 20), [17, 3]), ((2, 8), [3, 9]), ((2, 16), [3, -1])):
        with pytest.raises(ValueError, match="more tokens than a slot holds"):
            index.extend(rows, np.ones(shape, dtype=np.int32), np.array(counts))
        assert not index.lens.any() and not (index.tokens == 1).any()


def test_memory_is_bounded():
    ring = TrafficIndex(4096, 3)
    before = ring.used_bytes()
    for _ in range(50):
        ring.add(np.arange(900, dtype=np.int32))
    assert ring.used_bytes() == before < 4096 * 20
    proposer = make(traffic_tokens=4096)
    for number in range(30):
        proposer.propose(context([[1, 2, 3, 1, 2]], ids=[f"r{number}"]))
        proposer.finish([f"r{number}"])
    assert len(proposer._answers) == len(proposer._records) == 0
    assert len(proposer._index.lens) == 8  # slots are reused


# ---- the tree


@quick
@given(st.integers(0, 2**31))
def test_the_longest_matches_come_first(seed):
    rng = np.random.default_rng(seed)
    num_reqs, count, depth, num_chains = 3, int(rng.integers(1, 5)), int(rng.integers(1, 7)), int(rng.integers(1, 3))
    num_own, has_traffic = num_chains * count, bool(rng.integers(2))
    min_match = int(rng.integers(1, 4))
    max_match = int(rng.integers(min_match, 7))
    tokens, traffic = (rng.integers(0, 99, size).astype(np.int32) for size in (60, 40))
    ends, cursor = rng.integers(20, 59, num_reqs), int(rng.integers(1, 39))
    places = rng.integers(0, 40, (num_reqs, num_own + has_traffic * count))
    places[rng.random(places.shape) < 0.3] = 0
    lengths = rng.integers(0, 8, places.shape) * (places > 0)
    options = (min_match, max_match, count, depth)
    stores = (tokens, ends, traffic, cursor)
    found = call("lookup_best", places, lengths, num_own, *stores, LONG_ANCHOR, *options)
    for request in range(num_reqs):
        expected = []
        for k, (place, length) in enumerate(zip(places[request].tolist(), lengths[request].tolist(), strict=True)):
            own, end = k < num_own, int(ends[request])
            if place == 0 or length < min_match or (own and (place >= end or k >= count and length >= LONG_ANCHOR)):
                continue
            age = end - place if own else (cursor - place) % 39
            if own:
                ahead = [int(tokens[place + 1 + d % age]) for d in range(depth)]
            else:
                ahead = [int(traffic[at]) if at < 40 else BREAK for at in range(place + 1, place + 1 + depth)]
            expected.append((ahead, min(length, max_match), age, own))
        expected.sort(key=lambda match: -match[1])  # stable
        matches = list(zip(*(values[request].tolist() for values in found), strict=True))
        nothing = ([BREAK] * depth, 0, 1, False)
        assert matches == (expected + [nothing] * count)[:count]


@quick
@given(st.integers(0, 2**31))
def test_features_and_values_of_nodes_equal_those_of_their_paths(seed):
    rng = np.random.default_rng(seed)
    num_reqs, count, depth = 2, int(rng.integers(1, 7)), int(rng.integers(1, 6))
    tokens = rng.integers(0, 3, (num_reqs, count, depth)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = BREAK
    lengths, ages = rng.integers(0, 70, (num_reqs, count)), rng.integers(1, 99, (num_reqs, count))
    lengths[rng.random(lengths.shape) < 0.2] = 0
    own, request_features = rng.random((num_reqs, count)) < 0.5, rng.normal(size=num_reqs)
    tree = build_prefix_tree(Matches(tokens, lengths, ages, own), request_features)
    weights, rows = rng.normal(size=(3, 6)), np.array([3, 1])
    log_odds = OnlineLogistic(weights).log_odds(tree.models, tree.features)
    pool = make_pool(tree, log_odds, rows, 4)
    assert pool.size == depth * count and (pool.log_values[[0, 2]] == -math.inf).all()
    assert (np.isfinite(pool.log_values[rows].numpy()) == tree.nodes.reshape(num_reqs, -1)).all()
    for request in range(num_reqs):
        best = lengths[request].max()
        paths = {(): [k for k in range(count) if lengths[request, k]]}
        for k in paths[()]:
            path = tokens[request, k].tolist()
            for size in range(1, depth + 1 if BREAK not in path else path.index(BREAK) + 1):
                paths.setdefault(tuple(path[:size]), []).append(k)
        values, columns = {(): 0.0}, {(): -1}
        assert tree.nodes[request].sum() == len(paths) - 1
        for path, who in list(paths.items())[1:]:
            d, k = len(path) - 1, who[0]
            weight, of_parent = (
                sum(2.0 ** (lengths[request, j] - best) for j in paths[up]) for up in (path, path[:-1])
            )
            features = [
                1.0,
                math.log2(min(lengths[request, k] + d, 64)),
                math.log((weight + 1e-3) / (max(of_parent - weight, 0) + 0.5)),
                math.log2(len(who)),
                math.log2(1 + ages[request, k]) / 10,
                request_features[request],
            ]
            owners = {bool(own[request, j]) for j in who}
            model = {(True,): 0, (False,): 1}.get(tuple(owners), 2)
            logit = sum(feature * weight for feature, weight in zip(features, weights[model], strict=True))
            columns[path] = d * count + k
            values[path] = values[path[:-1]] + math.log(sigmoid(logit))
            assert tree.nodes[request, d, k] and tree.models[request, d, k] == model
            assert all(tree.leaders[request, d, other] == k for other in who)
            assert tree.features[request, d, k].tolist() == pytest.approx(features)
            assert log_odds[request, d, k] == pytest.approx(logit)
            of_pool = (pool.token_ids, pool.parents, pool.depths, pool.log_values)
            found = [part[rows[request], columns[path]].item() for part in of_pool]
            assert found == [path[-1], columns[path[:-1]], d + 1, pytest.approx(values[path], rel=1e-5)]


def test_what_followed_is_drafted():
    proposer = make(num_speculative_tokens=4, draft_depth=4)
    (rows,) = propose(proposer, [5, 6, 7, 8, 9, 10, 5, 6, 7])
    assert rows == [(7, -1), (8, 0), (9, 1), (10, 2), (5, 3)]


def test_no_match_and_not_wanted_draft_a_root():
    proposer = make()
    rows = propose(proposer, [1, 2, 3], [4, 4, 4, 4], [9], wanted=[True, False, True])
    assert rows == [[(3, -1)], [(4, -1)], [(9, -1)]]
    assert propose(proposer, [1, 2, 3], wanted=[False]) == [[(3, -1)]]


def test_traffic_of_ended_requests_is_found_and_can_be_switched_off():
    for traffic_tokens, expected in ((1024, [21, 22, 23]), (0, [])):
        proposer = make(traffic_tokens=traffic_tokens, draft_depth=3, num_speculative_tokens=3, min_node_value=0.0)
        assert propose(proposer, [1, 2, 3, 4, 5, 6]) == [[(6, -1)]]
        propose(proposer, [1, 2, 3, 4, 5, 6, 11, 12, 13, 21, 22, 23, 24])
        proposer.finish(["0", "never seen"])
        (rows,) = propose(proposer, [50, 11, 12, 13], ids=["new"])
        assert [token for token, _ in rows[1:]] == expected


@pytest.mark.parametrize("seed", range(6))
def test_only_answers_are_kept(seed):
    """Sessions, pauses and requests that end early; inputs have tokens below 50, answers those from 50 on."""
    rng = random.Random(seed)
    proposer, kept, live = make(traffic_tokens=1024, min_node_value=0.0), [], {}
    add = proposer._traffic.add

    def listen(tokens, namespace):
        kept.append((tokens.tolist(), namespace))
        add(tokens, namespace)

    proposer._traffic.add = listen
    for number in range(300):
        if len(live) < 4:
            live[f"r{number}"] = {"tokens": [], "prompt_len": 0, "salt": rng.choice([0, 5, -(2**63)])}
        name = rng.choice(list(live))
        request = live[name]
        if not request["tokens"] or rng.random() < 0.15:  # an input; the last tokens of the turn before are dropped
            request["tokens"] = request["tokens"][: -rng.randint(1, 3)] + [rng.randrange(50) for _ in range(9)]
            request["prompt_len"] = len(request["tokens"])
            continue
        request["tokens"] += [rng.randrange(50, 99) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.8:  # else it was drafted for without this proposer
            given = {"prompt_lens": [request["prompt_len"]], "namespaces": [request["salt"]]}
            proposer.propose(context([request["tokens"]], ids=[name], max_len=2048, **given))
        if rng.random() < 0.1:
            proposer.finish([name])
            del live[name]
    assert len(kept) > 20 and all(token >= 50 for tokens, _ in kept for token in tokens)
    assert {namespace for _, namespace in kept} == {0, 5, -(2**63)}


def test_answers_are_found_by_requests_of_their_namespace_only():
    proposer = make(traffic_tokens=1024, draft_depth=3, num_speculative_tokens=3, min_node_value=0.0)
    proposer.propose(context([[1, 2, 3, 11, 12, 13, 21, 22, 23]], ids=["old"], prompt_lens=[3], namespaces=[-7]))
    proposer.finish(["old"])
    asks = {"prompt_lens": [1, 1, 1], "namespaces": [0, -7, 7], "ids": ["a", "b", "c"]}
    found = propose(proposer, *[[50, 11, 12, 13]] * 3, **asks)
    assert [[token for token, _ in rows[1:]] for rows in found] == [[], [21, 22, 23], []]


def test_min_match():
    history = [1, 5, 9, 2, 5]
    assert propose(make(min_node_value=0.0, draft_depth=1), history) == [[(5, -1), (9, 0)]]
    assert propose(make(min_match=2, min_node_value=0.0), history) == [[(5, -1)]]
    assert propose(make(min_match=4, max_match=4, min_node_value=0.0), history) == [[(5, -1)]]


def test_it_learns_which_matches_are_reliable():
    """Matches that are never right get fewer nodes, matches that are always right get all."""
    sizes = {}
    for truth in ("broken", "kept"):
        rng = random.Random(0)
        proposer, tokens, sizes[truth] = make(min_node_value=0.05, num_speculative_tokens=8), [1, 2, 3], []
        for _ in range(300):
            tokens = [*tokens, 1, 2, 3, rng.randrange(10, 99) if truth == "broken" else 4]
            rows = propose(proposer, tokens[:-1], ids=["r"], max_len=2048)[0]
            sizes[truth].append(len(rows) - 1)
        assert proposer.calibration.outcomes.sum() > 200
    assert sum(sizes["broken"][-20:]) < 0.6 * sum(sizes["broken"][5:25])
    assert min(sizes["kept"][-20:]) == 8


@pytest.mark.parametrize("seed", range(8))
def test_learning_by_brute_force(seed):
    """Requests come, pause and change their order; outcomes and records equal those computed from the paths."""
    rng = random.Random(seed)
    proposer = make(draft_depth=4, max_candidates=5, traffic_tokens=1024)
    seen, learn = [], proposer.calibration.learn

    def listen(models, features, accepted):
        seen.extend(zip(models.tolist(), features.tolist(), accepted.tolist(), strict=True))
        learn(models, features, accepted)

    proposer.calibration.learn = listen
    sequences, records = {name: [rng.randrange(3) for _ in range(12)] for name in "abc"}, {}
    for _ in range(40):
        last, sizes = proposer._last_draft, {name: len(tokens) for name, tokens in sequences.items()}
        then = {} if last is None else dict(zip(last.request_ids, last.num_tokens.tolist(), strict=True))
        for tokens in sequences.values():
            tokens += [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        ids = rng.sample("abc", rng.randint(1, 3))
        seen.clear()
        propose(proposer, *(sequences[name] for name in ids), ids=ids, max_len=256)
        expected = []
        for name in ids:
            if name not in then:
                continue
            assert then[name] == sizes[name]
            chosen, place, sums = sequences[name][sizes[name] :], last.request_ids.index(name), [0.0, 0.0]
            for d, k in zip(*np.nonzero(last.valued.tree.nodes[place]), strict=True):
                path = last.valued.tree.token_ids[place, : d + 1, k].tolist()
                if len(chosen) > d and path[:-1] == chosen[:d]:
                    model, features = last.valued.tree.models[place, d, k], last.valued.tree.features[place, d, k]
                    expected.append((model, features.tolist(), path[-1] == chosen[d]))
                    of_request = features[REQUEST] * proposer.calibration.weights[model, REQUEST]
                    sums[0] += path[-1] == chosen[d]
                    sums[1] += sigmoid(last.valued.log_odds[place, d, k] - of_request)
            records[name] = [0.9 * old + new for old, new in zip(records.get(name, (0, 0)), sums, strict=True)]
        assert seen == expected
        assert {name: list(record) for name, record in proposer._records.items()} == {
            name: pytest.approx(record) for name, record in records.items()
        }
    assert proposer.calibration.outcomes.sum() > 20


# ---- in torch


@quick
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 9))
def test_torch_trees_equal_those_of_the_proposer(seed, num_nodes, draft_depth):
    """With candidates for all matches: of more, the proposer keeps the newest, the torch version the longest."""
    rng = random.Random(seed)
    token_ids, lens = random_histories(rng, 4)
    changes = dict(max_candidates=32, min_match=rng.randint(1, 3), max_match=rng.randint(3, 6))
    proposer = make(
        num_speculative_tokens=num_nodes, draft_depth=draft_depth, min_node_value=0.0, traffic_tokens=0, **changes
    )
    slots = torch.tensor([3, 1, 0])
    sequences = [token_ids[slot, : lens[slot]].tolist() for slot in slots.tolist()]
    expected = proposer.propose(context(sequences, max_len=token_ids.shape[1]))
    draft = draft_matches(token_ids, slots, lens, expected.tree.token_ids[:, 0], proposer.options)
    assert draft.tree.token_ids.shape == (3, num_nodes + 1)
    for request in range(3):
        assert to_rows(draft.tree, request) == to_rows(expected.tree, request)
    assert draft.log_values[:, : expected.log_values.shape[1]].tolist() == [
        pytest.approx(values, abs=1e-5) for values in expected.log_values.tolist()
    ]


def random_histories(rng, count):
    """Tokens of some requests, padded with garbage, and the number of tokens of each."""
    lens = torch.tensor([rng.randint(1, 30) for _ in range(count)], dtype=torch.int32)
    token_ids = torch.tensor([[rng.randrange(3) for _ in range(33)] for _ in range(count)], dtype=torch.int32)
    return token_ids, lens


# ---- options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_match": 8}, "'max_match' was removed: matches of more than 16 tokens count as 16. Leave it out"),
        ({"traffic_tokens": 5}, "traffic_tokens=5 is too small: choose 1024 or more, or 0 for none"),
        ({"traffic_tokens": -1}, "out of range"),
        ({"min_node_value": "x"}, "must be a number"),
        ({"draft_depth": 33}, "draft_depth=33 is out of range"),
        ({"model": "x"}, "unknown key 'model' for method 'lookup'; valid keys: .*traffic_tokens"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_options({"method": "lookup", **changes})
