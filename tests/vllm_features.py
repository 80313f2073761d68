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

REFUSED_SWITCH = "refused"
#: Each boolean of vLLM's ParallelConfig, CacheConfig and SchedulerConfig: refused, or why trees do not depend on it.
#: The reasons were read in vLLM's sources.
SWITCHES = {
    # ParallelConfig
    "_allow_auto_resolve_cp_interleave_size": "context parallelism is refused",
    "data_parallel_external_lb": "sends requests to replicas, which do not share trees",
    "data_parallel_hybrid_lb": "sends requests to replicas, which do not share trees",
    "dcp_q_replicate": "context parallelism is refused",
    "disable_custom_all_reduce": "another way to the same sums",
    "disable_nccl_for_dp_synchronization": "another way to agree on the rows of a step",
    "enable_batch_sharded_sampling": REFUSED_SWITCH,
    "enable_dbo": REFUSED_SWITCH,
    "enable_elastic_ep": "changes the number of replicas; no draft phase depends on it",
    "enable_ep_weight_filter": "loads fewer weights, and uses the same ones",
    "enable_eplb": "moves experts between ranks; their results stay",
    "enable_expert_parallel": "places experts; their results stay",
    "enable_fault_tolerance": "goes on with fewer replicas; no draft phase depends on them",
    "enable_hc_sp": "splits rows of HyperConnections within a layer, and joins them again",
    "enable_shm_tensor_arena": "another way to send inputs to workers",
    "is_moe_model": "set by vLLM from the model",
    "numa_bind": "places workers",
    "ray_workers_use_nsight": "profiles workers",
    # CacheConfig
    "_block_size_resolved": "vLLM's own note",
    "enable_mamba_shared_prefix_checkpoint": "targets with Mamba layers are refused",
    "enable_prefix_caching": "works, see WORKS",
    "is_attention_free": "set by vLLM from the model",
    "kv_sharing_fast_prefill": REFUSED_SWITCH,
    "swa_bounded_replay": "of DeepSeek-V4.1, whose layers are refused",
    "use_kda_recoverssm": "targets with linear attention are refused",
    "use_replayssm": "targets with Mamba layers are refused",
    "user_specified_block_size": "vLLM's own note",
    # SchedulerConfig
    "async_scheduling": "works on V2, refused on V1",
    "disable_chunked_mm_input": "chooses where a prompt is cut",
    "disable_hybrid_kv_cache_manager": "all layers in one KV cache group, which is the simpler case",
    "enable_chunked_prefill": "works, see WORKS",
    "is_multimodal_model": "set by vLLM from the model",
    "long_prefill_token_threshold_adaptive": "chooses where a prompt is cut",
    "scheduler_reserve_full_isl": "chooses when a request starts",
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
