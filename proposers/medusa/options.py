"""Options of ``{"method": "medusa"}``, and their resolution with the checkpoint before the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from vllm_specplug.config import (
    DEFAULT_NODE_FLOOR,
    DEVICE_NODES,
    MAX_DRAFT_DEPTH,
    MAX_DRAFT_TOP_K,
    ConfigError,
    RecordOptions,
    require_bool,
    require_int,
    require_number,
    require_optional_bool,
    require_string,
    resolve_drafter,
)

from .checkpoint import MedusaInfo, validate_medusa
from .sparse_tree import TREE_KEY, Paths, check_heads, check_paths, default_tree, depth_of, read_tree

#: Default of ``draft_top_k`` for dynamic trees.
DYNAMIC_TOP_K = 8


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(RecordOptions):
    """Options of ``{"method": "medusa"}`` (Medusa, section 2).

    ``num_speculative_tokens`` is a limit: a larger tree is cut to its first nodes, which are the best ones of a
    calibrated tree.

    Attributes:
        model: the heads: a directory, a Hugging Face repository or the short name of shipped heads.
        tree: the tree's shape: a JSON file (``specplug calibrate medusa`` writes one) or a list of rank paths; by
            default the checkpoint's (``medusa_choices`` in its config), else a general one.
        dynamic: instead of a fixed shape, choose the nodes anew in each step, by the product of the heads'
            probabilities along the path (EAGLE-2's value).
        draft_depth: levels of the tree, one for each head used; by default the number of heads.
        draft_top_k: with ``dynamic``: guesses per head and nodes extended per level.
        min_node_value: with ``dynamic``: nodes of a lower value are not verified; by default 0.06 with a fixed budget.
        draft_int8: compute the drafts' logits in 8 bits (V1 runner on a CPU with VNNI, or AVX2 and no AVX-512); by
            default with VNNI if the weights are bfloat16, unless the CPU has AMX and ``linear_rows`` is "all".
    """

    method: ClassVar[str] = "medusa"
    drafter_packages: ClassVar[tuple[str, ...]] = ("medusa",)
    has_draft_probs: ClassVar[bool] = True
    #: Above temperature 0, drafts use the noise that the target's sampler will use.
    coupled: ClassVar[bool] = True
    device_sizes: ClassVar[Mapping[str, int]] = {"num_speculative_tokens": DEVICE_NODES}

    model: str
    tree: str | Paths | None = None
    dynamic: bool = False
    draft_depth: int | None = None
    draft_top_k: int | None = None
    min_node_value: float | None = None
    draft_int8: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_string("model", self.model)
        require_bool("dynamic", self.dynamic)
        require_optional_bool("draft_int8", self.draft_int8)
        if self.draft_depth is not None:
            require_int("draft_depth", self.draft_depth, 1, MAX_DRAFT_DEPTH)
        if self.draft_top_k is not None:
            require_int("draft_top_k", self.draft_top_k, 1, MAX_DRAFT_TOP_K)
        if self.min_node_value is not None:
            require_number("min_node_value", self.min_node_value, 0.0, 0.5)
        for key in ("draft_top_k", "min_node_value"):
            if getattr(self, key) is not None and not self.dynamic:
                raise ConfigError(f"{key} is for dynamic trees: set dynamic to true, or leave {key} out")
        if isinstance(self.tree, str):
            require_string("tree", self.tree)
        elif self.tree is not None:
            object.__setattr__(self, "tree", check_paths(self.tree, "tree"))
        if self.tree is not None and self.dynamic:
            raise ConfigError("dynamic trees have no fixed shape: leave out either tree or dynamic")

    @cached_property
    def node_floor(self) -> float:
        """``min_node_value``, with its default resolved."""
        if self.min_node_value is not None:
            return self.min_node_value
        return DEFAULT_NODE_FLOOR if self.dynamic and self.budget == "fixed" else 0.0


def resolve(options: MedusaOptions, target_hidden_size: int, target_vocab_size: int) -> MedusaOptions:
    """Check the heads against the target, and resolve the options that depend on files.

    Args:
        options: the user's.
        target_hidden_size, target_vocab_size: of the target.

    Returns:
        Options with ``model`` a directory, ``draft_depth`` set, ``tree`` a tuple of paths (None if dynamic),
        ``draft_top_k`` set if dynamic, and ``num_speculative_tokens`` the number of nodes of the tree.

    Raises:
        ConfigError, CheckpointError: the heads or the options cannot be used; the message has the remedy.
    """
    path = resolve_drafter(options.model, options.method)
    info = validate_medusa(path, target_hidden_size, target_vocab_size)
    depth = info.num_heads if options.draft_depth is None else options.draft_depth
    if depth > info.num_heads:
        raise ConfigError(
            f"draft_depth={depth} needs more heads than {path} has ({info.num_heads}): lower draft_depth, or leave "
            "it out"
        )
    budget = options.num_speculative_tokens
    if options.dynamic:
        top_k = min(options.draft_top_k or DYNAMIC_TOP_K, info.draft_vocab_size)
        nodes = min(budget, top_k + (depth - 1) * top_k**2)
        return replace(options, model=str(path), draft_depth=depth, draft_top_k=top_k, num_speculative_tokens=nodes)
    tree = _find_tree(options, info, depth)[:budget]
    return replace(options, model=str(path), draft_depth=depth_of(tree), tree=tree, num_speculative_tokens=len(tree))


def _find_tree(options: MedusaOptions, info: MedusaInfo, depth: int) -> Paths:
    """The tree to use, without nodes deeper than ``depth``."""
    if options.tree is not None:
        where = "tree" if isinstance(options.tree, tuple) else f"the tree of {options.tree}"
        tree = options.tree if isinstance(options.tree, tuple) else read_tree(options.tree)
    elif TREE_KEY in info.config:
        where = f"{TREE_KEY} of {info.path / 'config.json'}"
        tree = check_paths(info.config[TREE_KEY], where)
    else:
        return default_tree(depth, info.draft_vocab_size, options.num_speculative_tokens)
    check_heads(tree, info.num_heads, info.draft_vocab_size, where)
    return tuple(path for path in tree if len(path) <= depth)
