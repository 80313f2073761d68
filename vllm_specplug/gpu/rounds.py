"""The shapes of rounds that a configuration has, and how vLLM is told of them."""

from __future__ import annotations

from typing import Any

from vllm_specplug.budget.shapes import Shape, shapes_of
from vllm_specplug.config import ConfigError, TreeOptions, model_drafter, parts_of
from vllm_specplug.proposer import find_method
from vllm_specplug.utils.environment import version_of
from vllm_specplug.vllm.check import find_vllm


def shapes(options: TreeOptions) -> list[Shape]:
    """Return the shapes with drafts, smallest first; with a fixed budget only the configured one."""
    depth = most_levels(options)
    drafter = model_drafter(options)
    by_level = drafter is not None and find_method(drafter.method).model.is_vllm_model
    top_k = drafter.draft_top_k if by_level else None
    found = shapes_of(options.num_speculative_tokens, depth, top_k)
    return found if options.budget == "measured" else found[-1:]


def most_levels(options: TreeOptions) -> int:
    """Return the levels of the deepest tree; a method without ``draft_depth`` may draft a chain of all nodes."""
    depths = [part.draft_depth for part in parts_of(options) if hasattr(part, "draft_depth")]
    return max(depths, default=options.num_speculative_tokens)


def schedule(options: TreeOptions) -> list[tuple[int, int, int]] | None:
    """Return vLLM's ``num_speculative_tokens_per_batch_size`` for a measured budget.

    vLLM records graphs for each number of tokens in it.  Which one is used is decided for each step by our scheduler,
    so the batch sizes mean nothing.
    """
    if options.budget != "measured":
        return None
    nodes = [shape.nodes for shape in reversed(shapes(options))] + [0]
    return [(place, place, count) for place, count in enumerate(nodes, start=1)]


def check_batch(options: TreeOptions, max_num_seqs: int) -> None:
    """Refuse batches that are smaller than the list of shapes.

    Raises:
        ConfigError: with the fix.
    """
    least = len(schedule(options) or ())
    if max_num_seqs < least:
        raise ConfigError(
            f"budget='measured' needs --max-num-seqs {least} or more on vLLM's V2 model runner (found {max_num_seqs}): "
            "raise it, or use budget='fixed'"
        )


def facts(vllm_config: Any, device: str) -> dict[str, Any]:
    """Return the facts on which the seconds of rounds depend; they name the kept file.

    Args:
        vllm_config: vLLM's; read alike in the worker and in the scheduler's process.
        device: name of the device.
    """
    options, scheduler = vllm_config.speculative_config.specplug, vllm_config.scheduler_config
    drafter, lora = model_drafter(options), vllm_config.lora_config
    return {
        "device": device,
        "model": vllm_config.model_config.model,
        "dtype": str(vllm_config.model_config.dtype),
        "quantization": vllm_config.model_config.quantization,
        "method": [part.method for part in parts_of(options)],
        "drafter": getattr(drafter, "model", None),
        "top_k": getattr(drafter, "draft_top_k", None),
        "shapes": [(shape.nodes, shape.depth) for shape in shapes(options)],
        "attention": options.tree_attention,
        "eager": vllm_config.model_config.enforce_eager,
        "lora_rank": lora.max_lora_rank if lora else None,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "batch": [scheduler.max_num_seqs, scheduler.max_num_batched_tokens],
        "vllm": " ".join(find_vllm()),
        "plugin": version_of("vllm-specplug"),
    }
