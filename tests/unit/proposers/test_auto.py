"""``auto`` stands for configurations of the other methods."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.doubles import dflash, tiny
from vllm_specplug.cli.cli import build_parser
from vllm_specplug.cli.inspection import command_of, inspect
from vllm_specplug.config import ConfigError, parse_options, parts_of, resolve_drafter
from vllm_specplug.proposer import TargetInfo
from vllm_specplug.proposers.auto.choice import choose, describe
from vllm_specplug.proposers.eagle2 import configure
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads
from vllm_specplug.utils.published import publish

SMOLLM2 = TargetInfo(576, 49152, 30, torch.float32)
TINY = TargetInfo(tiny.HIDDEN, tiny.VOCAB, 2, torch.float32)


def chosen(name="models/Qwen3-8B", target=TINY, on_cpu=True, **given):
    choice = choose(parse_options({"method": "auto", **given}), target, name, on_cpu)
    return parse_options(choice.config), choice


def methods(options):
    return [part.method for part in parts_of(options)]


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "/models/smollm2-135m-instruct/"])
def test_the_shipped_drafter_of_the_model_and_lookup(name):
    options, choice = chosen(name, SMOLLM2)
    assert methods(options) == ["union", "eagle2", "lookup"] and options.budget == "measured"
    assert options.sources[0].model == "smollm2-135m-instruct" and "shipped for this model" in choice.why


@pytest.mark.parametrize(("name", "target"), [("Qwen3-8B", SMOLLM2), ("SmolLM2-135M-Instruct", TINY)])
def test_lookup_alone_for_another_model(name, target):
    """Another name, or another shape."""
    options, choice = chosen(name, target)
    assert methods(options) == ["lookup"] and options.budget == "measured"
    assert "no drafter is shipped for" in choice.why


def test_costs_are_measured_on_every_device():
    for on_cpu in (False, True):
        assert chosen(on_cpu=on_cpu)[0].budget == "measured"
        assert chosen("SmolLM2-135M-Instruct", SMOLLM2, on_cpu=on_cpu)[0].sources[0].budget == "measured"


def test_given_options_count():
    options, _ = chosen(num_speculative_tokens=9, on_failure="plain", budget="fixed")
    assert (options.num_speculative_tokens, options.on_failure, options.budget) == (9, "plain", "fixed")
    assert chosen(budget="auto")[0].budget == "measured"
    with pytest.raises(ConfigError, match="choose one of measured, fixed, auto"):
        chosen(budget="large")


def test_a_given_drafter(tmp_path):
    eagle = tiny.write_drafter(tmp_path / "eagle")
    save_head(tmp_path / "medusa", {"medusa_num_heads": 3}, MedusaHeads(3, 1, tiny.HIDDEN).checkpoint_state())
    for path, method in ((eagle, "eagle2"), (tmp_path / "medusa", "medusa")):
        options, choice = chosen(model=str(path))
        assert methods(options) == ["union", method, "lookup"] and not options.reload
        assert options.sources[0].model == str(path) and str(path) in choice.why


def test_a_small_model_or_a_dflash_head_as_drafter(tmp_path):
    target = tiny.write_target(tmp_path / "target")
    small = tiny.write_sibling(tmp_path / "small", target)
    head = dflash.write(tmp_path / "dflash")
    for path, method in ((small, "draft_tree"), (head, "dflash_tree")):
        options, choice = chosen(model=str(path))
        assert methods(options) == ["union", method, "lookup"] and not options.reload
        assert inspect(str(path)).problem is None and command_of(inspect(str(path)))["method"] == method


def test_the_models_own_mtp_layers():
    target = replace(TINY, has_mtp_layers=True)
    options, choice = chosen(target=target)
    assert methods(options) == ["union", "mtp_tree", "lookup"] and "the model's own MTP layers" in choice.why
    assert methods(chosen("SmolLM2-135M-Instruct", replace(SMOLLM2, has_mtp_layers=True))[0])[1] == "eagle2"


def test_answers_of_others_can_be_left_out(tmp_path):
    eagle = tiny.write_drafter(tmp_path / "eagle")
    assert chosen(traffic_tokens=0)[0].traffic_tokens == 0
    assert chosen(model=str(eagle), traffic_tokens=0)[0].sources[1].traffic_tokens == 0
    with pytest.raises(ConfigError, match="traffic_tokens"):
        chosen(traffic_tokens=-1)


def test_a_published_drafter_is_followed(tmp_path):
    publish(tmp_path, tiny.write_drafter, {})
    assert chosen(model=str(tmp_path))[0].reload
    assert not chosen(model=str(tmp_path), on_cpu=False)[0].reload
    options, choice = chosen(model=str(tmp_path), reload=False)
    assert not options.reload and "new versions" not in choice.why


def test_a_drafter_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        chosen(model=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        chosen(model=str(tmp_path))


def learning(tmp_path, **given):
    target = tiny.write_target(tmp_path / "target")
    return chosen(str(target), learn=str(tmp_path / "learn"), **given)


def test_a_given_drafter_learns(tmp_path):
    """Recording, a trainer and reloading; the drafter is copied once, and the next start uses the learned version."""
    eagle = tiny.write_drafter(tmp_path / "eagle")
    options, choice = learning(tmp_path, model=str(eagle))
    head, recorded = str(tmp_path / "learn" / "head"), str(tmp_path / "learn" / "recorded")
    assert methods(options) == ["union", "eagle2", "lookup"] and options.reload
    assert (options.sources[0].model, options.sources[0].record) == (head, recorded)
    arguments = build_parser(list(choice.trainer)).parse_args(choice.trainer)
    assert (arguments.data, arguments.out, arguments.target) == (recorded, head, str(tmp_path / "target"))
    assert f"begun with the drafter {eagle}" in choice.why
    assert learning(tmp_path, model=str(eagle), record_mib=64)[0].sources[0].record_mib == 64
    publish(head, tiny.write_drafter, {})
    assert "version 2" in learning(tmp_path, model=str(eagle))[1].why


def test_limits_of_learning_need_learning():
    with pytest.raises(ConfigError, match="record_mib needs learn"):
        chosen(record_mib=64)


@pytest.mark.slow
def test_a_new_drafter_learns(tmp_path):
    options, choice = learning(tmp_path)
    assert "begun with a new drafter" in choice.why and choice.trainer
    assert resolve_drafter(options.sources[0].model).name == "000001"
    assert configure(options.sources[0], TINY).vllm_method == "eagle"


def test_where_a_drafter_cannot_learn(tmp_path):
    for given, reason in (
        ({"on_cpu": False, "name": str(tmp_path)}, "on CPUs only"),
        ({"name": "owner/model"}, "a local folder"),
        ({"name": str(tmp_path), "model": "medusa"}, "do not learn"),
    ):
        if given.get("model"):
            save_head(tmp_path / "medusa", {"medusa_num_heads": 3}, MedusaHeads(3, 1, 64).checkpoint_state())
            given["model"] = str(tmp_path / "medusa")
        with pytest.raises(ConfigError, match=f"learn=.* cannot be used: .*{reason}"):
            chosen(learn=str(tmp_path / "learn"), **given)
    with pytest.raises(ConfigError, match="create the folder above it first"):
        chosen(learn=str(tmp_path / "no" / "learn"))


def test_it_is_no_source_of_a_union():
    with pytest.raises(ConfigError, match="'auto' chooses all sources"):
        parse_options({"method": "union", "sources": [{"method": "auto"}, {"method": "lookup"}]})


def test_the_doctor_says_what_it_chooses():
    assert "SmolLM2-135M-Instruct: lookup and the drafter smollm2-135m-instruct (eagle2)" in describe()
