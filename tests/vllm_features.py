"""Features of vLLM that work with our methods, each with the test that shows it, and the table of docs/support.md.

python -m tests.vllm_features       # prints the table
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.hosts.compat.features import REFUSED
from vllm_specplug.utils.tables import format_table


@dataclass(frozen=True)
class Support:
    """A feature that works.

    Attributes:
        feature: its name.
        test: the test that shows it, ``file::name``.
        note: a remark for the table.
    """

    feature: str
    test: str
    note: str = ""


WORKS = (
    Support("continuous batching", "tests/hosts/test_identity.py::test_batch_of_8"),
    Support("prefix caching", "tests/hosts/test_identity.py::test_prefix_cache_hits_on_blocks_written_by_trees"),
    Support("chunked prefill", "tests/hosts/test_identity.py::test_block_size_32_and_chunked_prefill"),
    Support("preemption", "tests/hosts/test_identity.py::test_forced_preemption"),
    Support("priority scheduling", "tests/hosts/test_features.py::test_priority_scheduling"),
    Support("torch.compile", "tests/hosts/test_identity.py::test_torch_compile", "and eager mode"),
    Support("every sampling parameter", "tests/hosts/test_sampling.py::test_same_as_plain", "min_p and logit_bias too"),
    Support("logprobs, prompt logprobs", "tests/hosts/test_sampling.py::test_logprobs_modes", "in all modes"),
    Support("custom logits processors", "tests/hosts/test_sampling.py::test_same_as_plain"),
    Support(
        "structured output", "tests/hosts/test_structured.py::test_same_as_plain", "every node masked along its path"
    ),
    Support("reasoning parsers", "tests/hosts/test_structured.py::test_reasoning_is_free_and_what_follows_is_not"),
    Support("streaming", "tests/e2e/test_server.py::test_chat_streamed_and_not"),
    Support("tool calls", "tests/e2e/test_api.py::test_tool_call", "arguments follow the schema as in plain vLLM"),
    Support(
        "tensor parallelism",
        "tests/hosts/test_tensor_parallel.py::test_same_as_plain",
        "V1 on a CPU: every method, budget and verification",
    ),
    Support(
        "Ray executor",
        "tests/hosts/test_tensor_parallel.py::test_ray",
        "vLLM itself refuses it on a CPU; the test lets Ray count the ranks as devices",
    ),
    Support("data parallelism", "tests/hosts/test_data_parallel.py::test_replicas_behind_one_server", "dense targets"),
    Support(
        "asynchronous scheduling by default",
        "tests/hosts/test_deployments.py::test_asynchronous_scheduling_is_left_to_vllm",
        "vLLM turns it off on the V1 runner",
    ),
    Support(
        "worker and scheduler classes of your own",
        "tests/hosts/test_deployments.py::test_custom_worker_and_scheduler",
        "derived from vLLM's; ours are mixed in",
    ),
    Support("prompt embeddings", "tests/hosts/test_deployments.py::test_prompt_embeddings"),
    Support("KV connectors", "tests/hosts/test_deployments.py::test_kv_connector", "ExampleConnector"),
    Support("float16", "tests/hosts/test_attention_traits.py::test_float16", "and bfloat16, float32"),
    Support("sliding windows", "tests/hosts/test_attention_traits.py::test_same_as_plain", "of some layers or of all"),
    Support("logit soft caps", "tests/hosts/test_attention_traits.py::test_same_as_plain"),
    Support("attention sinks", "tests/hosts/test_attention_traits.py::test_same_as_plain"),
    Support("ALiBi", "tests/hosts/test_attention_traits.py::test_same_as_plain"),
    Support(
        "KV sharing between layers",
        "tests/hosts/test_attention_traits.py::test_layers_that_share_keys_and_values",
    ),
    Support(
        "quantised weights",
        "tests/hosts/test_quantised.py::test_same_as_plain",
        "compressed-tensors, GPTQ, AWQ and online formats are tested",
    ),
    Support("LoRA", "tests/hosts/test_lora.py::test_same_as_plain", "drafts come from the base model"),
    Support(
        "several KV cache groups",
        "tests/hosts/test_kv_groups.py::test_same_as_plain",
        "of windows and full layers (vLLM's hybrid KV cache manager)",
    ),
    Support("layers of different shapes", "tests/hosts/test_kv_groups.py::test_layers_of_different_shapes"),
    Support("learned positions", "tests/hosts/test_kv_groups.py::test_learned_positions"),
    Support(
        "M-RoPE, multi-modal targets",
        "tests/hosts/test_images.py::test_same_as_plain",
        "requests with text and images; drafters read the text",
    ),
    Support("abort", "tests/hosts/test_features.py::test_aborts_leak_nothing"),
)


def feature_table() -> str:
    """Return the feature table of docs/support.md, in Markdown."""
    rows = [[support.feature, "works", support.note] for support in WORKS]
    rows += [[refusal.feature, "refused", f"{refusal.reason}: {refusal.fix}"] for refusal in REFUSED]
    return format_table(["vLLM feature", "with our methods", "note"], rows, markdown=True)


if __name__ == "__main__":
    print(feature_table())
