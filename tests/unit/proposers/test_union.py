"""Union trees: merging and selection against dictionaries of paths, learning, failing sources, options."""

import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles import oracle
from tests.doubles.contexts import context
from tests.doubles.oracle_tensors import to_rows, to_tree
from tests.doubles.union_reference import merge_drafts
from vllm_specplug.budget.calibration import LOGIT_LIMIT, log_odds_of, sigmoid
from vllm_specplug.config import ConfigError, Eagle2Options, TreeOptions, model_drafter, parse_options
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.tree import from_flat
from vllm_specplug.cpu.draft import flatten
from vllm_specplug.proposer import as_draft
from vllm_specplug.proposers.union.drafting import UnionProposer
from vllm_specplug.proposers.union.learning import pattern_of, start_weights
from vllm_specplug.proposers.union.merge import DRAFTED, NOT_EXPANDED, OMITTED, merge
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.types import Draft, TokenTree

quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)
ROOTS = (90, 91, 92)


def random_draft(rng, num_reqs, max_nodes):
    """A draft of random trees and falling values: (draft, its rows, its values)."""
    trees = [[(ROOTS[request], -1), *oracle.random_tree(rng, max_nodes, 3)[1:]] for request in range(num_reqs)]
    tree = to_tree(trees, max_nodes + 1)
    values = []
    for rows in trees:
        own = [0.0]
        for _, parent in rows[1:]:
            own.append(own[parent] + math.log(rng.choice([1.0, 0.9, 0.5, 0.5, 0.1])))
        values.append(own)
    padded = [own + [-math.inf] * (max_nodes + 1 - len(own)) for own in values]
    return Draft(tree, torch.tensor(padded)), trees, values


def paths(rows):
    """Token path of each row, the root left out of the paths."""
    return [tuple(rows[row][0] for row in oracle.path_to(rows, at)[1:]) for at in range(len(rows))]


@quick
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 3))
def test_merge_equals_dictionaries_of_paths(seed, num_sources, num_reqs):
    rng = oracle.seeded(seed)
    drafted = [random_draft(rng, num_reqs, 12) if rng.random() < 0.9 else None for _ in range(num_sources)]
    merged = merge([one and one[0] for one in drafted], num_reqs)
    found = {}
    names = [(request,) for request in range(num_reqs)]
    for node, (request, token, parent) in enumerate(
        zip(merged.requests.tolist(), merged.token_ids.tolist(), merged.parents.tolist(), strict=True)
    ):
        assert parent < num_reqs + node and names[parent][0] == request
        names.append((*names[parent], token))
        assert merged.depths[node] == len(names[-1]) - 1
        assert names[-1] not in found
        found[names[-1]] = node
    expected = {}
    for source, one in enumerate(drafted):
        for request in range(num_reqs if one else 0):
            rows, values = one[1][request], one[2][request]
            for row, path in enumerate(paths(rows)):
                if row:
                    edge = log_odds_of(min(values[row] - values[rows[row][1]], 0.0))
                    expected.setdefault((request, *path), {}).setdefault(source, edge)  # the first of equal siblings
    assert found.keys() == expected.keys()
    # Ordered by request and depth, as the selection needs it, then in the order of the sources.
    assert list(found) == sorted(expected, key=lambda path: (path[0], len(path)))
    assert merged.counts.tolist() == [sum(path[0] == request for path in found) for request in range(num_reqs)]
    for path, estimates in expected.items():
        siblings = [other for other in expected if other[:-1] == path[:-1]]
        for source in range(num_sources):
            state = merged.states[source, found[path]]
            if source in estimates:
                assert state == DRAFTED
                assert merged.log_odds[source, found[path]] == pytest.approx(estimates[source], abs=2e-3)
            else:
                omitted = any(source in expected[other] for other in siblings)
                assert state == (OMITTED if omitted else NOT_EXPANDED) and merged.log_odds[source, found[path]] == 0


class Fixed:
    """A source that returns a given draft, or raises a given error."""

    def __init__(self, draft=None):
        self.draft, self.ended = draft, []

    def propose(self, context):
        if isinstance(self.draft, Exception):
            raise self.draft
        return self.draft

    def finish(self, request_ids):
        self.ended += request_ids


