"""Features of vLLM that are refused at start, as data; ``tests/vllm_features.py`` lists those that work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_specplug.config import ConfigError, TreeOptions, parts_of
from vllm_specplug.hosts.compat.check import check_symbols
from vllm_specplug.hosts.compat.manifest import MANIFEST_FLASH
from vllm_specplug.kernels import xformers_context
from vllm_specplug.proposer import find_method, loadable_methods


class Setting(NamedTuple):
    """What vLLM passes when the speculative config is built."""

    model_config: Any
    parallel_config: Any
    engine_args: Any
    v2_runner: bool = False


@dataclass(frozen=True)
class Refusal:
    """A feature that is refused when the engine starts.

    Attributes:
        feature: its name in the message.
        fix: what to use instead.
        used: returns whether it is in use.
        example: engine arguments that use it; ``model.NAME`` stands for an attribute of vLLM's model config.
    """

    feature: str
    fix: str
    used: Callable[[Setting], bool]
    example: dict[str, Any]


REFUSED = (
    Refusal(
        "pipeline parallelism",
        "--pipeline-parallel-size 1",
        lambda s: s.parallel_config.pipeline_parallel_size > 1,
        {"pipeline_parallel_size": 2},
    ),
    Refusal(
        "data parallelism",
        "--data-parallel-size 1",
        lambda s: s.parallel_config.data_parallel_size > 1,
        {"data_parallel_size": 2},
    ),
    Refusal(
        "a custom worker class",
        "no --worker-cls",
        lambda s: s.parallel_config.worker_cls != "auto" and "vllm_specplug." not in s.parallel_config.worker_cls,
        {"worker_cls": "some.Worker"},
    ),
    Refusal(
        "a custom scheduler class",
        "no --scheduler-cls",
        lambda s: s.engine_args.scheduler_cls is not None and "vllm_specplug." not in str(s.engine_args.scheduler_cls),
        {"scheduler_cls": "some.Scheduler"},
    ),
    Refusal(
        "asynchronous scheduling",
        "--no-async-scheduling, or leave the option out",
        lambda s: bool(s.engine_args.async_scheduling) and not s.v2_runner,
        {"async_scheduling": True},
    ),
    Refusal("LoRA", "no --enable-lora", lambda s: bool(s.engine_args.enable_lora), {"enable_lora": True}),
    Refusal(
        "a KV connector",
        "no --kv-transfer-config",
        lambda s: s.engine_args.kv_transfer_config is not None,
        {"kv_transfer_config": {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"}},
    ),
    Refusal(
        "sleep mode",
        "no --enable-sleep-mode",
        lambda s: bool(s.model_config.enable_sleep_mode),
        {"model.enable_sleep_mode": True},
    ),
    Refusal(
        "prompt embeddings",
        "no --enable-prompt-embeds",
        lambda s: bool(s.engine_args.enable_prompt_embeds),
        {"enable_prompt_embeds": True},
    ),
    Refusal(
        "embedding and pooling models",
        "a server of its own for them",
        lambda s: s.model_config.runner_type != "generate",
        {"model.runner_type": "pooling"},
    ),
    Refusal(
        "a quantised KV cache",
        "--kv-cache-dtype auto",
        lambda s: str(s.engine_args.kv_cache_dtype) not in ("auto", "float16", "bfloat16", "float32"),
        {"kv_cache_dtype": "fp8"},
    ),
    Refusal(
        "quantised weights",
        "an unquantised target",
        lambda s: s.model_config.quantization is not None,
        {"model.quantization": "awq"},
    ),
    Refusal(
        "dtypes other than float32 and bfloat16",
        "--dtype bfloat16 or float32",
        lambda s: s.model_config.dtype not in (torch.float32, torch.bfloat16),
        {"dtype": "float16"},
    ),
    Refusal(
        "multi-modal targets",
        "a text-only target",
        lambda s: s.model_config.is_multimodal_model,
        {"model.is_multimodal_model": True},
    ),
    Refusal(
        "encoder-decoder targets",
        "a decoder-only target",
        lambda s: s.model_config.is_encoder_decoder,
        {"model.is_encoder_decoder": True},
    ),
    Refusal(
        "M-RoPE targets",
        "a target with plain rotary positions",
        lambda s: s.model_config.uses_mrope,
        {"model.uses_mrope": True},
    ),
    Refusal(
        "sliding-window attention",
        "a target with full attention",
        lambda s: s.model_config.get_sliding_window() is not None,
        {"model.get_sliding_window": lambda: 128},
    ),
    Refusal(
        "attention logit soft caps",
        "a target without them",
        lambda s: getattr(s.model_config.hf_text_config, "attn_logit_softcapping", None) is not None,
        {"hf_overrides": {"attn_logit_softcapping": 30.0}},
    ),
)


def check_features(method: str, setting: Setting) -> None:
    """Refuse features that our methods do not support, by name.

    Raises:
        ConfigError: naming the first feature and the fix.
    """
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise ConfigError(f"method {method!r} does not run on {current_platform.device_name!r}: use CUDA or a CPU")
    on_cpu = current_platform.is_cpu() and not setting.v2_runner
    if on_cpu and current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        raise ConfigError(f"method {method!r} supports the packed KV layout of x86-64 only: use such a processor")
    for refusal in REFUSED:
        if refusal.used(setting):
            raise ConfigError(
                f"method {method!r} does not support {refusal.feature} yet: use {refusal.fix}, or another method"
            )


def uses_v2_runner(options: TreeOptions) -> bool:
    """Return whether vLLM will choose its V2 model runner for these options."""
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return bool(envs.VLLM_USE_V2_MODEL_RUNNER)
    methods = [find_method(part.method) for part in parts_of(options)]
    has_vllm_model = any(method.model is not None and method.model.is_vllm_model for method in methods)
    return HAS_TRITON and (has_vllm_model or all(method.runs_on_v2 for method in methods))


@dataclass(frozen=True)
class _Runner:
    """A model runner on which not all of our options work.

    Attributes:
        name: in messages.
        static: whether a draft phase has a fixed shape and stays on the device: the CPU sees no draft, and leaving out
            a node saves nothing.
        otherwise: the way out for a method that it does not serve.
    """

    name: str
    static: bool
    otherwise: str

    def serves(self, method: str) -> bool:
        found = find_method(method)
        return found.runs_on_v2 if self.static else found.runs_on_v1_cuda


V2 = _Runner("vLLM's V2 model runner", True, "set VLLM_USE_V2_MODEL_RUNNER=0")
V1_CUDA = _Runner("vLLM's V1 model runner on CUDA", False, "serve it on a CPU")


def check_options(options: TreeOptions, runner: _Runner) -> None:
    """Refuse options that do not work on a runner yet.

    Raises:
        ConfigError: naming the option and the fix.
    """
    for part in parts_of(options):
        _check_part(part, runner)


def _check_part(options: TreeOptions, runner: _Runner) -> None:
    if not runner.serves(options.method):
        served = ", ".join(name for name in loadable_methods() if runner.serves(name))
        raise ConfigError(
            f"method {options.method!r} does not run on {runner.name} yet: use one of {served}, or {runner.otherwise}"
        )
    given = {name: getattr(options, name, None) for name in ("min_node_value", "min_level_value", "traffic_tokens")}
    for used, option, fix in (
        (options.budget != "fixed", "budget='measured'", "budget='fixed'"),
        (options.verification != "exact", f"verification={options.verification!r}", "verification='exact'"),
        (runner.static and options.trace_trees is not None, "trace_trees", "no trace_trees"),
        (
            runner.static and given["min_node_value"],
            "min_node_value",
            "min_node_value=0, and fewer num_speculative_tokens",
        ),
        # Answers of other requests are in CPU memory.
        (runner.static and given["traffic_tokens"], "traffic_tokens", f"traffic_tokens=0, or {runner.otherwise}"),
        # Reading back from a device whether to go on costs more than a draft level.
        (given["min_level_value"], "min_level_value", "min_level_value=0, and a lower draft_depth"),
    ):
        if used:
            raise ConfigError(f"{option} does not work on {runner.name} yet: use {fix}")


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
