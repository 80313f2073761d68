"""Our options as a SpeculativeConfig of the host, so that it loads and schedules the drafter itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_specplug.config import ConfigError, TreeOptions, lookup_of, model_drafter, parse_options, resolve_drafter
from vllm_specplug.hosts.compat.check import UNCHECKED, check_runner, was_checked
from vllm_specplug.hosts.compat.features import (
    V1_CUDA,
    V2,
    Setting,
    check_features,
    check_options,
    check_tree_attention,
    uses_v2_runner,
)
from vllm_specplug.hosts.drafters.int8_linear import can_quantise
from vllm_specplug.proposers.eagle2.checkpoint import validate_checkpoint
from vllm_specplug.proposers.medusa.options import MedusaOptions, resolve
from vllm_specplug.proposers.swift.options import SwiftOptions, check_target
from vllm_specplug.utils.metrics import publish

logger = logging.getLogger("vllm_specplug")

CPU_WORKER = "vllm_specplug.hosts.v1.cpu_worker.TreeCPUWorker"
CPU_WORKER_V2 = "vllm_specplug.hosts.v2.worker.TreeCPUWorkerV2"
GPU_WORKER = "vllm_specplug.hosts.v1.gpu_worker.TreeGPUWorkerV1"
GPU_WORKER_V2 = "vllm_specplug.hosts.v2.worker.TreeGPUWorker"

#: Lets grammars follow trees.
SCHEDULER = "vllm_specplug.hosts.v1.scheduler.TreeScheduler"
SCHEDULER_V2 = "vllm_specplug.hosts.v2.scheduler.tree_scheduler"

#: What the host's ``custom_class`` method loads for methods without a draft model.
NO_DRAFTER = "vllm_specplug.hosts.drafters.free_proposer.NoModelDrafter"

#: The same for Medusa heads, which see the target's hidden states.
MEDUSA_PROPOSER = "vllm_specplug.hosts.drafters.medusa_v1.MedusaProposer"

#: The host's method for V2 speculators without a draft model: no draft KV, and asynchronous scheduling stays on.
V2_WITHOUT_DRAFTER = "ngram_gpu"

#: The same for the target with layers left out.
SWIFT_PROPOSER = "vllm_specplug.hosts.drafters.swift_v1.SwiftProposer"

#: Draft architectures of the host that our subclass replaces (draft vocabularies, ``fc.bias``).
EAGLE_ARCHITECTURE = "SpecPlugEagleForCausalLM"
EAGLE_MODEL = "vllm_specplug.hosts.drafters.eagle_model:SpecPlugEagleForCausalLM"


@config
class TreeSpeculativeConfig(SpeculativeConfig):
    """The host's ``eagle``/``eagle3`` configuration with the tree's options beside it.

    The host keeps doing what it does for those methods: load the drafter, give it paged KV in
    the prefix cache, reserve lookahead slots.  Importable and picklable: it travels to the
    engine core and the workers.
    """

    specplug: Any = None
    """Options of our method (a ``TreeOptions``)."""

    v2_runner: bool = False
    """Whether the host's V2 model runner is to run the trees."""

    metrics_file: str | None = None
    """Where the worker counts for ``/metrics``, see ``metrics.publish``."""

    def compute_hash(self) -> str:
        # The attention of the compiled model is ours: no engine without our methods may take it from a cache.
        rounded = getattr(model_drafter(self.specplug), "draft_int8", False)
        return f"specplug-{'int8-' if rounded else ''}{super().compute_hash()}"

    def __post_init__(self):
        result = super().__post_init__()
        _register_model()
        if self.method == "eagle":
            self.draft_model_config.hf_config.architectures = [EAGLE_ARCHITECTURE]
            self.update_arch_()
        return result

    def use_ngram(self) -> bool:
        """Asked where the V2 runner decides whether all tokens lie in the device's memory: lookup reads them there."""
        return lookup_of(self.specplug) is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled in the engine core and the workers: their registries must know the drafter too.
        _register_model()
        self.__dict__.update(state)


def _register_model() -> None:
    from vllm import ModelRegistry

    if EAGLE_ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(EAGLE_ARCHITECTURE, EAGLE_MODEL)


