"""Features of vLLM that work with our methods, each with the test that shows it, and the table of docs/support.md.

python -m tests.vllm_features       # prints the table
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from vllm_specplug.utils.tables import format_table
from vllm_specplug.vllm.features import REFUSED


@dataclass(frozen=True)
class Support:
    """A feature that works.

    Attributes:
        feature: its name.
        test: the test that shows it on the V1 runner, ``file::name``.
        note: a remark for the table.
        v2: the test that shows it on the V2 runner.
    """

    feature: str
    test: str
    note: str = ""
    v2: str = ""


WORKS = (
    Support(
        "continuous batching",
        "tests/hosts/test_identity.py::test_batch_of_8",
        v2="tests/v2/test_budget.py::test_requests_join_and_leave",
    ),
    Support(
        "prefix caching",
        "tests/hosts/test_identity.py::test_prefix_cache_hits_on_blocks_written_by_trees",
        v2="tests/v2/test_identity.py::test_prefix_cache_hits_on_blocks_written_by_trees",
    ),
    Support(
        "chunked prefill",
        "tests/hosts/test_identity.py::test_forced_preemption_and_chunked_prefill",
        v2="tests/v2/test_identity.py::test_forced_preemption_and_chunked_prefill",
    ),
    Support(
        "preemption",
        "tests/hosts/test_identity.py::test_forced_preemption_and_chunked_prefill",
        v2="tests/v2/test_identity.py::test_forced_preemption_and_chunked_prefill",
    ),
    Support("priority scheduling", "tests/hosts/test_features.py::test_priority_scheduling"),
    Support("torch.compile", "tests/hosts/test_identity.py::test_torch_compile", "and eager mode"),
    Support("every sampling parameter", "tests/hosts/test_sampling.py::test_same_as_plain", "min_p and logit_bias too"),
    Support("logprobs, prompt logprobs", "tests/hosts/test_sampling.py::test_logprobs_modes", "in all modes"),
    Support("custom logits processors", "tests/hosts/test_sampling.py::test_same_as_plain"),
    Support(
        "structured output",
        "tests/hosts/test_structured.py::test_same_as_plain",
        "each node has its own mask",
        v2="tests/v2/test_mixed_requests.py::test_same_as_plain",
    ),
    Support("reasoning parsers", "tests/hosts/test_structured.py::test_reasoning_is_free_and_what_follows_is_not"),
    Support("streaming", "tests/e2e/test_api.py::test_whole_and_streamed"),
    Support(
        "sessions with streamed input",
        "tests/hosts/test_sessions.py::test_turns",
        "the next input follows as in plain vLLM",
        v2="tests/v2/test_lookup.py::test_sessions",
    ),
    Support("tool calls", "tests/e2e/test_api.py::test_tool_call", "arguments follow the schema as in plain vLLM"),
    Support(
        "tensor parallelism",
        "tests/hosts/test_tensor_parallel.py::test_same_as_plain",
        "V2: eagle2, lookup, unions",
        v2="tests/v2/test_tensor_parallel.py::test_measured_budget_and_a_reduced_vocabulary",
    ),
    Support(
        "Ray executor",
        "tests/hosts/test_tensor_parallel.py::test_ray",
        "vLLM refuses it on a CPU",
    ),
    Support(
        "data parallelism",
        "tests/hosts/test_data_parallel.py::test_replicas_behind_one_server",
        "V1: dense targets, V2: with experts",
        v2="tests/v2/test_data_parallel.py::test_same_as_plain",
    ),
    Support(
        "asynchronous scheduling by default",
        "tests/hosts/test_deployments.py::test_asynchronous_scheduling_is_left_to_vllm",
        "on V2; on V1 vLLM turns it off",
        v2="tests/v2/test_mixed_requests.py::test_asynchronous_scheduling",
    ),
    Support(
        "worker and scheduler classes of your own",
        "tests/hosts/test_deployments.py::test_custom_worker_and_scheduler",
        "derived from vLLM's",
    ),
    Support("prompt embeddings", "tests/hosts/test_deployments.py::test_prompt_embeddings"),
    Support("KV connectors", "tests/hosts/test_deployments.py::test_kv_connector", "ExampleConnector"),
    Support("float16", "tests/hosts/test_attention_traits.py::test_float16", "and bfloat16, float32"),
    Support(
        "sliding windows",
        "tests/hosts/test_attention_traits.py::test_same_as_plain",
        "of some layers or of all",
        v2="tests/v2/test_attention_traits.py::test_same_tokens",
    ),
    Support(
        "logit soft caps",
        "tests/hosts/test_attention_traits.py::test_same_as_plain",
        v2="tests/v2/test_attention_traits.py::test_same_tokens",
    ),
    Support(
        "attention sinks",
        "tests/hosts/test_attention_traits.py::test_same_as_plain",
        v2="tests/v2/test_attention_traits.py::test_same_tokens",
    ),
    Support(
        "ALiBi",
        "tests/hosts/test_attention_traits.py::test_same_as_plain",
        v2="tests/v2/test_attention_traits.py::test_same_tokens",
    ),
    Support(
        "KV sharing between layers",
        "tests/hosts/test_attention_traits.py::test_layers_that_share_keys_and_values",
        v2="tests/v2/test_attention_traits.py::test_same_tokens",
    ),
    Support(
        "quantised weights",
        "tests/hosts/test_quantised.py::test_same_as_plain",
        "compressed-tensors, GPTQ, AWQ, online",
    ),
    Support(
        "fp8 KV caches",
        "tests/hosts/test_fp8_caches.py::test_same_as_plain",
        "with factors; V2: also by KV head",
        v2="tests/v2/test_fp8_caches.py::test_fp8",
    ),
    Support(
        "LoRA",
        "tests/hosts/test_lora.py::test_same_as_plain",
        "drafts come from the base model",
        v2="tests/v2/test_lora.py::test_mixed_batch",
    ),
    Support(
        "several KV cache groups",
        "tests/hosts/test_kv_groups.py::test_same_as_plain",
        "windows and full layers",
        v2="tests/v2/test_kv_groups.py::test_groups",
    ),
    Support("layers of different shapes", "tests/hosts/test_kv_groups.py::test_layers_of_different_shapes"),
    Support("learned positions", "tests/hosts/test_kv_groups.py::test_learned_positions"),
    Support(
        "M-RoPE, multi-modal targets",
        "tests/hosts/test_images.py::test_same_as_plain",
        "drafters read the text",
        v2="tests/v2/test_kv_groups.py::test_images",
    ),
    Support("abort", "tests/hosts/test_features.py::test_aborts_leak_nothing"),
)

#: How a boolean of vLLM's configurations is classed.  The reasons were read in vLLM's sources (0.32 and 0.33).
#: By ``REFUSED``; by the V2 runner when it loads the target (vLLM's V1 runner refuses these itself); by the V2 runner's
#: check of recurrent states (vLLM refuses these on CPUs); as keys that the plugin's methods do not have.
REFUSED_SWITCH, REFUSED_ON_V2, REFUSED_STATES = "refused", "refused on V2", "refused with recurrent states on V2"
REFUSED_KEY = "refused: no key of the plugin's methods"
_SERVED, _MODEL, _INPUTS, _PLACE = (
    "served: ",
    "irrelevant: how the target is read or named: ",
    "irrelevant: inputs of prompts; rows of trees are tokens: ",
    "irrelevant: moves work or bytes, and the results stay: ",
)
_WATCHES, _NOTE, _OTHER = "irrelevant: it watches: ", "irrelevant: vLLM sets it: ", "irrelevant: refused targets only: "
_OTHER_DEVICE, _POOLING = "irrelevant: another device: ", "irrelevant: pooling models are refused: "
#: Each boolean by configuration of ``VllmConfig``: how it is classed, with a reason.
SWITCHES: dict[str, dict[str, str]] = {
    "ModelConfig": {
        "allow_deprecated_quantization": _MODEL + "which formats of weights load",
        "disable_cascade_attn": "irrelevant: vLLM has no cascade attention on CPUs and on V2",
        "disable_sliding_window": _SERVED + "all layers attend to all of a shorter context, see AttentionTraits",
        "enable_cumem_allocator": _PLACE + "weights and caches from another allocator; graphs only with sleep mode",
        "enable_nccl_comm_suspend": _PLACE + "of use with sleep mode only",
        "enable_prompt_embeds": _SERVED + "see WORKS; vLLM's V2 runner overlays them where positions are the prompt's",
        "enable_sleep_mode": REFUSED_SWITCH,
        "enable_trace_replay": REFUSED_ON_V2,
        "enforce_eager": _SERVED + "with graphs and without",
        "hf_token": _MODEL + "a password",
        "is_submodel_config": _NOTE + "parts of a multi-modal model",
        "return_sampling_mask": REFUSED_ON_V2,
        "skip_tokenizer_init": _MODEL + "drafts need token ids only",
        "sleep_mode_offload_cudagraph": _PLACE + "of use with sleep mode only",
        "trust_remote_code": _MODEL + "code of the checkpoint",
        "use_fp64_gumbel": _SERVED + "drafts draw the same noise on V2; on V1 they are not coupled with it",
        "word_embeddings_untied_by_checkpoint": _NOTE + "from the checkpoint",
    },
    "PoolerConfig": {
        "enable_chunked_processing": _POOLING + "long texts",
        "enable_flash_late_interaction": _POOLING + "scores",
        "use_activation": _POOLING + "scores",
    },
    "MultiModalConfig": {
        "allow_missing_mm_embeddings": _INPUTS + "images that another server has encoded",
        "enable_mm_embeds": _INPUTS + "encoded images",
        "interleave_mm_strings": _INPUTS + "their places in the text",
        "language_model_only": _INPUTS + "none but text",
        "mm_device_do_normalize": _INPUTS + "images are scaled on the device",
        "mm_encoder_only": "irrelevant: no language model is loaded, so nothing decodes",
        "skip_mm_profiling": _PLACE + "memory of encoders is not measured",
    },
    "CacheConfig": {
        "_block_size_resolved": _NOTE + "its own note",
        "enable_mamba_shared_prefix_checkpoint": "irrelevant: for a drafter with recurrent states, which is refused",
        "enable_prefix_caching": _SERVED + "see WORKS",
        "is_attention_free": _NOTE + "from the model",
        "kv_sharing_fast_prefill": REFUSED_SWITCH,
        "swa_bounded_replay": _OTHER + "DeepSeek-V4.1",
        "use_kda_recoverssm": _NOTE + "from use_replayssm, for KDA layers, which are refused",
        "use_replayssm": REFUSED_STATES,
        "user_specified_block_size": _NOTE + "its own note",
    },
    "ParallelConfig": {
        "_allow_auto_resolve_cp_interleave_size": _OTHER + "context parallelism is refused",
        "data_parallel_external_lb": _PLACE + "requests go to replicas, which do not share trees",
        "data_parallel_hybrid_lb": _PLACE + "requests go to replicas, which do not share trees",
        "dcp_q_replicate": "irrelevant: context parallelism is refused",
        "disable_custom_all_reduce": _PLACE + "another way to the same sums",
        "disable_nccl_for_dp_synchronization": _PLACE + "another way to agree on the rows of a step",
        "enable_batch_sharded_sampling": REFUSED_SWITCH,
        "enable_dbo": REFUSED_SWITCH,
        "enable_elastic_ep": REFUSED_ON_V2,
        "enable_ep_weight_filter": _PLACE + "fewer weights are read, and the same ones used",
        "enable_eplb": _PLACE + "experts move between ranks",
        "enable_expert_parallel": _PLACE + "experts are spread over ranks",
        "enable_fault_tolerance": _PLACE + "goes on with fewer replicas; no draft phase depends on them",
        "enable_hc_sp": _OTHER + "Qwen4Exp, whose layers are refused",
        "enable_shm_tensor_arena": _PLACE + "another way to send inputs to workers",
        "is_moe_model": _NOTE + "from the model",
        "numa_bind": _PLACE + "workers on cores",
        "ray_workers_use_nsight": _WATCHES + "a profiler of workers",
    },
    "EPLBConfig": {
        "enable_migration_batching": _PLACE + "how experts move",
        "log_balancedness": _WATCHES + "the load of experts",
        "use_async": _PLACE + "how experts move",
    },
    "SchedulerConfig": {
        "async_scheduling": _SERVED + "on V2, see WORKS; refused on V1",
        "disable_chunked_mm_input": _INPUTS + "where a prompt is cut",
        "disable_hybrid_kv_cache_manager": _SERVED + "all layers in one KV cache group, the simpler case",
        "enable_chunked_prefill": _SERVED + "see WORKS",
        "is_multimodal_model": _NOTE + "from the model",
        "long_prefill_token_threshold_adaptive": _SERVED + "where a prompt is cut",
        "scheduler_reserve_full_isl": _SERVED + "when a request starts",
    },
    "LoadConfig": {"use_tqdm_on_load": _WATCHES + "a bar of progress"},
    "AttentionConfig": {
        "disable_flashinfer_q_quantization": "irrelevant: the attention of FlashInfer is refused",
        "indexer_sparse_logits": _OTHER + "sparse attention",
        "minimax_m3_indexer_cp": _OTHER + "sparse attention",
        "sparse_mla_force_mqa": _OTHER + "sparse attention",
        "use_non_causal": _OTHER + "layers that attend to later tokens; of a DFlash drafter vLLM sets it",
        "use_prefill_query_quantization": _INPUTS + "queries of prompts in MLA layers; trees do not use that kernel",
        "use_trtllm_attention": "irrelevant: the attention of FlashInfer is refused",
    },
    "HiSparseConfig": {"eager_host_mirror": _OTHER + "sparse attention"},
    "AuxOutputConfig": {"enable_return_routed_experts": REFUSED_SWITCH},
    "EngramConfig": {
        "cpu_offload": _OTHER + "embeddings of n-grams (DeepSeek-V4.1, Qwen4Exp)",
        "dp_shared_memory": _OTHER + "embeddings of n-grams",
        "embedding_across_dp": _OTHER + "embeddings of n-grams",
        "use_thp": _OTHER + "embeddings of n-grams",
    },
    "MambaConfig": {"enable_stochastic_rounding": REFUSED_STATES},
    "KernelConfig": {
        "enable_cutedsl_warmup": _PLACE + "when kernels are compiled",
        "enable_flashinfer_autotune": _PLACE + "which variant of a kernel runs",
        "enable_jit_warmup": _SERVED + "the plugin compiles its kernels in either case",
        "enable_rocm_segmented_attn_autotune": _OTHER_DEVICE + "ROCm",
        "monokernel": _OTHER_DEVICE + "ROCm",
    },
    "LoRAConfig": {
        "enable_mixed_moe_lora_format": _SERVED + "how adapters of experts are stored; drafts come from the base model",
        "enable_moe_shared_loras": _SERVED + "how adapters of experts are stored",
        "enable_tower_connector_lora": _INPUTS + "adapters of encoders",
        "fully_sharded_loras": _PLACE + "adapters are split over ranks",
        "specialize_active_lora": _SERVED + "graphs of trees are recorded for each of vLLM's cases",
    },
    "SpeculativeConfig": dict.fromkeys(
        (
            "disable_eagle_block_drop",
            "disable_lookahead_block_hashes",
            "disable_padded_drafter_batch",
            "enable_adaptive_verification",
            "enforce_eager",
            "index_share_for_mtp_iteration",
            "parallel_drafting",
            "use_heterogeneous_vocab",
            "use_local_argmax_reduction",
        ),
        REFUSED_KEY,
    ),
    "WatermarkConfig": {"allow_target_only_watermarking": "irrelevant: watermarks are refused on V2, by vLLM on V1"},
    "StructuredOutputsConfig": {
        "disable_additional_properties": _SERVED + "another grammar",
        "disable_any_whitespace": _SERVED + "another grammar",
        "enable_in_reasoning": _SERVED + "when the grammar begins",
    },
    "ObservabilityConfig": {
        "cudagraph_metrics": _WATCHES + "graphs",
        "enable_layerwise_nvtx_tracing": _WATCHES + "marks for a profiler",
        "enable_logging_iteration_details": _WATCHES + "log",
        "enable_mfu_metrics": _WATCHES + "estimates of work",
        "enable_mm_processor_stats": _WATCHES + "images",
        "jit_monitor_verbose": _WATCHES + "compilation",
        "kv_cache_metrics": _WATCHES + "blocks",
    },
    "LoggingConfig": {"configure_logging": _WATCHES + "log"},
    "CompilationConfig": {
        "compile_mm_encoder": _INPUTS + "encoders",
        "cudagraph_copy_inputs": _SERVED + "piecewise graphs, which run no attention",
        "cudagraph_decoder_replay": _OTHER + "DeepSeek-V4.1",
        "cudagraph_mm_encoder": _INPUTS + "encoders",
        "cudagraph_specialize_lora": _SERVED + "graphs of trees are recorded for each of vLLM's cases",
        "fast_moe_cold_start": "irrelevant: vLLM turns it off (torch has opaque objects)",
        "ir_enable_torch_wrap": _PLACE + "how operators are compiled",
        "use_inductor_graph_partition": _SERVED + "attention stays one operator",
    },
    "PassConfig": {
        "eliminate_noops": _PLACE + "operators that do nothing",
        "enable_qk_norm_rope_fusion": _PLACE + "before attention",
        "fuse_act_padding": _OTHER_DEVICE + "ROCm",
        "fuse_act_quant": _PLACE + "between layers",
        "fuse_allreduce_rms": _PLACE + "between layers",
        "fuse_attn_quant": _SERVED + "trees' attention says that it quantises no output, so vLLM does not fuse it",
        "fuse_mla_dual_rms_norm": _OTHER_DEVICE + "ROCm",
        "fuse_norm_quant": _PLACE + "between layers",
        "fuse_qk_norm_rope_kvcache": _OTHER_DEVICE + "ROCm",
        "fuse_rope_kvcache": _OTHER_DEVICE + "ROCm",
        "fuse_rope_kvcache_cat_mla": _SERVED + "trees read their rows' latents from the pages",
    },
    "DynamicShapesConfig": {
        "assume_32_bit_indexing": _PLACE + "how shapes are compiled",
        "evaluate_guards": _WATCHES + "shapes that were assumed",
    },
    "ProfilerConfig": dict.fromkeys(
        (
            "capture_torch_profiler",
            "detailed_trace_annotation",
            "ignore_frontend",
            "proton_graph_attribution",
            "torch_profiler_dump_cuda_time_total",
            "torch_profiler_record_shapes",
            "torch_profiler_use_gzip",
            "torch_profiler_with_flops",
            "torch_profiler_with_memory",
            "torch_profiler_with_stack",
        ),
        _WATCHES + "a profiler",
    ),
    "KVTransferConfig": {"enable_permute_local_kv": "irrelevant: of NIXL's connectors, which are refused"},
    "KVEventsConfig": {"enable_kv_cache_events": _WATCHES + "full blocks, whose rows are the accepted ones"},
    "ReasoningConfig": {"_enabled": _NOTE + "a thinking budget, which both samplers follow"},
}


def feature_table() -> str:
    """Return the feature table of docs/support.md in Markdown; below it, why features are refused."""
    rows = [[support.feature, "works", "works" if support.v2 else "not tested", support.note] for support in WORKS]
    reasons = []
    for number, refusal in enumerate(REFUSED, start=1):
        runners = ("refused", "works" if "V1" in refusal.feature else "refused")
        rows.append([refusal.feature, *runners, f"({number})"])
        reasons.append(f"{number}. *{refusal.feature}:* {refusal.reason}. Fix: {refusal.fix}.")
    table = format_table(["vLLM feature", "V1", "V2", "note"], rows, markdown=True)
    filled = [textwrap.fill(reason, 120, subsequent_indent="   ", break_on_hyphens=False) for reason in reasons]
    about = "V1 was tested on a CPU, V2 in Triton's interpreter. Why a feature is refused:"
    return "\n".join([table, "", about, "", *filled])


if __name__ == "__main__":
    print(feature_table())
