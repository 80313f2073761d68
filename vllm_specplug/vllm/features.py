"""Features of vLLM that are refused at start, as data; ``tests/vllm_features.py`` lists the features that work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_specplug.config import ConfigError, TreeOptions, parts_of
from vllm_specplug.gpu.kernels import xformers_context
from vllm_specplug.proposer import find_method, loadable_methods
from vllm_specplug.vllm.attention_backends import CACHE_FORMATS
from vllm_specplug.vllm.check import check_symbols
from vllm_specplug.vllm.manifest import MANIFEST_FLASH
from vllm_specplug.vllm.mixed import problem, users_class

#: By (whether on a CPU, whether on the V2 runner): V1 serves CPUs, V2 serves CUDA.
WORKERS = {
    (True, False): "vllm_specplug.cpu.worker.TreeCPUWorker",
    (False, True): "vllm_specplug.gpu.worker.TreeGPUWorker",
}

#: Schedulers: V1's lets grammars follow trees.
SCHEDULER = "vllm_specplug.cpu.scheduler.TreeScheduler"
SCHEDULER_V2 = "vllm_specplug.gpu.scheduler.tree_scheduler"
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


#: KV connectors that were tested: they store and load prompts, whose rows are in the pages after their forward.
CONNECTORS = ("ExampleConnector",)


class Setting(NamedTuple):
    """Values that vLLM passes to build the speculative config."""

    model_config: Any
    parallel_config: Any
    engine_args: Any
    v2_runner: bool = False

    @property
    def worker(self) -> str:
        """Return the path of our worker class."""
        return WORKERS[current_platform.is_cpu(), self.v2_runner]

    @property
    def scheduler(self) -> str:
        """Return the path of our scheduler class, or of what makes it."""
        return SCHEDULER_V2 if self.v2_runner else SCHEDULER

    @property
    def num_replicas(self) -> int:
        return self.parallel_config.data_parallel_size

    @property
    def in_lockstep(self) -> bool:
        """Return whether all replicas run each forward of the target together, because they share its experts."""
        return self.num_replicas > 1 and self.model_config.is_moe


@dataclass(frozen=True)
class Refusal:
    """A feature that is refused when the engine starts.

    Attributes:
        feature: its name in the message.
        found: returns the setting that turns it on, as a user would write it; None if the feature is not in use.
        reason: why it is refused.
        fix: what to do instead.
        example: engine arguments that use it; ``model.NAME`` stands for an attribute of vLLM's model config.
    """

    feature: str
    found: Callable[[Setting], str | None]
    reason: str
    fix: str
    example: dict[str, Any]

    def message(self, method: str, found: str) -> str:
        return f"method {method!r} does not support {self.feature} (found {found}): {self.reason}; {self.fix}"


def _given(is_used: Any, option: str) -> str | None:
    return option if is_used else None


def _switched_on(setting: Setting, name: str) -> str | None:
    """Return the option of a switch that is on; an older vLLM may not have it."""
    return _given(getattr(setting.engine_args, name, False), "--" + name.replace("_", "-"))


def _returns_experts(setting: Setting) -> str | None:
    """Return the option that lets answers name the experts of their tokens, however it was given."""
    args = setting.engine_args
    places = (args, getattr(args, "aux_output_config", None))
    given = any(getattr(place, "enable_return_routed_experts", False) for place in places)
    return _given(given, "--enable-return-routed-experts")


def _connector(setting: Setting) -> str | None:
    """Return the name of the KV connector, if any."""
    found = setting.engine_args.kv_transfer_config
    return found.get("kv_connector") if isinstance(found, dict) else getattr(found, "kv_connector", None)


def _unmixable(option: str, given: Any, ours: str, besides: tuple[str, ...] = ()) -> str | None:
    """Return the user's class and why ours cannot be mixed into it; None if it can, or there is none."""
    theirs = users_class(given)
    found = None if theirs is None else problem(ours, theirs, besides)
    return None if found is None else f"{option} {theirs}: {found}"


