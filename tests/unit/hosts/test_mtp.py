"""What vLLM's config says of a target's MTP layers, and which of them are refused."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config
from vllm import ModelRegistry
from vllm.config import SpeculativeConfig

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.vllm.drafters.eagle_levels import keep_output
from vllm_specplug.vllm.drafters.mtp import check_class, fit_modules, has_layers
from vllm_specplug.vllm.speculative_config import TreeSpeculativeConfig


def target_of(config_class, **entries):
    return SimpleNamespace(hf_config=config_class(**entries), model="org/Target", use_mla=False)


@pytest.mark.parametrize(("modules", "given", "fitting"), [(1, 8, 8), (3, 8, 6), (3, 2, 2), (2, 8, 8)])
def test_the_number_of_nodes_is_a_multiple_of_the_modules(modules, given, fitting):
    target = target_of(Qwen2Config, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=modules)
    options = parse_options({"method": "mtp_tree", "num_speculative_tokens": given})
    assert fit_modules(options, target).num_speculative_tokens == fitting
    assert target.hf_config.architectures == ["MiMoForCausalLM"]  # vLLM's answer is about a copy


@pytest.mark.parametrize(
    ("changes", "v2", "found"),
    [
        ({}, False, True),
        ({"num_nextn_predict_layers": 0}, False, False),
        ({"use_mla": True}, False, True),
        ({"use_mla": True}, True, False),
    ],
)
def test_which_targets_have_layers_that_draft_trees(changes, v2, found):
    """`auto` asks of every target."""
    entries = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, **changes}
    target = target_of(Qwen2Config, **entries)
    target.use_mla = entries.get("use_mla", False)
    assert has_layers(target, v2) == found


def test_a_target_that_vllm_cannot_ask(monkeypatch):
    def fails(config):
        raise AttributeError("num_mtp_modules")

    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(fails))
    assert not has_layers(target_of(Qwen2Config))


@pytest.mark.parametrize("entries", [{}, {"num_nextn_predict_layers": 0}])
def test_a_target_without_mtp_layers_is_refused(entries):
    target = target_of(Qwen2Config, architectures=["Qwen2ForCausalLM"], **entries)
    with pytest.raises(
        ConfigError, match="no MTP layers in 'org/Target'.*Qwen2ForCausalLM.*as 'model' .Gemma 4.*the method eagle2"
    ):
        fit_modules(parse_options({"method": "mtp_tree"}), target)


@pytest.mark.parametrize(
    ("name", "has_weights"),
    [("model.layers.1.mlp.up_proj.weight", False), ("model.layers.2.enorm.weight", True), ("mtp.fc.weight", True)],
)
def test_a_checkpoint_without_the_weights_is_refused(tmp_path, name, has_weights):
    """Its config still names the layers, and vLLM would draft with uninitialised weights."""
    target = target_of(Qwen2Config, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1, num_hidden_layers=2)
    target.model = str(tmp_path)
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    options = parse_options({"method": "mtp_tree"})
    if has_weights:
        assert fit_modules(options, target) == options
        return
    with pytest.raises(ConfigError, match="names MTP layers, but the checkpoint has no weights of them"):
        fit_modules(options, target)


@pytest.mark.parametrize(("given", "fitting"), [(1, 8), (0, None)])
def test_a_number_of_layers_that_only_the_text_config_has(monkeypatch, given, fitting):
    def overridden(config):
        config.update({"model_type": "glm_ocr_mtp", "n_predict": None})
        return config

    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(overridden))
    target, options = target_of(Qwen2Config, num_nextn_predict_layers=given), parse_options({"method": "mtp_tree"})
    if fitting is None:
        with pytest.raises(ConfigError, match="finds no MTP layers"):
            fit_modules(options, target)
    else:
        assert fit_modules(options, target).num_speculative_tokens == fitting


class CompiledAsAWhole(torch.nn.Module):
    """Calls no hooks, like a class that vLLM decorates."""

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return x + 1


@pytest.mark.parametrize("model", [torch.nn.Identity(), CompiledAsAWhole()])
def test_outputs_are_kept_of_every_class(model):
    kept = []
    keep_output(model, kept.append)
    assert [model(3)] == kept and type(model).__name__ in ("Identity", "CompiledAsAWhole")


def test_prompts_are_read_as_for_one_module():
    """More modules would need as many positions ahead as there are nodes."""
    assert TreeSpeculativeConfig.use_multi_module_mtp(SimpleNamespace(method="mtp")) is False


@pytest.mark.parametrize(
    ("model_type", "v2", "use_mla", "refused"),
    [
        ("gemma4_mtp", False, False, None),
        ("gemma4_mtp", True, False, "vLLM runs them in a way of their own"),
        ("step3p5_mtp", False, False, None),
        ("step3p5_mtp", True, False, "vLLM runs them in a way of their own"),
        ("mimo_mtp", True, False, None),
        ("deepseek_mtp", False, True, None),
        ("deepseek_mtp", True, True, "layers with MLA draft no trees"),
    ],
)
def test_layers_that_draft_no_trees_are_refused(model_type, v2, use_mla, refused):
    config = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type), use_mla=use_mla),
        target_model_config=SimpleNamespace(model="org/Target"),
        v2_runner=v2,
    )
    if refused is None:
        return check_class(config)
    with pytest.raises(ConfigError, match=f"'org/Target': on this model runner {refused}; vLLM's own"):
        check_class(config)


#: vLLM's models for single kinds of devices: sparse attention, states of other kinds, several residual streams.
OF_DEVICES = sorted(
    name
    for name, model in ModelRegistry.models.items()
    if "MTP" in name and getattr(model, "module_name", "").startswith("vllm.models.")
)


@pytest.mark.parametrize("name", OF_DEVICES)
def test_classes_with_kernels_of_their_own_are_refused(monkeypatch, name):
    """Before anything is loaded, by the class; `auto` does without them."""

    def overridden(config):
        config.update({"model_type": "other_mtp", "n_predict": 1, "architectures": [name]})
        return config

    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(overridden))
    target = target_of(Qwen2Config, architectures=["OtherForCausalLM"])
    assert not has_layers(target)
    words = f"from the MTP layers of 'org/Target': {name} attends with kernels of its own .vllm.models.*'mtp' drafts"
    with pytest.raises(ConfigError, match=words):
        fit_modules(parse_options({"method": "mtp_tree"}), target)
