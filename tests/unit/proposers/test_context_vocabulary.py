"""Tokens of a request's own text extend a reduced draft vocabulary."""

import numpy as np
import pytest
import torch

from vllm_specplug.proposers.eagle2.context_vocabulary import ContextVocabulary, fair_shares

LM_HEAD = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DRAFT_IDS = torch.tensor([1, 2, 5])
HIDDEN = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
EVERY = HIDDEN @ LM_HEAD.T


@pytest.fixture
def vocabulary():
    return ContextVocabulary(LM_HEAD.__getitem__, len(LM_HEAD), DRAFT_IDS, max_extra=512)


def update(vocabulary, **texts):
    longest = max(map(len, texts.values()))
    token_ids = np.array([[*text, *[0] * (longest - len(text))] for text in texts.values()])
    vocabulary.update(list(texts), token_ids, np.array([len(text) for text in texts.values()]))


def extended(vocabulary):
    """Logits over ``vocabulary.ids``."""
    extra = vocabulary.extra_logits(HIDDEN)
    return torch.cat([EVERY[:, DRAFT_IDS], *([] if extra is None else [extra])], dim=1)


def test_own_tokens_are_added(vocabulary):
    update(vocabulary, a=[1, 9, 2, 7, 9])
    assert vocabulary.ids.tolist() == [1, 2, 5, 7, 9]
    torch.testing.assert_close(extended(vocabulary), EVERY[:, vocabulary.ids])


def test_nothing_is_added_if_the_draft_vocabulary_has_all_tokens(vocabulary):
    update(vocabulary, a=[1, 5, 1])
    assert vocabulary.ids is DRAFT_IDS
    assert torch.equal(extended(vocabulary), EVERY[:, DRAFT_IDS])


def test_tokens_of_other_requests_are_not_drafted(vocabulary):
    """Two rows of each request; both have 9."""
    update(vocabulary, a=[9, 7], b=[1, 9, 12])
    assert vocabulary.ids.tolist() == [1, 2, 5, 7, 9, 12]
    expected = EVERY[:, vocabulary.ids].clone()
    expected[:2, 5] = expected[2:, 3] = float("-inf")
    torch.testing.assert_close(extended(vocabulary), expected)


def test_new_tokens_are_added_and_ended_requests_removed(vocabulary):
    update(vocabulary, a=[7], b=[8])
    update(vocabulary, a=[7, 3], b=[8, 1])
    assert vocabulary.ids.tolist() == [1, 2, 5, 3, 7, 8]
    vocabulary.finish(["b", "unknown"])
    update(vocabulary, a=[7, 3])
    assert vocabulary.ids.tolist() == [1, 2, 5, 3, 7]
    update(vocabulary, b=[4])  # another request with the same id
    assert vocabulary.ids.tolist() == [1, 2, 5, 4]


def test_a_text_that_got_shorter_is_processed_anew(vocabulary):
    update(vocabulary, a=[7, 8, 9])
    update(vocabulary, a=[10])
    assert vocabulary.ids.tolist() == [1, 2, 5, 10]


def test_each_request_has_a_share_for_its_latest_tokens():
    vocabulary = ContextVocabulary(LM_HEAD.__getitem__, len(LM_HEAD), DRAFT_IDS, max_extra=3)
    update(vocabulary, a=[7, 8, 9, 7], b=[11])
    assert vocabulary.ids.tolist() == [1, 2, 5, 7, 9, 11]  # 7 came again after 8
    update(vocabulary, **{name: [10 + place, 15 + place] for place, name in enumerate("abcde")})
    assert len(vocabulary.ids) == len(DRAFT_IDS) + 3


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [([100, 2], 10, [8, 2]), ([9, 9], 10, [5, 5]), ([1, 9, 4], 10, [1, 5, 4]), ([5, 5, 5], 2, [0, 1, 1]), ([], 4, [])],
)
def test_what_a_short_request_does_not_want_goes_to_a_long_one(wanted, total, shares):
    assert fair_shares(wanted, total) == shares
