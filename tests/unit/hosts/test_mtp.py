"""What vLLM's config says of a target's MTP layers, and which of them are refused."""

from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.vllm.drafters.mtp import check_class, fit_modules


def target_of(config_class, **entries):
    return SimpleNamespace(hf_config=config_class(**entries), model="org/Target")


@pytest.mark.parametrize(("modules", "given", "fitting"), [(1, 8, 8), (3, 8, 6), (3, 2, 3), (2, 8, 8)])
def test_the_number_of_nodes_is_a_multiple_of_the_modules(modules, given, fitting):
    target = target_of(Qwen2Config, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=modules)
    options = parse_options({"method": "mtp_tree", "num_speculative_tokens": given})
    assert fit_modules(options, target).num_speculative_tokens == fitting
    assert target.hf_config.architectures == ["MiMoForCausalLM"]  # vLLM's answer is about a copy


@pytest.mark.parametrize("entries", [{}, {"num_nextn_predict_layers": 0}])
def test_a_target_without_mtp_layers_is_refused(entries):
    target = target_of(Qwen2Config, architectures=["Qwen2ForCausalLM"], **entries)
    with pytest.raises(
        ConfigError, match="vLLM finds no MTP layers in 'org/Target'.*Qwen2ForCausalLM.*the method eagle2"
    ):
        fit_modules(parse_options({"method": "mtp_tree"}), target)


@pytest.mark.parametrize("question", ["use_gemma4_mtp", "use_step3p5_mtp", None])
def test_layers_that_vllm_runs_in_another_way_are_refused(question):
    config = SimpleNamespace(use_gemma4_mtp=lambda: False, target_model_config=SimpleNamespace(model="org/Target"))
    if question is None:  # an older vLLM has no such question
        return check_class(config)
    setattr(config, question, lambda: True)
    with pytest.raises(
        ConfigError, match="'org/Target', which vLLM runs in a way of their own: vLLM's own method 'mtp'"
    ):
        check_class(config)
