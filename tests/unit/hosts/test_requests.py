"""Namespaces of requests: those of vLLM's prefix caches; prompts that vLLM reads as a whole."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from vllm_specplug.vllm.requests import TreeRequestRules, namespace_of


def request(salt=None, lora=None):
    lora = None if lora is None else SimpleNamespace(lora_name=lora, lora_path=f"/adapters/{lora}")
    return SimpleNamespace(cache_salt=salt, lora_request=lora)


def test_equal_salts_and_adapters_share():
    assert namespace_of(request()) == namespace_of(request("")) == 0
    different = [request(), request("a"), request("b"), request(lora="a"), request(lora="b"), request("a", lora="a")]
    for one, other in combinations(different, 2):
        assert namespace_of(one) != namespace_of(other)
    for one in different:
        again = request(one.cache_salt, one.lora_request and one.lora_request.lora_name)
        assert namespace_of(one) == namespace_of(again)
        assert -(2**63) <= namespace_of(one) < 2**63


def test_another_adapter_under_the_same_name():
    old, new = request(lora="a"), request(lora="a")
    new.lora_request.lora_path = "/adapters/new"
    assert namespace_of(old) != namespace_of(new)


@pytest.mark.parametrize(("chunks", "most"), [(True, 40), (False, 128)])
def test_a_step_has_room_for_a_whole_prompt(chunks, most):
    """Where vLLM turns chunks off (MLA on a CPU without AMX), it raises one limit of a step and forgets the other."""

    class Scheduler:
        def __init__(self, config):
            self.scheduler_config, self.max_num_scheduled_tokens = config, config.max_num_scheduled_tokens

    config = SimpleNamespace(
        enable_chunked_prefill=chunks, max_num_scheduled_tokens=40, max_num_batched_tokens=40 if chunks else 128
    )
    kind = type("TreeScheduler", (TreeRequestRules, Scheduler), {})
    assert kind(config).max_num_scheduled_tokens == most