REFUSED = (
    Refusal(
        "pipeline parallelism",
        lambda s: _given((n := s.parallel_config.pipeline_parallel_size) > 1, f"--pipeline-parallel-size {n}"),
        "with several stages vLLM's V1 runner starts no speculative method, and on the V2 runner only the last stage "
        "knows which rows of a tree are accepted",
        "use --tensor-parallel-size or --data-parallel-size instead",
        {"pipeline_parallel_size": 2},
    ),
    Refusal(
        "mixture of experts with data parallelism on V1",
        lambda s: _given(s.in_lockstep and not s.v2_runner, f"--data-parallel-size {s.num_replicas}"),
        "vLLM's CPU backend serves these replicas not even without drafts: it cannot send rows to another replica's "
        "experts (NotImplementedError in all_gatherv)",
        "start servers of --data-parallel-size 1 behind a load balancer",
        {"data_parallel_size": 2, "model.is_moe": True},
    ),
    Refusal(
        "worker classes other than subclasses of vLLM's own",
        lambda s: _unmixable("--worker-cls", s.parallel_config.worker_cls, s.worker),
        "trees run in vLLM's model runner, which vLLM's worker makes",
        "derive it from vLLM's worker for this device, or leave out --worker-cls",
        {"worker_cls": "some.Worker"},
    ),
    Refusal(
        "scheduler classes other than subclasses of vLLM's own",
        lambda s: _unmixable("--scheduler-cls", s.engine_args.scheduler_cls, s.scheduler, (ASYNC_SCHEDULER,)),
        "the code that schedules trees is mixed into vLLM's scheduler class",
        "derive it from vllm.v1.core.sched.scheduler.Scheduler, or leave out --scheduler-cls",
        {"scheduler_cls": "some.Scheduler"},
    ),
    Refusal(
        "asynchronous scheduling on the V1 runner",
        lambda s: _given(s.engine_args.async_scheduling and not s.v2_runner, "--async-scheduling"),
        "its scheduler needs the drafts of a step before it schedules the next one",
        "leave the option out",
        {"async_scheduling": True},
    ),
    Refusal(
        "KV connectors other than " + " and ".join(CONNECTORS),
        lambda s: _given((name := _connector(s)) is not None and name not in CONNECTORS, f"kv_connector {name}"),
        "a connector could store rows before the accepted ones are in their place; only tested connectors are accepted",
        "use ExampleConnector, or leave out --kv-transfer-config",
        {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
    ),
    Refusal(
        "sleep mode",
        lambda s: _given(s.model_config.enable_sleep_mode, "--enable-sleep-mode"),
        "sleep level 2 discards weights, and those that a drafter computes from the target's are not computed again; "
        "vLLM itself refuses sleep mode on a CPU",
        "leave out --enable-sleep-mode",
        {"model.enable_sleep_mode": True},
    ),
    Refusal(
        "embedding and pooling models",
        lambda s: _given((kind := s.model_config.runner_type) != "generate", f"runner type {kind}"),
        "they generate no tokens",
        "serve the model without a speculative config",
        {"model.runner_type": "pooling"},
    ),
    Refusal(
        "quantised KV caches other than fp8",
        lambda s: _given((name := str(s.engine_args.kv_cache_dtype)) not in CACHE_FORMATS, f"--kv-cache-dtype {name}"),
        "tree rows would be read in another precision than cached rows, so answers would differ from plain decoding's",
        "use --kv-cache-dtype auto or fp8",
        {"kv_cache_dtype": "int8_per_token_head"},
    ),
    Refusal(
        "encoder-decoder targets",
        lambda s: _given(s.model_config.is_encoder_decoder, s.model_config.model),
        "trees support self-attention only",
        "use a decoder-only target",
        {"model.is_encoder_decoder": True},
    ),
    Refusal(
        "batch-sharded sampling",
        lambda s: _switched_on(s, "enable_batch_sharded_sampling"),
        "each rank samples the rows of other requests, but the rows of a tree are found by their place in the whole "
        "batch",
        "leave the option out",
        {"enable_batch_sharded_sampling": True},
    ),
    Refusal(
        "fast prefill of layers that share keys and values",
        lambda s: _switched_on(s, "kv_sharing_fast_prefill"),
        "these layers skip the rows of prompts, so the hidden states that drafters read are wrong, and tree rows have "
        "other places in these layers than in the others",
        "leave the option out",
        {"kv_sharing_fast_prefill": True},
    ),
    Refusal(
        "routed experts in answers",
        _returns_experts,
        "vLLM reads them from the first rows of each request, but the accepted rows of a tree are not the first ones",
        "leave the option out",
        {"enable_return_routed_experts": True},
    ),
    Refusal(
        "dual batch overlap",
        lambda s: _switched_on(s, "enable_dbo"),
        "it splits a batch into two forwards, but all trees of a step are verified in one",
        "leave the option out",
        {"enable_dbo": True},
    ),
)


def check_features(method: str, setting: Setting) -> None:
    """Refuse features that our methods do not support, by name.

    Raises:
        ConfigError: naming the first feature, the setting that turns it on, and the fix.
    """
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise ConfigError(f"method {method!r} does not run on {current_platform.device_name!r}: use CUDA or a CPU")
    on_cpu = current_platform.is_cpu() and not setting.v2_runner
    if on_cpu and current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        raise ConfigError(f"method {method!r} supports the packed KV layout of x86-64 only: use such a processor")
    for refusal in REFUSED:
        if (found := refusal.found(setting)) is not None:
            raise ConfigError(refusal.message(method, found))


def check_lockstep(options: TreeOptions, drafter: Any, setting: Setting) -> None:
    """Refuse what lets replicas wait for each other while they draft, or verify trees of different sizes.

    Args:
        options: ours.
        drafter: vLLM's model config of the drafter; None: it is no model of vLLM.
        setting: of replicas in lockstep.

    Raises:
        ConfigError: with the fix.
    """
    found = f"--data-parallel-size {setting.num_replicas}"
    if options.budget == "measured":
        raise ConfigError(
            f"budget='measured' does not work with {found} and a target with experts: its replicas run each step "
            "together, and each would choose trees of its own: use budget='fixed'"
        )
    if drafter is not None and drafter.is_moe:
        raise ConfigError(
            f"method {options.method!r}: the drafter {drafter.model!r} has experts, which {found} would spread over "
            "replicas that draft at different times: use a drafter without experts, or servers of "
            "--data-parallel-size 1"
        )


def uses_v2_runner(options: TreeOptions) -> bool:
    """Return whether vLLM will choose its V2 model runner for these options."""
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return bool(envs.VLLM_USE_V2_MODEL_RUNNER)
    methods = [find_method(part.method) for part in parts_of(options)]
    has_vllm_model = any(method.model is not None and method.model.is_vllm_model for method in methods)
    return HAS_TRITON and (has_vllm_model or all(method.runs_on_v2 for method in methods))


V2_NAME = "vLLM's V2 model runner"


def check_options(options: TreeOptions) -> None:
    """Refuse options that do not work on the V2 runner, where each draft phase has a fixed shape on the device.

    Raises:
        ConfigError: naming the option and the fix.
    """
    for part in parts_of(options):
        _check_part(part)


def _check_part(options: TreeOptions) -> None:
    if not find_method(options.method).runs_on_v2:
        methods = {name: find_method(name) for name in loadable_methods()}
        served = ", ".join(name for name, method in methods.items() if method.runs_on_v2 and not method.choose)
        raise ConfigError(
            f"method {options.method!r} does not run on {V2_NAME}: use one of {served}, or serve it on a CPU"
        )
    given = {name: getattr(options, name, None) for name in ("min_node_value", "min_level_value", "record")}
    for used, option, fix in (
        (options.reload, "reload=true", "reload=false, and restart the server for another drafter"),
        # Hidden states would be copied from the device at each step, which has not been measured.
        (given["record"] is not None, "record", "no record, or serve it on a CPU"),
        (given["min_node_value"], "min_node_value", "min_node_value=0, and fewer num_speculative_tokens"),
        # Reading back from a device whether to go on costs more than a draft level.
        (given["min_level_value"], "min_level_value", "min_level_value=0, and a lower draft_depth"),
    ):
        if used:
            raise ConfigError(f"{option} does not work on {V2_NAME}: use {fix}")


def check_tree_attention(options: TreeOptions, setting: Setting) -> None:
    """Refuse a ``tree_attention`` that cannot run here.

    Raises:
        ConfigError: naming the fix.
    """
    name = options.tree_attention
    if name == "triton":
        return
    head_size = setting.model_config.get_head_size()
    problem = None
    if not setting.v2_runner or not current_platform.is_cuda():
        problem = "it runs on CUDA only, with the V2 model runner: leave it out"
    elif setting.model_config.dtype == torch.float32:
        problem = "it takes no float32: use --dtype bfloat16"
    elif name == "flash" and (head_size % 8 or head_size > 256):
        problem = f"it takes no heads of {head_size}: use tree_attention='triton'"
    elif name == "flash" and not (report := check_symbols(MANIFEST_FLASH)).supported:
        problem = "; ".join(report.problems) + ": use tree_attention='triton'"
    elif name == "xformers":
        problem = xformers_context.problem(head_size)
    if problem is not None:
        raise ConfigError(f"tree_attention={name!r} cannot be used: {problem}")
