"""Namespaces of requests: those of vLLM's prefix caches; how many tokens a step may have."""

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


class Host:
    """What is read of vLLM's scheduler."""

    def __init__(self, has_chunks):
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=has_chunks, max_num_batched_tokens=2048)
        self.max_num_scheduled_tokens = 64


class Scheduler(TreeRequestRules, Host):
    pass


@pytest.mark.parametrize(("has_chunks", "most"), [(True, 64), (False, 2048)])
def test_prompts_that_are_not_read_in_chunks_fit_into_a_step(has_chunks, most):
    assert Scheduler(has_chunks).max_num_scheduled_tokens == most