def make(*sources, num_nodes=16, min_node_value=0.0):
    options = UnionOptions(
        sources=[{"method": "lookup"}], num_speculative_tokens=num_nodes, min_node_value=min_node_value
    )
    union = UnionProposer(options)
    union.names = tuple("abcd"[: len(sources)])
    union._sources, union._guards = list(sources), [Guard(name) for name in union.names]
    union.calibration.__init__(start_weights(len(sources)))
    return union


def rows_context(num_reqs=1, **changes):
    return context([[1, ROOTS[request]] for request in range(num_reqs)], **changes)


def sums_along_paths(merged, edges):
    sums = [0.0] * merged.num_reqs
    for parent, edge in zip(merged.parents.tolist(), edges.tolist(), strict=True):
        sums.append(sums[parent] + edge)
    return np.array(sums[merged.num_reqs :])


@quick
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 20))
def test_the_best_nodes_of_all_are_kept(seed, num_sources, num_nodes):
    """The tree is the best set of nodes that contains all their ancestors; ``source_bits`` name the sources."""
    rng = oracle.seeded(seed)
    drafts = [random_draft(rng, 2, 10) for _ in range(num_sources)]
    union = make(*(Fixed(draft) for draft, _, _ in drafts), num_nodes=num_nodes)
    draft = union.propose(rows_context(2))
    opened = union._last_draft.valued
    for request in range(2):
        rows = to_rows(draft.tree, request)
        assert rows[0] == (ROOTS[request], -1) and len(set(rows)) == len(rows)
        mine = np.flatnonzero(opened.merged.requests == request)
        assert len(rows) - 1 == min(num_nodes, len(mine))
        values = draft.log_values[request, : len(rows)].tolist()
        depths = draft.tree.depths[request, : len(rows)].tolist()
        assert depths == sorted(depths)
        by_path = dict(zip(paths(rows), values, strict=True))
        bits = dict(zip(paths(rows), draft.source_bits[request].tolist(), strict=False))
        for source, (_, trees, _) in enumerate(drafts):
            own = set(paths(trees[request])[1:])
            for path in by_path:
                assert bits[path] >> source & 1 == (path in own)
        log_values = sums_along_paths(opened.merged, np.log(1 / (1 + np.exp(-opened.log_odds))))[mine]
        kept = sorted(by_path.values(), reverse=True)[1:]
        best = sorted(np.float32(log_values).tolist(), reverse=True)[: len(kept)]
        assert kept == pytest.approx(best, abs=1e-4)


def test_ties_go_to_the_shallower_node():
    deep = as_draft(to_tree([[(ROOTS[0], -1), (1, 0), (2, 1)]]))
    wide = as_draft(to_tree([[(ROOTS[0], -1), (3, 0)]]))
    deep = Draft(deep.tree, torch.tensor([[0.0, math.log(0.5), math.log(0.5)]]))  # certain of the second
    union = make(Fixed(deep), Fixed(wide), num_nodes=2)
    union.calibration.weights[:] = 0.0  # all nodes are equally likely
    union.calibration.weights[:, 0] = 30.0  # and certain, up to the floor
    rows = to_rows(union.propose(rows_context()).tree, 0)
    assert rows == [(ROOTS[0], -1), (1, 0), (3, 0)]


def test_agreement_raises_and_omission_lowers_a_value():
    both = Draft(to_tree([[(ROOTS[0], -1), (5, 0), (6, 0)]]), torch.tensor([[0.0, math.log(0.5), math.log(0.4)]]))
    one = Draft(to_tree([[(ROOTS[0], -1), (5, 0)]]), torch.tensor([[0.0, math.log(0.5)]]))
    alone = make(Fixed(both)).propose(rows_context()).log_values[0].exp()
    union = make(Fixed(both), Fixed(one)).propose(rows_context()).log_values[0].exp()
    assert union[1] > alone[1] == pytest.approx(0.5) and union[2] < alone[2] == pytest.approx(0.4)


