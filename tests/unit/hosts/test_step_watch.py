"""Whose drafts helped, from the record of a step on the V1 runner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_specplug.config import parse_options
from vllm_specplug.cpu.drafters.flat_draft import FlatDraft
from vllm_specplug.types import PADDING, TokenTree, Walk
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.vllm.draft_watch import StepWatch

EAGLE = {"method": "eagle2", "model": "some/head"}
UNION = {"method": "union", "sources": [EAGLE, {"method": "lookup"}]}
ROWS = 4
#: Two children of the root, and one child of the first of them.
TOKENS, PARENTS = [7, 8, 9], [0, 0, 1]


def step(*requests):
    """Requests: (names of each node's proposers, accepted row of the first level or 0, tokens of the known draft)."""
    tree = TokenTree(
        torch.tensor([[5, *TOKENS]] * len(requests)),
        torch.tensor([[-1, *PARENTS]] * len(requests)),
        torch.zeros(len(requests), ROWS, dtype=torch.int64),
        torch.full((len(requests),), ROWS),
    )
    rows = torch.tensor([[0, row or PADDING] for _, row, _ in requests])
    emitted = torch.tensor([2 if row else 1 for _, row, _ in requests])
    drafts = {
        str(place): FlatDraft(list(tokens), list(PARENTS), [0.0] * 3, sources)
        for place, (sources, _, tokens) in enumerate(requests)
    }
    walk = Walk(torch.zeros(len(requests), 2, dtype=torch.int32), rows, emitted)
    return SimpleNamespace(tree=tree, walk=walk, req_ids=list(drafts), drafts=drafts)


HEAD, LOOKUP, BOTH = ["eagle2"], ["lookup"], ["eagle2", "lookup"]


@pytest.mark.parametrize(
    ("request_", "counted"),
    [
        (([HEAD, LOOKUP, HEAD], 1, TOKENS), (1, 1)),
        (([HEAD, LOOKUP, HEAD], 2, TOKENS), (1, 0)),  # lookup's node was accepted
        (([HEAD, BOTH, HEAD], 2, TOKENS), (1, 1)),
        (([HEAD, LOOKUP, HEAD], 0, TOKENS), (1, 0)),
        (([LOOKUP, LOOKUP, HEAD], 1, TOKENS), (0, 0)),  # the head drafted no first token
        (([HEAD, LOOKUP, HEAD], 1, [7, 9, 8]), (0, 0)),  # another draft than the one that was verified
    ],
)
def test_the_share_of_a_unions_head(request_, counted):
    watch = StepWatch(parse_options(UNION), None, Counters(None))
    watch(step(request_, request_))
    assert (watch.judged.drafts, watch.judged.helpful) == tuple(2 * count for count in counted)
    assert (watch.all.drafts, watch.all.helpful) == (2, 2 if request_[1] else 0)


def test_a_head_alone(caplog):
    watch = StepWatch(parse_options(EAGLE), None, Counters(None))
    watch(step(([], 1, TOKENS), ([], 0, TOKENS)))
    assert (watch.judged.drafts, watch.judged.helpful) == (watch.all.drafts, watch.all.helpful) == (2, 1)
    watch(SimpleNamespace(tree=None))
    assert watch.all.drafts == 2
