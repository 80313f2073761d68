"""The vLLM symbols that we subclass, override or call, by model runner.

``check`` compares them with the imported vLLM, ``sources`` with source files that are not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class VllmSymbol:
    """A vLLM symbol that we subclass, override or call.

    Attributes:
        path: ``module:Qualified.name``.
        parameters: the first parameters, in order; None if only existence matters.
        keywords: parameters that we pass by name, in any position.
        older: symbols of older vLLM versions; any one of them can replace this one.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    older: tuple[VllmSymbol, ...] = ()

    def problem(self, compare: Callable[[VllmSymbol], str | None] | None = None) -> str | None:
        """Return how the symbol differs from the expected one, or None.

        Args:
            compare: does this for one symbol without ``older``; by default the symbol is imported.
        """
        compare = compare or VllmSymbol._problem
        found = compare(self)
        return None if found is None or any(compare(symbol) is None for symbol in self.older) else found

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
        """Return how the parameters ``names`` differ from the expected ones, or None."""
        if self.parameters is not None and names[: len(self.parameters)] != self.parameters:
            return f"{self.path} takes {names}, expected {self.parameters}"
        if missing := [name for name in self.keywords if name not in names]:
            return f"{self.path} takes {names}, not {', '.join(missing)}"
        return None


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

#: Symbols by which a target's layers and their parts are told apart, on every runner.
_LAYERS = (
    VllmSymbol("vllm.model_executor.models.interfaces:supports_multimodal", ("model",)),
    VllmSymbol("vllm.model_executor.layers.logits_processor:LogitsProcessor.forward", ("self", "lm_head")),
    VllmSymbol("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding"),
    VllmSymbol("vllm.model_executor.layers.attention:Attention.get_kv_cache_spec", ("self", "vllm_config")),
    VllmSymbol("vllm.model_executor.layers.mamba.abstract:MambaBase"),
    VllmSymbol("vllm.v1.attention.backend:AttentionType"),
)

_LORA = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin"

#: The target's LM head on both runners.
_TARGET_HEAD = (
    VllmSymbol("vllm.lora.layers.base:BaseLayerWithLoRA"),
    VllmSymbol(
        "vllm.model_executor.layers.quantization.base_config:method_has_implemented_embedding", ("method_class",)
    ),
)

