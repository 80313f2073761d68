"""The shapes of rounds that a configuration has, and the defaults of the V2 runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.budget.shapes import Shape, shapes_of
from vllm_specplug.config import TreeOptions, max_nodes, model_drafter, parts_of
from vllm_specplug.proposer import find_method
from vllm_specplug.utils.environment import version_of
from vllm_specplug.vllm.check import find_vllm

#: Most rows of a step of a measured budget; computed, not measured.  From 100 to 250 rows on (by GPU) the time grows
#: with the rows, so that a tree of 8 or more rows, of 7 levels at most, cannot pay in larger steps.
MEASURED_ROWS = 2048
#: Rows of trees that the default size reserves for ``max_num_seqs`` requests, at most: 2.1 GB of key/value for a Llama
#: of 8 billion parameters if all run, and 0.3 GB of masks of grammars for 152,000 tokens.
RESERVED_ROWS = 16384
#: The default size has at least so many nodes.
LEAST_NODES = 7


def shapes(options: TreeOptions) -> list[Shape]:
    """Return the shapes with drafts, smallest first; with a fixed budget only the configured one."""
    depth = most_levels(options)
    drafter = model_drafter(options)
    by_level = drafter is not None and find_method(drafter.method).model.is_vllm_model
    top_k = getattr(drafter, "draft_top_k", None) if by_level else None
    found = shapes_of(options.num_speculative_tokens, depth, top_k)
    return found if options.budget == "measured" else found[-1:]


def most_levels(options: TreeOptions) -> int:
    """Return the levels of the deepest tree; a method without ``draft_depth`` may draft a chain of all nodes."""
    depths = [part.draft_depth for part in parts_of(options) if hasattr(part, "draft_depth")]
    return max(depths, default=options.num_speculative_tokens)


def most_default_nodes(max_num_seqs: int) -> int:
    """Return the nodes of the largest default tree, 2^n - 1 of them: vLLM reserves its rows for each request."""
    rows = max(RESERVED_ROWS // max_num_seqs, LEAST_NODES + 1)
    return (1 << (rows.bit_length() - 1)) - 1


def with_defaults(given: Mapping[str, Any], budget: str = "measured", max_num_seqs: int = 256) -> dict[str, Any]:
    """Return a configuration with the defaults of the V2 runner: a measured budget, and trees of up to 63 nodes.

    Verification by rejection needs a fixed budget, and gets fixed trees.

    Args:
        given: the user's, with a valid method.
        budget: of a method without one; trees of a fixed one are small, since it drafts alike for all batches.
        max_num_seqs: most running requests; with more than 256 trees are smaller.
    """
    if given.get("budget") == "fixed" or given.get("verification") == "rejection":
        return dict(given)
    is_fixed = given.get("budget", budget) == "fixed"
    return {"budget": budget, **_with_sizes(given, LEAST_NODES if is_fixed else most_default_nodes(max_num_seqs))}


def _with_sizes(given: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return a configuration with the sizes that are not given, of at most so many nodes; of its sources too."""
    if given.get("budget") == "fixed":
        return dict(given)
    found = {**_sizes(given, most), **given}
    if sources := given.get("sources"):
        found["sources"] = [_with_sizes(source, most) for source in sources]
    return found


def _sizes(given: Mapping[str, Any], most: int) -> dict[str, int]:
    """Return the sizes of a tree that are not given; the tree holds its nodes."""
    options = find_method(given["method"]).options
    sizes = {name: size for name, size in options.device_sizes.items() if name not in given}
    if "num_speculative_tokens" in sizes:
        sizes["num_speculative_tokens"] = min(sizes["num_speculative_tokens"], most)
    if "draft_top_k" not in options.device_sizes:
        return sizes
    depth, top_k = ({**sizes, **given}.get(name, getattr(options, name)) for name in ("draft_depth", "draft_top_k"))
    room = max_nodes(depth, top_k)
    if "num_speculative_tokens" in sizes:
        return {**sizes, "num_speculative_tokens": min(sizes["num_speculative_tokens"], room)}
    return sizes if given["num_speculative_tokens"] <= room else {}


def most_rows(options: TreeOptions, max_num_tokens: int) -> int:
    """Return the most rows of a step in which all requests have trees; prompts get half of a step, or more."""
    return min(max_num_tokens // 2, MEASURED_ROWS) if options.budget == "measured" else max_num_tokens


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
