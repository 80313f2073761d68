"""The seams are there, and what V2 does not do is refused before the engine starts."""

from functools import partial
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from tests.doubles.architectures import ARCHITECTURES, write_target
from tests.hosts.conftest import ENGINE
from tests.hosts.test_third_party import echo  # noqa: F401
from tests.v2.conftest import model_runner
from vllm_specplug.config import ConfigError, parse_options, parts_of
from vllm_specplug.gpu.rounds import RESERVED_ROWS, shapes, with_defaults
from vllm_specplug.gpu.runner import PATCHES
from vllm_specplug.plugin import register
from vllm_specplug.vllm import features, speculative_config
from vllm_specplug.vllm.check import check_symbols
from vllm_specplug.vllm.features import check_options
from vllm_specplug.vllm.install import PATCHES as ALL_HOSTS
from vllm_specplug.vllm.manifest import MANIFEST_V2, OPTIONAL
from vllm_specplug.vllm.speculative_config import WORKERS, TreeSpeculativeConfig


def test_host_has_the_seams():
    for manifest in (MANIFEST_V2, OPTIONAL):
        assert check_symbols(manifest).problems == []
    assert [patch.problem() for patch in (*ALL_HOSTS, *PATCHES)] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"method": "swift", "model": None},
            "'swift'.*use one of dflash_tree, draft_tree, eagle2, hass, lookup, medusa, mtp_tree, union, or serve it",
        ),
        ({"method": "dflash_tree", "min_node_value": 0.1}, "min_node_value"),
        ({"method": "union", "model": None, "sources": [{"method": "lookup"}, {"method": "swift"}]}, "'swift'"),
        (
            {"method": "union", "model": None, "sources": [{"method": "lookup", "min_node_value": 0.1}]},
            "min_node_value",
        ),
        ({"record": "recorded"}, "record does not work.*use no record, or serve it on a CPU"),
        ({"min_node_value": 0.1}, "min_node_value"),
        ({"min_level_value": 0.1}, "min_level_value"),
    ],
)
def test_options(changes, named):
    with pytest.raises(ConfigError, match=named):
        check_options(options_of(changes))


@pytest.mark.parametrize("key", ["rejection_sample_method", "disable_lookahead_block_hashes", "fly_window_size"])
def test_keys_of_vllms_methods(checkpoints, key):
    """Other verification, and other hashes of blocks."""
    given = {"method": "eagle2", "model": str(checkpoints["eagle"]), key: "fly"}
    with pytest.raises(ValueError, match=f"key '{key}'"):
        EngineArgs(model=str(checkpoints["target"]), speculative_config=given, **ENGINE).create_engine_config()


def options_of(changes):
    given = {"method": "eagle2", "model": "drafter", **changes}
    return parse_options({key: value for key, value in given.items() if value is not None})


def test_what_is_served():
    for method in ("dflash_tree", "draft_tree", "eagle2", "hass"):
        check_options(parse_options({"method": method, "model": "drafter", "min_node_value": 0}))
    check_options(parse_options({"method": "medusa", "model": "heads"}))
    check_options(parse_options({"method": "lookup", "traffic_tokens": 4096}))
    for source in ({"method": "eagle2", "model": "drafter"}, {"method": "medusa", "model": "heads"}):
        check_options(parse_options({"method": "union", "sources": [source, {"method": "lookup"}]}))
    check_options(options_of({"method": "lookup", "model": None, "trace_trees": "trees.jsonl"}))
    for verification in ("typical", "rejection"):
        check_options(options_of({"verification": verification}))
    check_options(options_of({"budget": "measured"}))


def default(**given):
    return parse_options(with_defaults(given))


def test_budgets_are_measured_unless_they_are_fixed():
    ladder = [1, 3, 7, 15, 31, 63]
    for given in (
        {"method": "eagle2", "model": "drafter"},
        {"method": "lookup"},
        {"method": "union", "sources": [{"method": "eagle2", "model": "drafter"}, {"method": "lookup"}]},
    ):
        options = default(**given)
        assert options.budget == "measured" and [shape.nodes for shape in shapes(options)] == ladder
        assert all(part.num_speculative_tokens == 63 for part in parts_of(options))  # a source fills the tree alone
        assert with_defaults({**given, "budget": "fixed"}) == {**given, "budget": "fixed"}
    assert default(method="eagle2", model="drafter").draft_top_k == 8
    heads = default(method="medusa", model="heads")
    assert (heads.budget, heads.num_speculative_tokens) == ("measured", 63)
    own = default(method="eagle2", model="drafter", draft_depth=2, draft_top_k=2)
    assert (own.budget, own.num_speculative_tokens, own.draft_top_k) == ("measured", 6, 2)
    assert default(method="eagle2", model="drafter", verification="rejection").budget == "fixed"


@pytest.mark.parametrize(
    ("max_num_seqs", "nodes"), [(8, 63), (256, 63), (257, 31), (512, 31), (1000, 15), (1024, 15), (2048, 7), (9000, 7)]
)
def test_default_trees_reserve_little(max_num_seqs, nodes):
    """vLLM reserves rows of the largest tree for each of ``max_num_seqs`` requests."""
    for given in ({"method": "eagle2", "model": "drafter"}, {"method": "union", "sources": [{"method": "lookup"}]}):
        options = parse_options(with_defaults(given, max_num_seqs=max_num_seqs))
        assert {part.num_speculative_tokens for part in parts_of(options)} == {nodes}
        assert options.num_speculative_tokens == nodes
        assert nodes == 7 or (nodes + 1) * max_num_seqs <= RESERVED_ROWS
    chosen = with_defaults({"method": "lookup", "num_speculative_tokens": 63}, max_num_seqs=1024)
    assert parse_options(chosen).num_speculative_tokens == 63