#: The V1 runner on any device.
_V1 = (
    *_LAYERS,
    VllmSymbol(f"{_RUNNER}.execute_model", ("self", "scheduler_output")),
    VllmSymbol(f"{_RUNNER}.sample_tokens", ("self", "grammar_output")),
    VllmSymbol(f"{_RUNNER}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens")),
    VllmSymbol(f"{_RUNNER}._build_attention_metadata", ("self", "num_tokens", "num_reqs", "max_query_len")),
    VllmSymbol(f"{_RUNNER}.initialize_kv_cache", ("self", "kv_cache_config")),
    VllmSymbol(f"{_RUNNER}._calc_mrope_positions", ("self", "scheduler_output")),
    VllmSymbol(f"{_RUNNER}._get_positions", ("self", "num_tokens")),
    VllmSymbol(f"{_RUNNER}._prepare_mm_inputs", ("self", "num_tokens")),
    VllmSymbol(f"{_RUNNER}._dummy_sampler_run", ("self", "hidden_states")),
    VllmSymbol(f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata")),
    VllmSymbol(f"{_RUNNER}._bookkeeping_sync", ("self", "scheduler_output", "sampler_output")),
    VllmSymbol(f"{_RUNNER}._input_fits_in_drafter", ("self", "common_attn_metadata")),
    VllmSymbol(
        f"{_RUNNER}.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states"),
    ),
    VllmSymbol(f"{_RUNNER}._update_states", ("self", "scheduler_output")),
    VllmSymbol("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", ("vllm_config",)),
    VllmSymbol(
        f"{_PROPOSER}.prepare_inputs", ("self", "common_attn_metadata", "sampled_token_ids", "num_draft_tokens")
    ),
    VllmSymbol(
        f"{_PROPOSER}.set_inputs_first_pass", ("self", "target_token_ids", "next_token_ids", "target_positions")
    ),
    VllmSymbol(f"{_PROPOSER}.propose", ("self", "num_speculative_tokens", "target_token_ids")),
    VllmSymbol(f"{_PROPOSER}._maybe_share_lm_head", ("self", "target_language_model")),
    VllmSymbol(f"{_LORA}.maybe_setup_dummy_loras", ("self", "lora_config")),
    VllmSymbol(
        f"{_LORA}.maybe_select_dummy_loras",
        ("self", "lora_config", "num_scheduled_tokens"),
        keywords=("num_sampled_tokens", "num_active_loras"),
    ),
    VllmSymbol(f"{_LORA}._set_active_loras", ("self", "prompt_lora_mapping", "token_lora_mapping", "lora_requests")),
    *_TARGET_HEAD,
    VllmSymbol(f"{_PROPOSER}._get_positions", ("self", "num_tokens")),
    VllmSymbol(f"{_PROPOSER}._set_positions", ("self", "num_tokens", "positions")),
    VllmSymbol("vllm.v1.spec_decode.eagle:EagleProposer.__init__", ("self", "vllm_config", "device", "runner")),
    VllmSymbol("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", ("logits", "k", "p")),
    VllmSymbol("vllm.v1.attention.selector:_cached_get_attn_backend"),
    VllmSymbol("vllm.v1.sample.logits_processor:build_logitsprocs", ("vllm_config", "device", "is_pin_memory")),
    VllmSymbol("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS"),
    VllmSymbol("vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor"),
    VllmSymbol("vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"),
    VllmSymbol(f"{_RUNNER}.may_reinitialize_input_batch", ("self",)),
    VllmSymbol(
        "vllm.v1.sample.thinking_budget_state:maybe_create_thinking_budget_state_holder",
        ("reasoning_config", "max_num_seqs", "num_spec_tokens", "device", "is_pin_memory"),
    ),
    VllmSymbol(f"{_RUNNER}.take_draft_token_ids", ("self",)),
    VllmSymbol(f"{_SCHEDULER}.schedule", ("self",)),
    VllmSymbol(f"{_SCHEDULER}._handle_stopped_request", ("self", "request")),
    VllmSymbol("vllm.v1.core.sched.output:NewRequestData"),
    VllmSymbol(f"{_SCHEDULER}.update_draft_token_ids", ("self", "draft_token_ids")),
    VllmSymbol(f"{_SCHEDULER}.update_from_output", ("self", "scheduler_output", "model_runner_output")),
    VllmSymbol(f"{_SCHEDULER}.get_grammar_bitmask", ("self", "scheduler_output")),
    VllmSymbol(
        f"{_GRAMMARS}._get_constraint_bounds",
        ("self", "request", "spec_tokens"),
        older=(
            VllmSymbol(f"{_GRAMMARS}._get_constraint_start", ("self", "request", "spec_tokens")),
            VllmSymbol(f"{_GRAMMARS}.should_fill_bitmask", ("self", "request")),
        ),
    ),
    VllmSymbol(f"{_GRAMMARS}._get_reasoner", ("self", "request")),
    VllmSymbol("vllm.distributed.parallel_state:get_tp_group"),
    VllmSymbol("vllm.distributed.parallel_state:get_tensor_model_parallel_rank"),
    VllmSymbol("vllm.distributed.parallel_state:GroupCoordinator.broadcast_object", ("self", "obj", "src")),
    VllmSymbol("vllm.forward_context:set_forward_context", keywords=("slot_mapping",)),
    VllmSymbol("vllm.forward_context:get_forward_context"),
    VllmSymbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    VllmSymbol("vllm.model_executor.models.llama_eagle:EagleLlamaForCausalLM"),
    VllmSymbol("vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"),
    VllmSymbol("vllm.config.speculative:SpeculativeConfig.__post_init__", ("self",)),
)

