"""What a proposer compiles is compiled when the server starts, and a warm-up that fails leaves no trace."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vllm_specplug.config import parse_options
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.tree import static_tree
from vllm_specplug.hosts.drafters import model_free as free_proposer
from vllm_specplug.proposer import Method
from vllm_specplug.types import Draft

#: Serve some rounds behind the start-up; prints what is compiled before and after.
SERVE = """
import json, sys
from types import SimpleNamespace
import numpy as np
from vllm_specplug.utils.compiled import compiled
from vllm_specplug.config import parse_options
from vllm_specplug.hosts.drafters.model_free import make_drafting

def signatures():
    return {
        f"{name}.{key}": len(value.signatures)
        for name, module in sorted(sys.modules.items()) if name.startswith("vllm_specplug")
        for key, value in vars(module).items() if isinstance(value, compiled)
    }

drafting = make_drafting(parse_options(json.loads(sys.argv[1])), 100)
before, drafted = signatures(), 0
for step in range(30):
    num_reqs = 1 + step % 3
    batch = SimpleNamespace(
        num_reqs=num_reqs,
        token_ids_cpu=np.tile(np.arange(512, dtype=np.int32) % 7, (5, 1)),
        num_tokens_no_spec=np.full(5, 20 + 3 * step, dtype=np.int32),
        req_ids=[f"{step // 20}-{request}" for request in range(num_reqs)],
    )
    draft = drafting.propose(batch, np.arange(num_reqs) != step % 5, lambda expected: None)
    drafted += int(draft.tree.num_rows.sum()) - num_reqs
    if step == 19:
        drafting.finish(["0-0", "0-1", "0-2"])
json.dump([before, signatures(), drafted], sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"method": "lookup", "traffic_tokens": 4096}, {"method": "union", "sources": [{"method": "lookup"}]}]
)
def test_requests_wait_for_no_compiler(options):
    """A process of its own: in this one other tests have compiled most of it."""
    command = [sys.executable, "-c", SERVE, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    before, after, drafted = json.loads(done.stdout)
    assert drafted > 100
    of_lookup = {name: count for name, count in before.items() if ".lookup." in name}
    # What others call within has no signature of its own where they come from the disk.
    assert len(of_lookup) > 5 and all(count for name, count in of_lookup.items() if not name.endswith("._bucket"))
    assert before == after


class Chatty:
    """Says and counts failures, and fails altogether where it is told to."""

    def __init__(self, fails):
        self.fails, self.seen, self.ended = fails, [], []

    def propose(self, context):
        self.seen += context.request_ids
        Guard("inner").run(lambda: 1 / 0)
        if self.fails:
            raise LookupError("no drafts today")
        return static_tree(context.root_token_ids, torch.zeros(len(context.request_ids), 0), ())

    def finish(self, request_ids):
        self.ended += request_ids


@pytest.mark.parametrize("fails", [None, "make", "propose"])
def test_a_warm_up_leaves_no_trace(monkeypatch, caplog, fails):
    made = []

    def make(options):
        made.append(Chatty(fails == "propose"))
        if fails == "make" and len(made) == 1:
            raise LookupError("no proposer today")
        return made[-1]

    options = SimpleNamespace(method="chatty", num_speculative_tokens=4)
    monkeypatch.setattr(free_proposer, "find_method", lambda _: Method("chatty", object, make))
    failures = Guard.total_failures
    drafting = free_proposer.make_drafting(options, 100)
    warmed, serving = made
    assert drafting._proposer is serving and not serving.seen
    assert len(warmed.seen) == (0 if fails == "make" else 2 * free_proposer.WARM_UP_DRAFTS)
    assert warmed.ended == ([] if fails == "make" else ["synthetic-0", "synthetic-1"])
    assert Guard.total_failures == failures and not caplog.records
    assert not free_proposer.logger.disabled


def test_a_warm_up_learns_and_asks_the_host():
    """All paths run: outcomes are learned from, and a union merges the host's drafts with its own."""
    made, asked = [], []

    class Union(type(_union())):
        def propose(self, context):
            asked.append(context.draft_by_model(torch.zeros(2)))
            return super().propose(context)

    free_proposer.warm_up(_options(), lambda: made.append(Union(_options())) or made[-1], 100)
    (union,) = made
    (lookup,) = [source for source in union._sources if source is not None]
    assert union.calibration.outcomes.sum() > 64 and lookup.calibration.outcomes.sum() > 64
    assert lookup._traffic.cursor > 100  # requests were ended
    assert len(asked) == free_proposer.WARM_UP_DRAFTS and all(isinstance(draft, Draft) for draft in asked)
    assert not any(guard.failures for guard in union._guards)


def _options():
    sources = [{"method": "lookup"}, {"method": "eagle2", "model": "m"}]
    return parse_options({"method": "union", "sources": sources})


def _union():
    from vllm_specplug.proposers.union.drafting import UnionProposer

    return UnionProposer(_options())