def build(
    given: dict[str, Any], target_model_config: Any, target_parallel_config: Any, engine_args: Any
) -> TreeSpeculativeConfig:
    """Validate everything that can be known before the engine starts, and build the host's configuration.

    Raises:
        ConfigError, CheckpointError: with the fix in the message.
    """
    given = {key.replace("-", "_"): value for key, value in given.items()}
    options = parse_options(given)
    drafter, on_cpu = model_drafter(options), current_platform.is_cpu()
    v2 = uses_v2_runner(options)
    model_runner = "V2" if v2 else "V1"
    report = check_runner(model_runner, on_cpu)
    if not report.supported:
        raise ConfigError(f"method {options.method!r} cannot run on this host: " + "; ".join(report.problems))
    if not was_checked(report, model_runner, on_cpu):
        logger.warning(
            "%s is set: the tests of the %s runner have not passed on %s %s, so compare its answers with plain vLLM's",
            *(UNCHECKED, model_runner, report.distribution, report.version),
        )
    setting = Setting(target_model_config, target_parallel_config, engine_args, v2)
    check_features(options.method, setting)
    check_tree_attention(options, setting)
    runner = V2 if v2 else None if on_cpu else V1_CUDA
    if runner is not None:
        check_options(options, runner)
    if target_parallel_config.tensor_parallel_size > 1:
        if runner is not None:
            raise ConfigError(f"{runner.name} with our methods does not support tensor parallelism yet")
        if options.budget == "measured":
            raise ConfigError("budget='measured' does not support tensor parallelism: use budget='fixed'")
    if isinstance(drafter, MedusaOptions):
        resolved = resolve(drafter, target_model_config.get_hidden_size(), target_model_config.get_vocab_size())
        options = _with_drafter(options, drafter, resolved)
        host_method, model = "custom_class", MEDUSA_PROPOSER
    elif isinstance(drafter, SwiftOptions):
        check_target(drafter, target_model_config.hf_text_config.num_hidden_layers)
        host_method, model = "custom_class", SWIFT_PROPOSER
    elif drafter is not None:
        path = resolve_drafter(drafter.model, drafter.method)
        info = validate_checkpoint(
            path,
            target_hidden_size=target_model_config.get_hidden_size(),
            target_vocab_size=target_model_config.get_vocab_size(),
        )
        host_method, model = info.kind, str(path)
    else:
        host_method, model = "custom_class", NO_DRAFTER
    if drafter is not None and hasattr(drafter, "draft_int8"):
        parallel = target_parallel_config.tensor_parallel_size > 1
        knows = on_cpu and not v2 and not parallel and host_method != "eagle3"
        current = model_drafter(options)
        rounded = _in_int8(current.draft_int8, knows, target_model_config.dtype)
        options = _with_drafter(options, current, replace(current, draft_int8=rounded))
    if v2 and host_method == "custom_class":
        host_method, model = V2_WITHOUT_DRAFTER, None
    if target_parallel_config.worker_cls == "auto":
        workers = {
            (True, True): CPU_WORKER_V2,
            (True, False): CPU_WORKER,
            (False, True): GPU_WORKER_V2,
            (False, False): GPU_WORKER,
        }
        target_parallel_config.worker_cls = workers[on_cpu, v2]
    engine_args.scheduler_cls = SCHEDULER_V2 if v2 else SCHEDULER
    return TreeSpeculativeConfig(
        method=host_method,
        model=model,
        num_speculative_tokens=options.num_speculative_tokens,
        # V1's drafter selects its inputs by path rows, after the walk: the host's padded batch assumes flat prefixes.
        # (On V2 the rows themselves are brought into path order.)
        disable_padded_drafter_batch=not v2,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
        specplug=options,
        v2_runner=v2,
        metrics_file=publish(),
    )


def _in_int8(asked: bool | None, knows: bool, dtype: torch.dtype) -> bool:
    """Whether drafts are computed in 8 bits; ``knows``: whether that is written for this drafter and runner."""
    if asked and not (knows and can_quantise()):
        raise ConfigError(
            "draft_int8=true needs the V1 runner on a CPU that multiplies 8-bit numbers (VNNI), one process, and an "
            "EAGLE-1/2, HASS or Medusa drafter: leave it out"
        )
    return bool(asked) if asked is not None else knows and can_quantise() and dtype == torch.bfloat16


def _with_drafter(options: TreeOptions, drafter: TreeOptions, resolved: TreeOptions) -> TreeOptions:
    """Options with ``resolved`` in the drafter's place, which is the method itself or one of a union's sources."""
    if options is drafter:
        return resolved
    return replace(options, sources=tuple(resolved if source is drafter else source for source in options.sources))
