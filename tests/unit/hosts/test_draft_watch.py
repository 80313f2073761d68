"""The gauge of helpful drafts, and the one warning about a drafter that never helps."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from vllm_specplug.config import parse_options
from vllm_specplug.utils import metrics
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.vllm.draft_watch import DraftWatch

EAGLE = {"method": "eagle2", "model": "some/head"}


def watch(options=EAGLE, entries=None, counters=None):
    return DraftWatch(parse_options(options), entries, counters or Counters(None))


def run(watch, drafts, helpful, each=10):
    """Add drafts step by step; the helpful ones are spread over all of them."""
    for done in range(0, drafts, each):
        watch.judge(each, helpful * (done + each) // drafts - helpful * done // drafts)


@pytest.mark.parametrize(
    ("drafts", "helpful", "warns"),
    [
        (290, 0, False),  # too few to judge
        (300, 0, True),
        (300, 5, True),
        (300, 6, False),  # 2%
        (300, 30, False),
        (5000, 50, True),
        (5000, 500, False),
    ],
)
def test_a_drafter_that_never_helps_is_named_once(caplog, drafts, helpful, warns):
    run(watch(), drafts, helpful)
    run(watch(), 10, 0)
    assert len(caplog.messages) == warns
    if warns:
        (message,) = caplog.messages
        assert "the drafter some/head does not help" in message
        for cause in ("another model", "other layers of the target", "another chat template"):
            assert cause in message
        assert "`specplug inspect some/head`" in message


@pytest.mark.parametrize("options", [{"method": "mtp_tree"}, {"method": "swift"}])
def test_mtp_layers_that_never_help_are_named(caplog, options):
    """SWIFT skips layers of the target, and searches by itself for those that help."""
    run(watch(options), 300, 0)
    found = ["MTP layers do not help" in message for message in caplog.messages]
    assert found == [True] * (options["method"] == "mtp_tree")


def test_it_is_one_warning_that_names_the_layers(caplog):
    one = watch(entries={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    run(one, 2000, 0)
    (message,) = caplog.messages
    assert "other layers of the target than in training (it reads [1, 2, 3])" in message


def test_a_drafter_that_stops_helping_is_named(caplog):
    one = watch()
    run(one, 3000, 1500)
    assert not caplog.messages
    run(one, 20_000, 0)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("options", [{"method": "lookup"}, {"method": "swift"}])
def test_methods_without_weights_of_their_own_are_not_judged(caplog, options):
    run(watch(options), 1000, 0)
    assert not caplog.messages


def test_the_drafter_of_a_union_is_judged():
    one = watch({"method": "union", "sources": [EAGLE, {"method": "lookup"}]})
    assert (one.is_union, one.method) == (True, "eagle2")
    assert (watch().is_union, watch().method) == (False, "eagle2")


def test_the_gauge_is_the_share_of_recent_drafts():
    path = metrics.publish(replicas=2)
    assert "specplug:first_token_acceptance" not in generate_latest(REGISTRY).decode()
    first, second = (watch(counters=Counters(path, replica)) for replica in (0, 1))
    first.add(100, 80)
    second.add(300, 20)
    first.add(0, 0)
    assert "specplug:first_token_acceptance 0.25" in generate_latest(REGISTRY).decode()
    for _ in range(200):  # old drafts are forgotten
        first.add(100, 0)
        second.add(100, 0)
    (line,) = (
        line
        for line in generate_latest(REGISTRY).decode().splitlines()
        if line.startswith("specplug:first_token_acceptance ")
    )
    assert float(line.split()[1]) < 1e-3