@pytest.mark.parametrize(
    ("given", "nodes", "top_k"),
    [
        ({"draft_depth": 4}, 63, 8),
        ({"draft_top_k": 10}, 63, 10),
        ({"draft_top_k": 3}, 48, 3),
        ({"num_speculative_tokens": 31}, 31, 8),
        ({"num_speculative_tokens": 100, "draft_depth": 2}, 100, 10),
    ],
)
def test_sizes_that_are_not_given_fit_those_that_are(given, nodes, top_k):
    options = default(method="eagle2", model="drafter", **given)
    assert (options.num_speculative_tokens, options.draft_top_k) == (nodes, top_k)
    assert default(method="lookup", draft_depth=8).num_speculative_tokens == 63


@pytest.fixture
def start_on_cuda(monkeypatch, checkpoints):
    """The engine's configuration as on CUDA, for us: the host goes on believing in its CPU."""
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    for module in (speculative_config, features):
        monkeypatch.setattr(module, "current_platform", cuda)

    def start(runner, method="eagle2", budget="fixed", drafter=None, **options):
        drafter = str(checkpoints["eagle"]) if method == "eagle2" else drafter
        given = {
            "method": method,
            **({"budget": budget} if budget else {}),
            **({"model": drafter} if drafter else {}),
        }
        settings = {**ENGINE, "model": str(checkpoints["target"]), **options}
        with model_runner(runner):
            config = EngineArgs(speculative_config=given, **settings).create_engine_config()
            return config, config.use_v2_model_runner

    return start


@pytest.mark.usefixtures("echo")
def test_runner_and_scheduling_on_cuda(start_on_cuda, monkeypatch):
    """V2 with asynchronous scheduling; V1, and methods for which vLLM chooses it, are refused."""
    platform, chosen = type(current_platform), []  # what the host chooses, before it sees its CPU
    honest = platform.check_and_update_config

    def look(config):
        chosen.append(config.scheduler_config.async_scheduling)
        honest(config)

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(look))
    for method in ("lookup", "eagle2"):
        config, is_v2 = start_on_cuda(None, method, budget=None, max_num_seqs=1)
        assert config.speculative_config.specplug.budget == "measured"
        assert config.parallel_config.worker_cls == WORKERS[False, True]
        assert is_v2 and chosen[-1]
    with pytest.raises(ValueError, match="on CUDA.*V2 model runner only: unset VLLM_USE_V2_MODEL_RUNNER"):
        start_on_cuda("0")
    with pytest.raises(ValueError, match="method 'echo' does not run on .*V2 model runner: use one of .*eagle2"):
        start_on_cuda(None, "echo")
    start_on_cuda("1", tensor_parallel_size=2)
    for method in ("eagle2", "auto"):
        config, _ = start_on_cuda("1", method, budget=None, data_parallel_size=2)  # each replica chooses by itself
        assert config.speculative_config.specplug.budget == "measured"
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config, _ = start_on_cuda("1", budget=None, kv_transfer_config=connector)  # the drafter must read every prompt
    assert config.speculative_config.specplug.budget == "fixed"


def test_replicas_that_share_experts(start_on_cuda, tmp_path, caplog):
    """They verify small trees of one size; what would let them wait for each other while they draft is refused."""
    write_target(tmp_path, ARCHITECTURES["Qwen3-MoE"])
    start = partial(start_on_cuda, "1", model=str(tmp_path), data_parallel_size=2)
    fixed = "budget='fixed' with num_speculative_tokens=7 (replicas that share experts verify trees of one size)"
    for method in ("lookup", "eagle2", "auto"):
        for budget in (None, "auto") if method == "auto" else (None,):
            caplog.clear()
            with caplog.at_level("INFO", "vllm_specplug"):
                options = start(method, budget=budget)[0].speculative_config.specplug
            assert (options.budget, options.num_speculative_tokens) == ("fixed", 7)
            assert sum(fixed in line for line in caplog.messages) == 1
            assert not any("measured" in line for line in caplog.messages)
    for method in ("lookup", "auto"):
        with pytest.raises(ValueError, match="measured' does not work with --data-parallel-size 2.*budget='fixed'"):
            start(method, budget="measured")
    with pytest.raises(ValueError, match="'draft_tree': the drafter .* has experts.*use a drafter without experts"):
        start("draft_tree", drafter=str(tmp_path))
    write_target(tmp_path / "dense", ARCHITECTURES["Granite"])
    start("draft_tree", drafter=str(tmp_path / "dense"))


def test_requests():
    register()
    config = TreeSpeculativeConfig.__new__(TreeSpeculativeConfig)
    config.specplug, config.v2_runner = parse_options({"method": "eagle2", "model": "drafter"}), True
    SamplingParams(min_p=0.1, logit_bias={3: 1.0})._validate_spec_decode(config)
    SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))._validate_spec_decode(config)
    SamplingParams(extra_args={"speculation": False})._validate_spec_decode(config)
    with pytest.raises(VLLMValidationError, match="speculation must be"):
        SamplingParams(extra_args={"speculation": "no"})._validate_spec_decode(config)
