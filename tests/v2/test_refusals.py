"""The seams are there, and what V2 does not do yet is refused before the engine starts, or with the request."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.hosts.check import MANIFEST_V2, check_host
from vllm_specplug.hosts.features import check_v2_options
from vllm_specplug.hosts.install import PATCHES as ALL_HOSTS
from vllm_specplug.hosts.speculative_config import TreeSpeculativeConfig
from vllm_specplug.hosts.v2_runner import PATCHES
from vllm_specplug.plugin import register


def test_host_has_the_seams():
    assert check_host(MANIFEST_V2).problems == []
    assert [patch.problem() for patch in (*ALL_HOSTS, *PATCHES)] == [None] * 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "lookup", "model": None}, "'lookup'.*use eagle2, hass or medusa"),
        ({"method": "swift", "model": None}, "'swift'"),
        ({"method": "union", "model": None, "sources": [{"method": "lookup"}]}, "'union'"),
        ({"budget": "measured"}, "budget"),
        ({"verification": "typical"}, "verification"),
        ({"trace_trees": "trees.jsonl"}, "trace_trees"),
        ({"min_node_value": 0.1}, "min_node_value"),
        ({"min_level_value": 0.1}, "min_level_value"),
    ],
)
def test_options(changes, named):
    given = {"method": "eagle2", "model": "drafter", **changes}
    options = parse_options({key: value for key, value in given.items() if value is not None})
    with pytest.raises(ConfigError, match=named):
        check_v2_options(options)


def test_what_v2_serves():
    for method in ("eagle2", "hass"):
        check_v2_options(parse_options({"method": method, "model": "drafter", "min_node_value": 0}))
    check_v2_options(parse_options({"method": "medusa", "model": "heads"}))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")), "structured output"),
        (SamplingParams(extra_args={"speculation": False}), "speculation=false"),
        (SamplingParams(min_p=0.1, logit_bias={3: 1.0}), None),
    ],
)
def test_requests(params, named):
    register()
    config = TreeSpeculativeConfig.__new__(TreeSpeculativeConfig)
    config.specplug, config.v2_runner = parse_options({"method": "eagle2", "model": "drafter"}), True
    if named is None:
        params._validate_spec_decode(config)
    else:
        with pytest.raises(ConfigError, match=named):
            params._validate_spec_decode(config)
