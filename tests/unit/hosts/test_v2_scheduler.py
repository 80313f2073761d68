"""What the V2 runner's scheduler does with drafts that were copied for grammars, in the order of the host's calls."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from tests.unit.hosts.test_grammars import Grammar, Manager032, Manager033
from vllm_specplug.gpu import scheduler as v2_scheduler
from vllm_specplug.gpu.scheduler import TreeRequests
from vllm_specplug.vllm.grammars import TreeDraftTokenIds

#: Allowed: 1, then 2 after it.  Rows: 0 the root; 1; 2 not allowed; 3 a child of row 1.
TOKEN_IDS, PARENTS = [1, 3, 2, 9], [0, 0, 1, 2]
EVERYTHING = [2**32 - 1, 2**32 - 1]


class Host:
    """What is called of the host's scheduler."""

    scheduler_config = SimpleNamespace(enable_chunked_prefill=True)

    def update_draft_token_ids(self, drafts):
        for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[req_id].spec_token_ids = token_ids

    def _update_after_schedule(self, output):
        for req_id in output.num_scheduled_tokens:
            self.requests[req_id].spec_token_ids = [-1] * 4

    def get_grammar_bitmask(self, output):
        return "the host's"


class Scheduler(TreeRequests, Host):
    def __init__(self, manager, **requests):
        super().__init__()
        self.requests, self.structured_output_manager, self.num_spec_tokens = requests, manager, 4


def make_request(name, structured, speculation=True):
    return SimpleNamespace(
        request_id=name,
        use_structured_output=structured,
        structured_output_request=SimpleNamespace(grammar=Grammar(), reasoning_ended=True),
        all_token_ids=(5,),
        is_prefill_chunk=False,
        status=RequestStatus.RUNNING,
        sampling_params=SimpleNamespace(extra_args={"speculation": speculation}),
        spec_token_ids=[],
    )


@pytest.fixture(params=[Manager032, Manager033])
def scheduler(request):
    return Scheduler(
        request.param(), r=make_request("r", True), b=make_request("b", False), c=make_request("c", False, False)
    )


def output(**drafts):
    return SimpleNamespace(
        num_scheduled_tokens={"r": 5, "b": 5, "c": 1},
        scheduled_spec_decode_tokens=drafts,
        has_structured_output_requests=True,
    )


def copied():
    return TreeDraftTokenIds(["r", "b", "c"], [[*TOKEN_IDS], [7] * 4, [7] * 4], [[*PARENTS], [0] * 4, [0] * 4])


def masks_of(scheduler, step):
    found = scheduler.get_grammar_bitmask(step)
    assert found.structured_output_request_ids == ["r"]
    return found.grammar_bitmask.view(np.uint32).tolist(), found.num_acceptable_drafts


WANTED = [[2, 0], [4, 0], EVERYTHING, [8, 0], EVERYTHING]


def test_synchronous(scheduler):
    scheduler.update_draft_token_ids(copied())
    drafts = {name: one.spec_token_ids for name, one in scheduler.requests.items()}
    assert drafts == {"r": TOKEN_IDS, "b": [7] * 4, "c": []}  # nodes that the grammar forbids stay in the tree
    assert masks_of(scheduler, output(r=drafts["r"], b=drafts["b"])) == (WANTED, [4])


def test_a_session_that_waits_for_input_keeps_no_drafts(scheduler):
    scheduler.requests["r"].status = RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.requests["b"].status = RequestStatus.WAITING  # its next input has come
    scheduler.update_draft_token_ids(copied())
    assert not any(one.spec_token_ids for one in scheduler.requests.values())


def test_asynchronous(scheduler):
    """The drafts are known after the next forward's launch: they take the place of placeholders in the step."""
    step = output(r=[-1] * 4, b=[-1] * 4)
    scheduler._update_after_schedule(step)
    assert scheduler.requests["c"].spec_token_ids == []
    scheduler.update_draft_token_ids_in_output(copied(), step)
    assert step.scheduled_spec_decode_tokens == {"r": TOKEN_IDS, "b": [-1] * 4}
    assert masks_of(scheduler, step) == (WANTED, [4])


def test_fewer_nodes_scheduled(scheduler):
    step = output(r=[-1] * 3)
    scheduler.update_draft_token_ids_in_output(copied(), step)
    masks, acceptable = masks_of(scheduler, step)
    assert masks[:4] == WANTED[:4] and acceptable == [3]
    # The worker of 0.33 wants as many masks for every request.
    assert len(masks) == (5 if isinstance(scheduler.structured_output_manager, Manager033) else 4)


def test_unknown_drafts_are_not_acceptable(scheduler):
    """Placeholders in a step that waits for nothing, and drafts of an earlier step."""
    for drafts in (DraftTokenIds(["r"], [[-1] * 4]), copied()):
        scheduler._keep(drafts if isinstance(drafts, TreeDraftTokenIds) else TreeDraftTokenIds(["r"], [[-1] * 4]))
        assert masks_of(scheduler, output(r=[-1] * 4)) == ([[2, 0]] + [EVERYTHING] * 4, [0])


def test_masked_rows_are_bounded(scheduler, monkeypatch):
    for rows, count in ((1, 0), (2, 1), (4, 3), (100, 4)):
        monkeypatch.setattr(v2_scheduler, "MASKED_ROWS", rows)
        scheduler.update_draft_token_ids(copied())
        masks, acceptable = masks_of(scheduler, output(r=[*TOKEN_IDS]))
        assert acceptable == [count]
        assert masks == WANTED[: count + 1] + [EVERYTHING] * (4 - count)


def test_the_hosts_masks_without_trees(scheduler):
    assert scheduler.get_grammar_bitmask(output()) == "the host's"