def test_the_model_drafter_comes_last_and_may_draft_nothing():
    """It receives the most tokens that any other draft of the request is expected to bring."""
    own = Draft(to_tree([[(ROOTS[0], -1), (5, 0), (6, 1)]]), torch.tensor([[0.0, math.log(0.5), math.log(0.25)]]))
    less = Draft(to_tree([[(ROOTS[0], -1), (5, 0)]]), torch.tensor([[0.0, math.log(0.5)]]))
    model = Draft(to_tree([[(ROOTS[0], -1), (7, 0)]]), torch.tensor([[0.0, math.log(0.5)]]))
    for answer, token_ids in ((model, {5, 6, 7}), (None, {5, 6})):
        received = []

        def draft_by_model(expected, answer=answer, received=received):
            received.append(expected.tolist())
            return answer

        tree = make(None, Fixed(own), Fixed(less)).propose(rows_context(draft_by_model=draft_by_model)).tree
        assert received == [[0.75]] and {token for token, _ in to_rows(tree, 0)[1:]} == token_ids


def test_a_draft_of_the_model_alone_is_not_merged():
    """Its values stay as they are, nothing is learned from it, and nodes below the minimum value are left out."""
    empty = as_draft(to_tree([[(ROOTS[0], -1)]]))
    rows = [(ROOTS[0], -1), (5, 0), (6, 0), (7, 1)]
    model = Draft(to_tree([rows]), torch.tensor([[0.0, math.log(0.7), math.log(0.04), math.log(0.5)]]))
    found = rows_context(draft_by_model=lambda expected: model)
    for others in ((), (empty,), (RuntimeError("no"), empty)):
        union = make(*map(Fixed, others), None, num_nodes=3, min_node_value=0.05)
        draft = union.propose(found)
        assert to_rows(draft.tree, 0) == [rows[0], rows[1], (7, 1)] and union._last_draft is None
        assert draft.log_values[0].exp().tolist() == pytest.approx([1.0, 0.7, 0.5])
        assert draft.source_bits.tolist() == [[0, 1 << len(others), 1 << len(others)]]
    assert make(None, num_nodes=2).propose(found).tree.num_rows.tolist() == [3]  # more nodes than the union keeps
    merged = make(Fixed(as_draft(to_tree([[(ROOTS[0], -1), (9, 0)]]))), None)
    assert 9 in merged.propose(found).tree.token_ids[0].tolist() and merged._last_draft is not None


@pytest.mark.parametrize("is_alone", [False, True], ids=["merged", "the model alone"])
def test_nodes_behind_the_best_five_need_a_higher_value(is_alone):
    def kept(values, floor):
        rows = [(ROOTS[0], -1), *((token, 0) for token in range(10, 10 + len(values)))]
        draft = Draft(to_tree([rows]), torch.tensor([[0.0, *map(math.log, values)]]))
        union = make(None if is_alone else Fixed(draft), min_node_value=floor)
        tree = union.propose(rows_context(draft_by_model=lambda expected: draft)).tree
        return [token - 10 for token, _ in to_rows(tree, 0)[1:]]

    many = [0.4, 0.1, *[0.4] * 6, 0.2]
    assert kept(many, None) == [0, *range(2, 8)]
    assert kept(many, 0.06) == list(range(9)) and kept(many, 0.15) == [0, *range(2, 9)]
    assert kept([0.4, 0.08, 0.1, 0.09, 0.4, 0.3, 0.07], None) == [0, 2, 3, 4, 5]
    assert kept([0.4, 0.1, 0.1, 0.05], None) == [0, 1, 2]
    assert UnionOptions(sources=[{"method": "lookup"}], budget="measured").costly_node_floor == 0.01


def test_no_source_drafts_anything():
    nothing = as_draft(to_tree([[(ROOTS[0], -1)], [(ROOTS[1], -1)]]))
    for source in (Fixed(nothing), Fixed(RuntimeError("no")), Fixed(None), None):
        draft = make(source).propose(rows_context(2))
        assert draft.tree.num_rows.tolist() == [1, 1]
        assert draft.tree.token_ids[:, 0].tolist() == list(ROOTS[:2])


