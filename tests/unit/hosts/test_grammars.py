"""Grammars on trees are walked and masked alike on every version of the host: stand-ins have what each of them has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specplug.vllm.grammars import tree_masks, walk_grammar

THINK_END, TOOL = 40, 50
#: Mid-reasoning, reasoning may end in the second level (row 2), and content follow it.  Rows: 0 the root; 1 thought;
#: 2 its end; 3 and 4 after it, allowed and not; 5 after 3; 6 thought after 1; 7 no token.
TOKEN_IDS = [7, THINK_END, 1, 3, 2, 8, -1]
PARENTS = [0, 0, 2, 2, 3, 1, 0]


class Grammar:
    """Allows 1, 2, 3 in turn, and ends."""

    def __init__(self):
        self.state = 0

    def is_terminated(self):
        return self.state == 3

    def validate_tokens(self, token_ids):
        return token_ids if token_ids == [self.state + 1] else []

    def accept_tokens(self, request_id, token_ids):
        assert request_id == "r" and self.validate_tokens(token_ids)
        self.state += len(token_ids)
        return True

    def rollback(self, count):
        self.state -= count

    def fill_bitmask(self, bitmask, row):
        bitmask[row] = 0
        bitmask[row, 0] = 1 << (self.state + 1)


class Reasoner:
    """One token ends reasoning."""

    def is_reasoning_end_streaming(self, token_ids, delta):
        assert list(token_ids)[-len(delta) :] == list(delta)
        return THINK_END in delta


class Manager:
    backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros(rows, 2, dtype=torch.int32))

    def _start(self, request, path):
        if request.structured_output_request.reasoning_ended:
            return 0
        return path.index(THINK_END) + 1 if THINK_END in path else len(path) + 1


class Manager029(Manager):
    def should_fill_bitmask(self, request):
        return request.structured_output_request.reasoning_ended

    def _get_reasoner(self, request):
        return Reasoner()


class Manager031(Manager):
    def _get_constraint_start(self, request, path):
        return self._start(request, path)


class Manager032(Manager):
    def _get_constraint_bounds(self, request, path):
        if TOOL in path:  # a tool call ends reasoning and is content itself
            return path.index(TOOL), path.index(TOOL) + 1
        start = self._start(request, path)
        return start, start


class Manager033(Manager032):
    def _masked_reasoning_ends(self, request):
        return (TOOL, 31)


VERSIONS = [Manager029(), Manager031(), Manager032(), Manager033()]


def request(reasoning_ended=False):
    structured = SimpleNamespace(grammar=Grammar(), reasoning_ended=reasoning_ended)
    return SimpleNamespace(request_id="r", structured_output_request=structured, all_token_ids=(5, 6))


def walked(manager, reasoning_ended, token_ids=TOKEN_IDS, parents=PARENTS):
    """By visited row: the grammar's state, or None where nothing is constrained."""
    found, one = {}, request(reasoning_ended)

    def visit(row, grammar, _):
        found[row] = None if grammar is None else grammar.state

    walk_grammar(manager, one, token_ids, parents, visit)
    assert one.structured_output_request.grammar.state == 0
    return found


@pytest.mark.parametrize("manager", VERSIONS, ids=lambda manager: type(manager).__name__)
def test_reasoning_ends_within_a_tree(manager):
    assert walked(manager, False) == {0: None, 1: None, 2: 0, 3: 1, 5: 2, 6: None}


@pytest.mark.parametrize("manager", VERSIONS, ids=lambda manager: type(manager).__name__)
def test_no_reasoning(manager):
    """From the root on; and nothing is constrained after the grammar's end."""
    assert walked(manager, True) == {0: 0}
    assert walked(manager, True, [1, 2, 3, 1, -1], [0, 1, 2, 1, 2]) == {0: 0, 1: 1, 2: 2, 3: None}


@pytest.mark.parametrize("manager", VERSIONS[2:], ids=lambda manager: type(manager).__name__)
def test_content_that_ends_reasoning_must_be_allowed(manager):
    assert walked(manager, False, [TOOL, 7], [0, 0]) == {0: None, 2: None}


@pytest.mark.parametrize("manager", VERSIONS, ids=lambda manager: type(manager).__name__)
def test_masks_lie_where_the_worker_looks(manager):
    """Two trees of different sizes: side by side, or from 0.33 on at equal distances."""
    trees = [([1], [0]), (TOKEN_IDS, PARENTS)]
    masks = tree_masks(manager, [request(True), request()], trees).view(np.uint32)
    since_033 = manager is VERSIONS[-1]
    stride = masks.shape[0] // len(trees) if since_033 else 2  # as the worker of 0.33 finds it
    assert masks.shape[0] == (16 if since_033 else 10)
    only = {state: [1 << (state + 1), 0] for state in range(3)}
    everything = [2**32 - 1, 2**32 - 1]
    # Rows 4 and 7 are not allowed: nothing looks at their masks.
    reasons = [2**31 - 1, 2**32 - 1 - (1 << (TOOL - 32))] if since_033 else everything
    assert masks[:2].tolist() == [only[0], only[1]]
    expected = [reasons, reasons, only[0], only[1], everything, only[2], reasons, everything]
    assert masks[stride : stride + 8].tolist() == expected
