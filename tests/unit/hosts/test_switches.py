"""Every boolean of vLLM's configurations is known: served, refused, or irrelevant for trees."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import vllm
from packaging.version import Version
from vllm.config import SpeculativeConfig, VllmConfig

from tests.vllm_features import REFUSED_KEY, REFUSED_ON_V2, REFUSED_STATES, REFUSED_SWITCH, SWITCHES
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.gpu import states
from vllm_specplug.gpu.attention import TreeTritonImpl
from vllm_specplug.gpu.flash import TreeFlashImpl
from vllm_specplug.gpu.runner import TreeRunner
from vllm_specplug.vllm.check import REFERENCE_VERSION
from vllm_specplug.vllm.features import REFUSED

#: How a class may begin.
CLASSES = ("served: ", "irrelevant: ", REFUSED_SWITCH)


def named(kind: str) -> list[str]:
    return [name for switches in SWITCHES.values() for name, why in switches.items() if why == kind]


def classes_in(hint: Any) -> Iterator[type]:
    """All configurations of vLLM that a type names."""
    if isinstance(hint, type) and hint.__module__.startswith("vllm.config."):
        yield hint
    for part in get_args(hint):
        yield from classes_in(part)


def configurations(config: type, known: dict[str, type]) -> dict[str, type]:
    """All configurations below one, by name."""
    types = get_type_hints(config)
    for field in dataclasses.fields(config):
        for found in classes_in(types[field.name]):
            if dataclasses.is_dataclass(found) and found.__name__ not in known:
                known[found.__name__] = found
                configurations(found, known)
    return known


def booleans(config: type) -> set[str]:
    types = get_type_hints(config)
    hints = {field.name: types[field.name] for field in dataclasses.fields(config)}
    return {name for name, hint in hints.items() if hint is bool or bool in get_args(hint)}


def test_every_switch_is_known():
    found = {name: booleans(config) for name, config in configurations(VllmConfig, {}).items()}
    assert sum(map(len, found.values())) >= 140
    new = {name: sorted(names - SWITCHES.get(name, {}).keys()) for name, names in found.items()}
    new = {name: names for name, names in new.items() if names}
    if Version(vllm.__version__) < Version(REFERENCE_VERSION):
        pytest.skip(f"an older vLLM; not classed: {new}")
    assert not new, (
        f"vLLM's configurations have new switches {new}: read what each changes in a step with trees, then add it to "
        "SWITCHES in tests/vllm_features.py, and to REFUSED in vllm_specplug/vllm/features.py if it breaks trees"
    )


def test_every_switch_has_a_class():
    assert all(why.startswith(CLASSES) and len(why) > 6 for names in SWITCHES.values() for why in names.values())


@pytest.mark.parametrize("name", named(REFUSED_SWITCH))
def test_refused_switches_are_refused(name):
    (refusal,) = (one for one in REFUSED if name in one.example or "model." + name in one.example)
    option = "--" + name.replace("_", "-")

    def found(**switches):
        # An older vLLM has no such switch of the engine.
        model, args = SimpleNamespace(**{name: False} | switches), SimpleNamespace(**switches)
        return refusal.found(SimpleNamespace(model_config=model, engine_args=args))

    assert found(**{name: True}) == option
    assert found(**{name: False}) is None
    assert found() is None


def test_experts_in_answers_are_refused_however_they_are_asked_for():
    (refusal,) = (one for one in REFUSED if "enable_return_routed_experts" in one.example)
    aux = SimpleNamespace(enable_return_routed_experts=True)
    given = SimpleNamespace(enable_return_routed_experts=False, aux_output_config=aux)
    assert refusal.found(SimpleNamespace(engine_args=given)) == "--enable-return-routed-experts"


def v2_runner(**switches: bool) -> Any:
    """What the V2 runner's check reads."""
    switches = dict.fromkeys(named(REFUSED_ON_V2), False) | switches
    parallel = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, **switches}
    return SimpleNamespace(
        model_config=SimpleNamespace(**switches),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        vllm_config=SimpleNamespace(watermark_config=None),
    )


@pytest.mark.parametrize("name", named(REFUSED_ON_V2))
def test_the_v2_runner_refuses(name):
    TreeRunner._check_config(v2_runner())
    with pytest.raises(ConfigError, match=f"leave .*{name}|leave out --{name.replace('_', '-')}"):
        TreeRunner._check_config(v2_runner(**{name: True}))


@pytest.mark.parametrize("name", named(REFUSED_STATES))
def test_recurrent_states_on_v2_refuse(name):
    def check(**switches):
        switches = dict.fromkeys(named(REFUSED_STATES), False) | switches
        states._check(
            SimpleNamespace(
                cache_config=SimpleNamespace(mamba_cache_mode="none", **switches),
                mamba_config=SimpleNamespace(**switches),
                kv_transfer_config=None,
                parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            )
        )

    check()
    with pytest.raises(ConfigError, match="leave"):
        check(**{name: True})


@pytest.mark.parametrize("name", sorted(booleans(SpeculativeConfig)))
def test_keys_of_vllms_methods_are_refused(name):
    assert SWITCHES["SpeculativeConfig"][name] == REFUSED_KEY
    with pytest.raises(ConfigError, match=name):
        parse_options({"method": "eagle2", "model": "a drafter", name: True})


@pytest.mark.parametrize("implementation", [TreeTritonImpl, TreeFlashImpl])
def test_attention_of_trees_quantises_no_output(implementation):
    """``fuse_attn_quant``: the kernels of trees do not, so vLLM must not fuse it."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    layer = object.__new__(implementation)
    assert not layer.fused_output_quant_supported(kFp8StaticTensorSym)