def test_learning_by_brute_force():
    """Outcomes of random trees equal those computed from the paths: parent right and the next token known."""
    rng = oracle.seeded(3)
    for _ in range(60):
        drafts = [random_draft(rng, 2, 10) for _ in range(2)]
        union = make(*(Fixed(draft) for draft, _, _ in drafts))
        seen = []
        union.calibration.learn = lambda patterns, features, accepted, seen=seen: seen.append(
            (patterns.tolist(), accepted.tolist())
        )
        union.propose(rows_context(2, ids=["a", "b"]))
        merged, patterns = union._last_draft.valued.merged, union._last_draft.valued.patterns.tolist()
        states, estimates = merged.states.T.tolist(), sigmoid(merged.log_odds).T.tolist()
        chosen = [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(2)]
        names = [(0,), (1,)]
        for token, parent in zip(merged.token_ids.tolist(), merged.parents.tolist(), strict=True):
            names.append((*names[parent], token))
        expected, records = [], {}
        for (request, *path), pattern, state, estimated in zip(names[2:], patterns, states, estimates, strict=True):
            known = chosen[request][: len(path)]
            if len(known) == len(path) and path[:-1] == known[:-1]:
                expected.append((pattern, path[-1] == known[-1]))
                for source in range(2):
                    if state[source] == DRAFTED:
                        record = records.setdefault("ab"[request], [[0.9, 1.8], [2.7, 3.6]])
                        record[source][0] += path[-1] == known[-1]
                        record[source][1] += estimated[source]
        # The requests swap their order, and another one joins the batch.
        later = [[1, ROOTS[1], *chosen[1]], [8, 8], [1, ROOTS[0], *chosen[0]]]
        union._records = {name: np.array([[1.0, 2.0], [3.0, 4.0]]) for name in records}  # records decay
        union._sources = [Fixed(None), Fixed(None)]
        union.propose(context(later, ids=["b", "new", "a"]))
        assert seen == [([pattern for pattern, _ in expected], [right for _, right in expected])]
        assert union._records.keys() == records.keys()
        for name, record in records.items():
            assert union._records[name] == pytest.approx(np.array(record))


def test_a_paused_or_ended_request_has_no_outcomes():
    draft = as_draft(to_tree([[(ROOTS[0], -1), (5, 0)]]))
    union = make(Fixed(draft))
    learned = []
    union.calibration.learn = lambda *outcome: learned.append(len(outcome[0]))
    union.propose(rows_context(ids=["a"]))
    union.propose(rows_context(ids=["b"]))
    assert learned == [0]
    union.propose(rows_context(ids=["b"]))  # no new token
    assert learned == [0, 0]
    union.finish(["b"])
    assert union._sources[0].ended == ["b"] and not union._records


def test_an_overconfident_source_loses_its_rank():
    """Source a estimates 0.9 and is right in 1 of 5 cases, b estimates 0.3 and is right in 4 of 5: b's node is kept."""
    rng = oracle.seeded(0)
    a = Draft(to_tree([[(7, -1), (5, 0)]]), torch.tensor([[0.0, math.log(0.9)]]))
    b = Draft(to_tree([[(7, -1), (6, 0)]]), torch.tensor([[0.0, math.log(0.3)]]))
    union = make(Fixed(a), Fixed(b), num_nodes=1)
    assert to_rows(union.propose(context([[1, 7]])).tree, 0)[1][0] == 5
    tokens = [1, 7]
    for step in range(400):
        if len(tokens) > 60:
            tokens = [1, 7]
        tokens = [*tokens, 5 if rng.random() < 0.2 else 6]
        draft = union.propose(context([tokens], ids=[f"r{step // 59}"]))
    assert to_rows(draft.tree, 0)[1][0] == 6
    assert math.exp(draft.log_values[0, 1]) == pytest.approx(0.8, abs=0.2)


# ---- in torch


