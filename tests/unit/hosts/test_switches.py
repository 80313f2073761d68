"""Every boolean of vLLM's configurations is known: trees do not depend on it, or it is refused."""

import dataclasses
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig

from tests.vllm_features import REFUSED_SWITCH, SWITCHES
from vllm_specplug.vllm.features import REFUSED


def booleans(config: type) -> list[str]:
    types = get_type_hints(config)
    return [field.name for field in dataclasses.fields(config) if types[field.name] in (bool, bool | None)]


@pytest.mark.parametrize("config", [ParallelConfig, CacheConfig, SchedulerConfig])
def test_every_switch_is_known(config):
    found = booleans(config)
    assert len(found) >= 5
    new = sorted(set(found) - SWITCHES.keys())
    assert not new, (
        f"vLLM's {config.__name__} has new switches {new}: read what each changes in a step with trees, then add it to "
        "SWITCHES in tests/vllm_features.py, and to REFUSED in vllm_specplug/vllm/features.py if trees depend on it"
    )


@pytest.mark.parametrize("name", [name for name, why in SWITCHES.items() if why == REFUSED_SWITCH])
def test_refused_switches_are_refused(name):
    (refusal,) = (one for one in REFUSED if name in one.example)
    option = "--" + name.replace("_", "-")
    assert refusal.found(SimpleNamespace(engine_args=SimpleNamespace(**{name: True}))) == option
    assert refusal.found(SimpleNamespace(engine_args=SimpleNamespace(**{name: False}))) is None
    assert refusal.found(SimpleNamespace(engine_args=SimpleNamespace())) is None  # an older vLLM