#: The V1 runner on a CPU; compared when one of our methods is configured and by ``specplug doctor``.
MANIFEST = (
    *_V1,
    VllmSymbol("vllm.model_executor.layers.linear:LinearBase"),
    VllmSymbol(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading", ("self", "layer")
    ),
    VllmSymbol("vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    VllmSymbol("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    VllmSymbol("vllm.v1.worker.cpu_worker:CPUWorker.load_model", ("self", "load_dummy_weights")),
    VllmSymbol("vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory", ("self",)),
    VllmSymbol("vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__", ("self", "vllm_config", "device")),
    VllmSymbol(f"{_CPU_ATTENTION}:CPUAttentionBackend.forward_includes_kv_cache_update"),
    VllmSymbol(f"{_CPU_ATTENTION}:CPUAttentionMetadata"),
    VllmSymbol(f"{_CPU_ATTENTION}:CPUAttentionMetadataBuilder.build"),
    VllmSymbol(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    VllmSymbol(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    VllmSymbol(f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.process_weights_after_loading", ("self", "act_dtype")),
    VllmSymbol(
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

#: CUDA workers and their attention, on both runners.
_CUDA = (
    VllmSymbol(f"{_TRITON_ATTENTION}:TritonAttentionMetadata"),
    VllmSymbol(
        f"{_TRITON_ATTENTION}:TritonAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    VllmSymbol(
        f"{_TRITON_ATTENTION}:TritonAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    VllmSymbol(f"{_FLASH_ATTENTION}:FlashAttentionMetadata"),
    VllmSymbol(
        f"{_FLASH_ATTENTION}:FlashAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    VllmSymbol(
        f"{_FLASH_ATTENTION}:FlashAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    VllmSymbol("vllm.config:VllmConfig.use_v2_model_runner"),
    VllmSymbol("vllm.v1.worker.gpu_worker:Worker._make_model_runner", ("self",)),
    VllmSymbol("vllm.v1.worker.gpu_worker:Worker.init_device", ("self",)),
)

#: The V2 runner; compared when one of our methods is configured and vLLM will choose this runner.
MANIFEST_V2 = (
    *_LAYERS,
    *_CUDA,
    VllmSymbol("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", ("self",)),
    VllmSymbol(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", ("self", "scheduler_output")
    ),
    VllmSymbol(f"{_SCHEDULER}._update_after_schedule", ("self", "scheduler_output")),
    VllmSymbol(f"{_SCHEDULER}.schedule", ("self",)),
    VllmSymbol(f"{_SCHEDULER}._handle_stopped_request", ("self", "request")),
    VllmSymbol("vllm.v1.core.sched.output:NewRequestData"),
    VllmSymbol(f"{_SCHEDULER}.update_draft_token_ids", ("self", "draft_token_ids")),
    VllmSymbol(f"{_SCHEDULER}.update_draft_token_ids_in_output", ("self", "draft_token_ids", "scheduler_output")),
    VllmSymbol(f"{_SCHEDULER}.get_grammar_bitmask", ("self", "scheduler_output")),
    VllmSymbol(
        "vllm.v1.core.sched.output:GrammarOutput",
        ("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"),
    ),
    VllmSymbol(f"{_GRAMMARS}._get_constraint_bounds", ("self", "request", "spec_tokens")),
    VllmSymbol(f"{_V2}.spec_decode.utils:DraftTokensHandler.__init__", ("self", "device")),
    VllmSymbol(f"{_V2}.spec_decode.utils:DraftTokensHandler.set_draft_tokens", ("self", "input_batch", "draft_tokens")),
    VllmSymbol(f"{_V2}.spec_decode.utils:DraftTokensHandler.get_draft_tokens", ("self",)),
    VllmSymbol(f"{_V2}.sample.gumbel:gumbel_noised_argmax"),
    VllmSymbol("vllm.utils.torch_utils:async_tensor_h2d", ("data", "device"), keywords=("out",)),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.add_requests", ("self", "scheduler_output")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.finish_requests", ("self", "scheduler_output")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.shutdown", ("self",)),
    VllmSymbol(f"{_SCHEDULER}.update_from_output", ("self", "scheduler_output", "model_runner_output")),
    VllmSymbol("vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule"),
    VllmSymbol("vllm.config.speculative:SpeculativeConfig.uses_dynamic_speculative_decoding", ("self",)),
    VllmSymbol("vllm.distributed.parallel_state:GroupCoordinator.broadcast_object", ("self", "obj", "src")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.__init__", ("self", "vllm_config", "device")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner._dummy_sampler_run", ("self", "hidden_states")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.initialize_kv_cache", ("self", "kv_cache_config")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.load_model", ("self",)),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.get_kv_cache_spec", ("self",)),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.profile_run", ("self",)),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.prepare_attn", ("self", "input_batch")),
    VllmSymbol(f"{_LORA}._set_active_loras", ("self", "prompt_lora_mapping", "token_lora_mapping", "lora_requests")),
    *_TARGET_HEAD,
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.execute_model", ("self", "scheduler_output")),
    VllmSymbol(f"{_V2}.model_runner:GPUModelRunner.sample_tokens", ("self", "grammar_output")),
    VllmSymbol(f"{_V2}.spec_decode:init_speculator", ("vllm_config", "device", "req_states")),
    VllmSymbol("vllm.config.speculative:SpeculativeConfig.use_ngram", ("self",)),
    VllmSymbol(f"{_V2}.spec_decode.eagle.speculator:EagleSpeculator.load_draft_model", ("self", "target_model")),
    VllmSymbol(f"{_V2}.spec_decode.speculator:BaseSpeculator.propose", _V2_PROPOSE),
    VllmSymbol(f"{_V2}.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager", ("self", "cudagraph_mode")),
    VllmSymbol(f"{_V2}.cudagraph_utils:CudaGraphManager._init_candidates", ("self",)),
    VllmSymbol(f"{_V2}.cudagraph_utils:BatchExecutionDescriptor"),
    VllmSymbol("vllm.utils.gpu_sync_debug:gpu_sync_allowed", ()),
    VllmSymbol(f"{_V2_SPECULATOR}.propose", _V2_PROPOSE),
    VllmSymbol(
        f"{_V2}.spec_decode.target_dependent_ar.speculator:prepare_prefill_inputs",
        (
            "last_token_indices",
            "current_draft_step",
            "input_buffers",
            "input_batch",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "max_num_reqs",
        ),
    ),
    VllmSymbol(f"{_V2_SPECULATOR}.sample_draft", ("self", "hidden_states")),
    VllmSymbol(f"{_V2_SPECULATOR}.capture", ("self",)),
    VllmSymbol(
        f"{_V2}.model_states.default:DefaultModelState.prepare_attn",
        ("self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config"),
    ),
    VllmSymbol(f"{_V2}.model_states.default:DefaultModelState.prepare_inputs", ("self", "input_batch", "req_states")),
    VllmSymbol(
        f"{_V2_REJECTION}:RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    ),
    VllmSymbol(
        f"{_V2_REJECTION}:RejectionSampler._get_logprobs_tensors",
        ("self", "sampled", "num_sampled", "logits", "cu_num_logits", "cu_num_logits_np", "max_num_logprobs"),
    ),
    VllmSymbol(f"{_V2_REJECTION}:_iter_request_chunks", ("cu_num_logits", "max_chunk_logits")),
    VllmSymbol(f"{_V2_REJECTION}:get_max_chunk_logits", ("vocab_size",)),
    VllmSymbol(
        f"{_V2}.input_batch:get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    VllmSymbol(
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
    VllmSymbol(f"{_V2}.sample.sampler:Sampler.apply_sampling_params", ("self", "logits", "expanded_idx_mapping")),
    VllmSymbol(f"{_V2}.sample.penalties:PenaltiesState"),
    VllmSymbol(f"{_V2}.sample.bad_words:BadWordsState"),
    VllmSymbol(f"{_V2}.sample.logit_bias:LogitBiasState"),
    VllmSymbol(f"{_V2}.sample.output:SamplerOutput"),
    VllmSymbol(f"{_V2}.sample.states:NO_LOGPROBS"),
    VllmSymbol(f"{_V2}.metrics.logits:get_num_nans", ("logits",)),
    VllmSymbol("vllm.v1.worker.cpu.model_runner:CPUModelRunner"),
    VllmSymbol("vllm.forward_context:set_forward_context", ("attn_metadata", "vllm_config", "num_tokens")),
    VllmSymbol("vllm.config:set_current_vllm_config", ("vllm_config",)),
    VllmSymbol("vllm.forward_context:set_forward_context", keywords=("slot_mapping",)),
    VllmSymbol("vllm.forward_context:get_forward_context"),
    VllmSymbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    VllmSymbol("vllm.model_executor.models.llama_eagle:EagleLlamaForCausalLM"),
    VllmSymbol("vllm.config.speculative:SpeculativeConfig.__post_init__", ("self",)),
)

_RELOAD = "vllm.model_executor.model_loader.reload"
#: Also needed for ``reload`` with an EAGLE drafter.
MANIFEST_RELOAD = (
    VllmSymbol(f"{_RELOAD}.layerwise:get_layerwise_info", ("layer",)),
    VllmSymbol(f"{_RELOAD}.types:LayerReloadingInfo", ("restore_metadata",)),
    VllmSymbol(f"{_RELOAD}.meta:materialize_meta_tensor", ("meta_tensor",)),
    VllmSymbol(f"{_RELOAD}.sanitize:restore_layer_refs", ("tensor", "layer")),
)

_SPEC, _INIT = "vllm.v1.spec_decode", ("self", "vllm_config", "device")
#: Also needed for drafters of these methods of vLLM, by (method, whether on the V2 runner).
MANIFEST_DRAFTERS = {
    ("draft_model", False): (VllmSymbol(f"{_SPEC}.draft_model:DraftModelProposer.__init__", (*_INIT, "runner")),),
    ("draft_model", True): (
        VllmSymbol("vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator.__init__", _INIT),
    ),
    ("dflash", False): (VllmSymbol(f"{_SPEC}.dflash:DFlashProposer.__init__", (*_INIT, "runner")),),
    ("dflash", True): (
        VllmSymbol("vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__", _INIT),
        VllmSymbol("vllm.v1.worker.gpu.spec_decode.dflash.utils:load_dflash_model", ("target_model", "vllm_config")),
    ),
    ("dspark", True): (
        VllmSymbol("vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__", _INIT),
        VllmSymbol("vllm.v1.worker.gpu.spec_decode.dspark.utils:load_dspark_model", ("target_model", "vllm_config")),
    ),
    ("dspark", False): (
        VllmSymbol(f"{_SPEC}.dflash:DFlashProposer.__init__", (*_INIT, "runner")),
        VllmSymbol("vllm.model_executor.models.qwen3_dspark:Qwen3DSparkForCausalLM"),
    ),
}

#: Also needed for ``tree_attention='flash'``; its module can be imported on CUDA only.
MANIFEST_FLASH = (
    VllmSymbol(
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
    VllmSymbol("vllm.v1.attention.backends.fa_utils:get_flash_attn_version", keywords=("head_size",)),
    VllmSymbol("vllm.utils.torch_utils:canonicalize_singleton_dim_strides", ("t",)),
)


#: Without these everything works, but slower.
OPTIONAL = (VllmSymbol("vllm.v1.engine.core:EngineCore.post_step", ("self", "model_executed")),)