@quick
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 20))
def test_torch_merging_equals_the_proposer(seed, num_sources, num_nodes):
    """With the initial weights.  No two nodes have the same value: the two versions order ties differently."""
    rng = oracle.seeded(seed)
    drafts = [untied(rng, random_draft(rng, 3, rng.randint(1, 12))[0]) for _ in range(num_sources)]
    check_device(drafts, num_nodes)


def untied(rng, draft):
    """The draft with random values, all different."""
    log_values = draft.log_values.clone()
    for request, row in draft.tree.depths.nonzero().tolist():
        parent = draft.tree.parents[request, row]
        log_values[request, row] = log_values[request, parent] + math.log(rng.uniform(0.02, 0.98))
    return Draft(draft.tree, log_values)


def check_device(drafts, num_nodes, weights=None):
    """Check that ``merge_drafts`` equals the proposer, with learned weights if given; return the proposer's draft."""
    num_reqs = len(drafts[0].log_values)
    union = make(*map(Fixed, drafts), num_nodes=num_nodes)
    if weights is not None:
        union.calibration.weights[:] = weights
    expected = union.propose(rows_context(num_reqs, vocab_size=1000))
    found = merge_drafts(drafts, num_nodes, weights)
    assert found.tree.token_ids.shape == found.log_values.shape == (num_reqs, num_nodes + 1)
    for request in range(num_reqs):
        trees = [
            dict(zip(paths(rows), draft.log_values[request].tolist(), strict=False))
            for draft in (expected, found)
            for rows in [to_rows(draft.tree, request)]
        ]
        assert trees[1] == pytest.approx(trees[0], abs=1e-4)
        parents = found.tree.parents[request].tolist()
        assert all(parent < row for row, parent in enumerate(parents))
        assert len(trees[1]) == found.tree.num_rows[request] == len([row for row in parents if row >= 0]) + 1
    return expected


# ---- the guard


def spoilt(change):
    """A good tree with something wrong."""
    token_ids, parents = torch.tensor([[90, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 2]])
    tree = from_flat(token_ids, parents, torch.tensor([4]))
    parts = {"token_ids": tree.token_ids, "parents": tree.parents, "depths": tree.depths, "num_rows": tree.num_rows}
    log_values = torch.tensor([[0.0, -1.0, -1.0, -2.0]])
    parts, log_values = change({name: part.clone() for name, part in parts.items()}, log_values)
    return Draft(TokenTree(**parts), log_values)


def put(name, index, value):
    def change(parts, log_values):
        (log_values if name == "log_values" else parts[name])[index] = value
        return parts, log_values

    return change


def swap(name, convert):
    return lambda parts, log_values: ({**parts, name: convert(parts[name])}, log_values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("token_ids", (0, 2), 100), "outside of 0 to 99"),
        (put("token_ids", (0, 2), -1), "outside of 0 to 99"),
        (put("parents", (0, 3), 3), "must be a row above it"),
        (put("parents", (0, 1), -1), "must be a row above it"),
        (put("depths", (0, 3), 1), "depths do not follow"),
        (put("num_rows", 0, 0), "from 1 to 4"),
        (put("num_rows", 0, 5), "from 1 to 4"),
        (put("log_values", (0, 3), -0.5), "never above the parent's"),
        (put("log_values", (0, 1), math.nan), "never above the parent's"),
        (put("log_values", (0, 0), -1.0), "0 at the root"),
        (put("log_values", (0, 0), math.nan), "0 at the root"),
        (swap("parents", lambda parents: parents[:, :2]), "must be .num_reqs, num_rows."),
        (swap("token_ids", lambda tokens: tokens[0]), "must be .num_reqs, num_rows."),
        (swap("token_ids", lambda tokens: tokens.float()), "must be integers"),
        (swap("depths", lambda depths: None), "NoneType"),
    ],
)
def test_guard_refuses(change, message, caplog):
    guard = Guard("x")
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        for _ in range(3):
            assert guard(lambda: spoilt(change), rows_context()) is None
    assert guard.failures == 3 and len(caplog.records) == 1
    assert re.search(message, caplog.records[0].getMessage())


