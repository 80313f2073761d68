"""Options: defaults, and one clear error that names the fix for each bad input."""

from __future__ import annotations

import pytest

from vllm_specplug.config import (
    ConfigError,
    Eagle2Options,
    parse_options,
    resolve_drafter,
    shipped_drafters,
)


def parse(**changes):
    return parse_options({"method": "eagle2", "model": "some/drafter", **changes})


def test_method_and_model_are_enough():
    options = parse()
    assert options.num_speculative_tokens <= options.max_nodes
    assert options.verification == "exact"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle9"}, r"'eagle9' is unknown \(did you mean 'eagle2'\?\); vllm-specplug serves: .*eagle2"),
        ({"draft_dept": 3}, r"unknown key 'draft_dept' for method 'eagle2' \(did you mean 'draft_depth'\?\)"),
        ({"draft_width": 3}, "unknown key 'draft_width'.*valid keys: method, num_speculative_tokens, .*draft_depth"),
        ({"a": 1, "b": 2}, "unknown keys 'a', 'b'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is out of range: choose 1 to 255"),
        ({"num_speculative_tokens": 256}, "out of range"),
        ({"num_speculative_tokens": "8"}, "must be an integer from 1 to 255, not '8'"),
        ({"num_speculative_tokens": True}, "must be an integer"),
        ({"draft_depth": 0}, "draft_depth=0 is out of range"),
        ({"draft_top_k": 65}, "draft_top_k=65 is out of range: choose 1 to 64"),
        ({"draft_top_k": 1, "draft_depth": 4, "num_speculative_tokens": 5}, r"\(4 nodes\): raise draft_depth"),
        ({"min_node_value": 0.6}, "min_node_value=0.6 is out of range: choose 0.0 to 0.5"),
        ({"min_level_value": "a"}, "min_level_value must be a number from 0.0 to 1.0, not 'a'"),
        ({"budget": "large"}, "budget='large' is unknown; choose one of measured, fixed"),
        ({"verification": "fast"}, "verification='fast' is unknown; choose one of exact"),
        ({"tree_attention": "cuda"}, "tree_attention='cuda' is unknown; choose one of triton, flash, xformers"),
        ({"on_failure": "retry"}, "on_failure='retry' is unknown; choose one of refuse, plain"),
        ({"linear_rows": 257}, "linear_rows=257 is out of range: choose 0 to 256"),
        ({"linear_rows": "many"}, "linear_rows='many' is unknown: use 'all' or a number from 0 to 256"),
        ({"linear_rows": 1.5}, "linear_rows must be an integer from 0 to 256, not 1.5"),
        ({"draft_int8": 8}, "draft_int8 must be true or false, not 8"),
        ({"model": ""}, "model must be a non-empty string"),
        ({"model": 7}, "model must be a non-empty string"),
        ({"trace_trees": "/no/such/folder/trees.jsonl"}, "create its folder first"),
        ({"record": "/no/such/folder/recorded"}, "create the folder above it first"),
        ({"record": True}, "record must be a non-empty string"),
        ({"record_mib": 1}, "record_mib=1 is out of range: choose 16"),
        ({"record_share": 0.5}, "'record_share' was removed: every request is recorded, .*. Leave it out"),
        ({"coupled": True, "draft_dept": 3}, "'coupled' was removed: drafts above temperature 0 always use"),
    ],
)
def test_bad_option(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_model_is_needed():
    with pytest.raises(ConfigError, match="method 'eagle2' needs 'model': a drafter's directory"):
        parse_options({"method": "eagle2"})


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "no-such-short-name"])
def test_drafter_that_does_not_exist(model):
    with pytest.raises(ConfigError, match="does not exist: give a directory with config.json"):
        resolve_drafter(model)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (8, 6, 3)),
        ({"draft_depth": 1, "draft_top_k": 4}, (4, 1, 4)),
        ({"draft_depth": 1}, (3, 1, 3)),
        ({"draft_top_k": 1}, (6, 6, 1)),
        ({"draft_depth": 2}, (8, 2, 3)),
        ({"num_speculative_tokens": 60}, (60, 6, 4)),
        ({"num_speculative_tokens": 255}, (255, 6, 8)),
        ({"num_speculative_tokens": 60, "draft_depth": 2}, (60, 2, 8)),
        ({"num_speculative_tokens": 10, "draft_top_k": 1}, (10, 10, 1)),
        ({"num_speculative_tokens": 4}, (4, 6, 3)),
    ],
)
@pytest.mark.parametrize("method", ["eagle2", "hass", "union"])
def test_sizes_that_are_not_given_fit_those_that_are(given, sizes, method):
    """A refusal would name a number that nobody gave."""
    source = {"method": "eagle2" if method == "union" else method, "model": "m", **given}
    options = parse_options({"method": "union", "sources": [source]} if method == "union" else source)
    options = options.sources[0] if method == "union" else options
    assert (options.num_speculative_tokens, options.draft_depth, options.draft_top_k) == sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_speculative_tokens": 65, "draft_depth": 1},
            r"draft_top_k=64 can hold \(64 nodes\): raise draft_depth or",
        ),
        (
            {"num_speculative_tokens": 40, "draft_top_k": 1},
            r"draft_top_k=1 can hold \(32 nodes\): raise draft_top_k, or",
        ),
        ({"draft_depth": 0, "draft_top_k": 4}, "draft_depth=0 is out of range"),
        ({"draft_depth": True}, "draft_depth must be an integer"),
        ({"draft_top_k": "4", "num_speculative_tokens": 100}, "draft_top_k must be an integer"),
    ],
)
def test_sizes_that_no_tree_has(given, message):
    with pytest.raises(ConfigError, match=message):
        parse(**given)


def test_an_unreachable_hub_names_the_repository_and_the_fix(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("[Errno -3] Temporary failure in name resolution\nTraceback ...\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError) as caught:
        resolve_drafter("owner/some-head")
    message = str(caught.value)
    assert "\n" not in message and "Temporary failure in name resolution" in message
    assert "drafter 'owner/some-head'" in message and "hf download owner/some-head --local-dir DIR" in message


def test_floors_follow_the_budget_unless_they_are_given():
    fixed, measured = parse(), parse(budget="measured")
    assert (fixed.node_floor, fixed.level_floor) == (0.06, 0.5)
    assert (measured.node_floor, measured.level_floor) == (0.0, 0.0) and fixed.budget == "fixed"
    for given in (parse(min_node_value=0.0, min_level_value=0.2), parse(budget="fixed", min_node_value=0.1)):
        assert given.node_floor == given.min_node_value
    union = parse_options({"method": "union", "sources": [{"method": "eagle2", "model": "m"}], "budget": "fixed"})
    assert union.sources[0].node_floor == 0.06


def test_hass_is_served_as_eagle2_and_finds_its_drafters():
    eagle2, hass = (parse_options({"method": name, "model": "m", "draft_depth": 3}) for name in ("eagle2", "hass"))
    assert isinstance(hass, Eagle2Options) and hass.method == "hass" and vars(hass) == vars(eagle2)
    assert shipped_drafters("hass").keys() == shipped_drafters("eagle2").keys() >= {"smollm2-135m-instruct"}
    assert resolve_drafter("smollm2-135m-instruct", "hass").is_dir()