def test_guard_passes_cuts_and_roots():
    def honest(parts, log_values):
        parts["token_ids"][0, 0] = 55  # the context decides what the root is
        return parts, log_values

    draft = Guard("x")(lambda: spoilt(honest), rows_context(), num_nodes=2)
    assert to_rows(draft.tree, 0) == [(90, -1), (5, 0), (6, 0)]
    assert draft.log_values.tolist() == [[0.0, -1.0, -1.0, -math.inf]]
    draft = Guard("x")(lambda: spoilt(honest).tree, rows_context(wanted=[False]))
    assert to_rows(draft.tree, 0) == [(90, -1)]


# ---- drafts for the scheduler


def test_flat_drafts_name_their_sources():
    tree = to_tree([[(9, -1), (1, 0), (2, 1)], [(9, -1)]])
    draft = Draft(tree, as_draft(tree).log_values, ("x", "y"), torch.tensor([[0, 3, 2], [0, 0, 0]]))
    first, second = flatten(draft)
    assert (first.token_ids, first.parents, first.sources) == ([1, 2], [0, 1], [["x", "y"], ["y"]])
    assert first.log_values == pytest.approx([math.log(0.5), math.log(0.25)])
    assert (second.token_ids, second.parents, second.sources) == ([], [], [])
    assert flatten(as_draft(tree))[0].sources == []


# ---- patterns and options


def test_each_pattern_has_its_weights():
    rng = oracle.seeded(1)
    drafts = [random_draft(rng, 1, 6)[0] for _ in range(3)]
    merged = merge(drafts, 1)
    numbers = dict(zip(map(tuple, merged.states.T.tolist()), pattern_of(merged).tolist(), strict=True))
    assert len(set(numbers.values())) == len(numbers)
    weights = start_weights(3)
    for states, number in zip(itertools.product(range(3), repeat=3), range(27), strict=True):
        states = states[::-1]
        used = weights[number, 2:5] > 0
        assert used.tolist() == [state == DRAFTED for state in states]
    assert np.abs(merged.log_odds).max() <= LOGIT_LIMIT


def parse(*sources, **changes):
    return parse_options({"method": "union", "sources": list(sources), **changes})


EAGLE, LOOKUP = {"method": "eagle2", "model": "m", "draft-depth": 3}, {"method": "lookup"}


def test_sources_are_typed():
    options = parse(EAGLE, LOOKUP)
    assert [source.method for source in options.sources] == ["eagle2", "lookup"]
    assert isinstance(options.sources[0], Eagle2Options) and options.sources[0].draft_depth == 3
    assert all(isinstance(source, TreeOptions) for source in options.sources)
    assert pickle.loads(pickle.dumps(options)) == options
    assert model_drafter(options) is options.sources[0] and model_drafter(parse(LOOKUP)) is None
    assert model_drafter(options.sources[0]) is options.sources[0]


@pytest.mark.parametrize(
    ("sources", "changes", "message"),
    [
        ([], {}, "sources must be a list of 1 to 4 sources, like"),
        ([LOOKUP] * 5, {}, "sources must be a list of 1 to 4"),
        ([LOOKUP, LOOKUP], {}, "'lookup' is given twice"),
        (["lookup"], {}, r"sources\[0\] must be an object with a method, not 'lookup'"),
        ([LOOKUP, {"method": "nonsense"}], {}, r"sources\[1\]: method='nonsense' is unknown; .*eagle2.*union"),
        ([{"method": "union", "sources": [LOOKUP]}], {}, r"sources\[0\] is itself a union"),
        ([{"method": "eagle2"}], {}, r"sources\[0\]: method 'eagle2' needs 'model'"),
        ([{**LOOKUP, "min_match": 0}], {}, r"sources\[0\]: .*'min_match' was removed"),
        ([{**LOOKUP, "trace_trees": "x"}], {}, r"sources\[0\]: 'trace_trees' belongs to the union: give it next to"),
        ([LOOKUP], {"min_node_value": 1}, "min_node_value=1 is out of range"),
        ([LOOKUP], {"model": "x"}, "unknown key 'model' for method 'union'; valid keys: .*sources"),
    ],
)
def test_bad_sources(sources, changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(*sources, **changes)
