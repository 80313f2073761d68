"""Options of our methods: typed, frozen, validated before the engine starts.

The dictionary given to ``--speculative-config`` is resolved once, by :func:`parse_options`.  Nothing else reads user
input, and no environment variable duplicates a field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from vllm_specplug.proposer import find_method, method_names
from vllm_specplug.utils.published import current_folder

#: Upper bound of a tree: masks and KV scratch grow with its square.
MAX_NUM_SPECULATIVE_TOKENS = 255
MAX_DRAFT_DEPTH = 32
MAX_DRAFT_TOP_K = 64
#: Upper bound of a number for ``linear_rows``; and its value without a bound.
MAX_LINEAR_ROWS = 256
ALL_ROWS = "all"

#: Smallest estimated acceptance probability of a verified node with a fixed budget.  On a CPU a further row costs 2 to
#: 3% of a plain step; a union that verified nodes down to 0.01 was 8% slower than one that stopped at 0.05.
DEFAULT_NODE_FLOOR = 0.06
#: The same with a measured budget for a source without a bound on its nodes.  Less likely nodes are never verified, so
#: that they need not be considered.
MEASURED_NODE_FLOOR = 0.01
#: Nodes of the largest shape on a GPU: with the root they fill blocks of the attention kernel.
DEVICE_NODES = 63
VERIFICATIONS = ("exact", "typical", "rejection")
#: The first is the default; they have not been compared on a GPU yet.
TREE_ATTENTIONS = ("triton", "flash", "xformers")
BUDGETS = ("measured", "fixed")
#: The first is the default.
ON_FAILURE = ("refuse", "plain")

_COUPLED = {"coupled": "drafts above temperature 0 always use the sampler's noise"}
_RECORD_SHARE = {"record_share": "every request is recorded, unless it has record=false in its extra_args"}
_EAGLE2 = {
    **_COUPLED,
    **_RECORD_SHARE,
    "context_vocabulary": "up to 512 tokens of the requests' texts are drafted beside a reduced draft vocabulary",
}
#: By method: options of earlier versions, and the behaviour that replaced them.
REMOVED: dict[str, dict[str, str]] = {
    "auto": {
        **_RECORD_SHARE,
        "learn_min_tokens": "a round waits for 20000 tokens; `specplug learn --min-tokens` sets another number",
    },
    "eagle2": _EAGLE2,
    "hass": _EAGLE2,
    "medusa": {**_COUPLED, **_RECORD_SHARE},
    "lookup": {
        "min_match": "matches of 1 token or more are drafted; min_node_value leaves out the unlikely ones",
        "max_match": "matches of more than 16 tokens count as 16",
        "max_candidates": "up to 8 matches are merged; num_speculative_tokens limits the tree",
    },
    "swift": {
        "draft_depth": "a draft has up to 25 tokens; num_speculative_tokens limits it",
        "context_window": "candidates are scored on 32 tokens",
        "bayes_every": "a Gaussian process selects every 25th candidate",
        "max_steps": "the search ends after 1000 candidates",
        "patience": "the search ends after 300 candidates without a gain",
        "goal": "the search ends when the matchness exceeds 0.95",
        "max_delay": "a request waits at most 0.1 of its decoding time; optimise_share limits the search",
        "adapt": "the search starts again when the matchness falls; optimise_share=0 switches it off",
        "streams": "all requests share one search",
    },
}


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the fix."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Options that every method has.

    Attributes:
        num_speculative_tokens: drafted nodes per verification (the root is not counted).
        budget: ``measured``: measured costs decide at each step how much is drafted and verified; ``fixed``: the other
            options decide.
        verification: ``exact``: vLLM's own sampler decides at every visited node.  ``typical``: drafts that are likely
            enough are accepted at temperatures above 0, which is faster and changes the distribution (Medusa).
            ``rejection``: drafts are sampled and verified by multi-round rejection: the target's distribution exactly,
            but other tokens than plain decoding draws with the same seed.
        typical_epsilon, typical_delta: limits of typical acceptance, see ``core.typical.threshold``; a request can
            set its own in ``extra_args``.
        tree_attention: how rows of trees attend on CUDA.  ``triton``: one kernel of ours; ``flash``: vLLM's
            FlashAttention over the context, merged with a masked kernel over the tree; ``xformers``: the same with
            xformers' partial attention.
        linear_rows: most rows of a step whose unquantised linear layers our operator computes (V1 runner on a CPU); 0:
            vLLM computes all; None: ``ALL_ROWS`` on a CPU with AVX2 or more, else 0.  With a number up to 2 GiB of
            weights are kept in memory twice, unless vLLM packs none.
        trace_trees: file that receives the first trees as JSON lines.
        on_failure: if the proof at start fails: ``refuse``: the engine does not start; ``plain``: it
            decodes plainly.
        reload: take new versions of the drafter while serving; ``model`` is a folder in which they are published.
    """

    method: ClassVar[str]
    #: Packages of ``vllm_specplug.proposers`` whose shipped drafters the method can read; the last of a name counts.
    drafter_packages: ClassVar[tuple[str, ...]] = ()
    #: Whether drafts can be sampled from known probabilities, which ``rejection`` needs.
    has_draft_probs: ClassVar[bool] = False
    #: On vLLM's V2 runner, with a measured budget: the sizes of a tree that is told none.
    device_sizes: ClassVar[Mapping[str, int]] = {}
    #: Values of ``budget``.
    budgets: ClassVar[tuple[str, ...]] = BUDGETS

    num_speculative_tokens: int = 16
    budget: str = "fixed"
    verification: str = "exact"
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    tree_attention: str = TREE_ATTENTIONS[0]
    linear_rows: int | str | None = None
    trace_trees: str | None = None
    on_failure: str = ON_FAILURE[0]
    reload: bool = False

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that differ because of the options that are given."""
        return {}

    def __post_init__(self) -> None:
        if self.reload is not type(self).reload:  # the default of ``auto`` is None
            require_bool("reload", self.reload)
        require_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_NUM_SPECULATIVE_TOKENS)
        if self.budget not in self.budgets:
            raise ConfigError(f"budget={self.budget!r} is unknown; choose one of {', '.join(self.budgets)}")
        if self.verification not in VERIFICATIONS:
            raise ConfigError(
                f"verification={self.verification!r} is unknown; choose one of {', '.join(VERIFICATIONS)}"
            )
        if self.tree_attention not in TREE_ATTENTIONS:
            raise ConfigError(
                f"tree_attention={self.tree_attention!r} is unknown; choose one of {', '.join(TREE_ATTENTIONS)}"
            )
        if isinstance(self.linear_rows, str) and self.linear_rows != ALL_ROWS:
            raise ConfigError(
                f"linear_rows={self.linear_rows!r} is unknown: use {ALL_ROWS!r} or a number from 0 to {MAX_LINEAR_ROWS}"
            )
        if self.linear_rows not in (None, ALL_ROWS):
            require_int("linear_rows", self.linear_rows, 0, MAX_LINEAR_ROWS)
        if self.on_failure not in ON_FAILURE:
            raise ConfigError(f"on_failure={self.on_failure!r} is unknown; choose one of {', '.join(ON_FAILURE)}")
        if self.verification == "rejection":
            if not self.has_draft_probs:
                raise ConfigError(
                    f"verification='rejection' needs draft probabilities, which {self.method} does not have: use "
                    "eagle2, hass, mtp_tree, draft_tree or medusa, or leave it out"
                )
            if self.budget == "measured":
                raise ConfigError(
                    "verification='rejection' needs budget='fixed': a measured choice of nodes changes the distribution"
                )
        check_typical_limits(self.typical_epsilon, self.typical_delta)
        if self.trace_trees is not None:
            require_string("trace_trees", self.trace_trees)
            if not Path(self.trace_trees).absolute().parent.is_dir():
                raise ConfigError(f"trace_trees={self.trace_trees!r}: create its folder first, or leave the key out")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(TreeOptions):
    """Options of methods whose drafter reads the target's hidden states.

    Attributes:
        record: folder that keeps token ids and hidden states of finished requests, for training; None: none are kept.
        record_mib: limit of the folder; the oldest answers are deleted.
    """

    record: str | None = None
    record_mib: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("record_mib", self.record_mib, 16, 1 << 20)
        if self.record is not None:
            require_string("record", self.record)
            if not Path(self.record).absolute().parent.is_dir():
                raise ConfigError(f"record={self.record!r}: create the folder above it first, or leave the key out")


@dataclass(frozen=True, kw_only=True)
class GrownOptions(TreeOptions):
    """Options of methods that draft level by level, where the drafter is likely right (EAGLE-2, section 4).

    The defaults are by measurement of EAGLE heads on a CPU.

    Attributes:
        draft_depth: levels of the draft tree; the first comes with the drafter's re-seeding
            forward, each further one costs one drafter forward.
        draft_top_k: beam width and children per node; 1 gives EAGLE-1 chains.
        min_node_value: nodes of a lower value (product of confidences from the root) are not verified; by default 0.06
            with a fixed budget, 0 with a measured one.
        min_level_value: no further level is drafted if the values of the nodes to feed sum up to less, in expected
            tokens per request; by default 0.5 with a fixed budget, else 0.  With a fixed budget and both at 0 the
            trees are those of the paper.
    """

    has_draft_probs: ClassVar[bool] = True
    #: Above temperature 0, drafts use the noise that the target's sampler will use.
    coupled: ClassVar[bool] = True
    #: On a GPU a level takes about the same time for 3 and for 8 rows of a request.  EAGLE-2 (Li et al. 2024) uses 10;
    #: not measured.
    device_sizes: ClassVar[Mapping[str, int]] = {"num_speculative_tokens": DEVICE_NODES, "draft_top_k": 8}

    num_speculative_tokens: int = 8
    draft_depth: int = 6
    draft_top_k: int = 3
    min_node_value: float | None = None
    min_level_value: float | None = None

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return fewer nodes if a tree of the given shape holds fewer; a wider or deeper tree if more nodes are given.

        If no tree is large enough, the largest is returned, and refused.
        """
        nodes, depth, top_k = sizes = [given.get(key, getattr(cls, key)) for key in _TREE_SIZES]
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            return {}
        if "num_speculative_tokens" not in given:
            return {"num_speculative_tokens": min(nodes, max_nodes(depth, top_k), MAX_NUM_SPECULATIVE_TOKENS)}
        while "draft_top_k" not in given and max_nodes(depth, top_k) < nodes and top_k < MAX_DRAFT_TOP_K:
            top_k += 1
        while "draft_depth" not in given and max_nodes(depth, top_k) < nodes and depth < MAX_DRAFT_DEPTH:
            depth += 1
        return {"draft_depth": depth, "draft_top_k": top_k}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("draft_depth", self.draft_depth, 1, MAX_DRAFT_DEPTH)
        require_int("draft_top_k", self.draft_top_k, 1, MAX_DRAFT_TOP_K)
        if self.min_node_value is not None:
            require_number("min_node_value", self.min_node_value, 0.0, 0.5)
        if self.min_level_value is not None:
            require_number("min_level_value", self.min_level_value, 0.0, 1.0)
        if self.num_speculative_tokens > self.max_nodes:
            is_deepest = self.draft_depth == MAX_DRAFT_DEPTH
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} is more than a tree of draft_depth="
                f"{self.draft_depth} and draft_top_k={self.draft_top_k} can hold ({self.max_nodes} nodes): raise "
                f"{'' if is_deepest else 'draft_depth or '}draft_top_k, or lower num_speculative_tokens"
            )

    @cached_property
    def node_floor(self) -> float:
        """Return ``min_node_value`` or its default."""
        return node_floor(self.min_node_value, self.budget)

    @cached_property
    def level_floor(self) -> float:
        """Return ``min_level_value`` or its default."""
        return _or(self.min_level_value, 0.5 if self.budget == "fixed" else 0.0)

    @property
    def scratch_rows(self) -> int:
        """Return the nodes of one request that are fed to the levels."""
        return self.draft_top_k * max(self.draft_depth - 1, 1)

    @property
    def max_nodes(self) -> int:
        """Return the nodes drafted before reranking: k + (depth - 1) * k^2."""
        return max_nodes(self.draft_depth, self.draft_top_k)


@dataclass(frozen=True, kw_only=True)
class Eagle2Options(GrownOptions, RecordOptions):
    """Options of ``{"method": "eagle2"}`` (EAGLE-2, section 4).

    Attributes:
        model: drafter: a directory, a Hugging Face repository or the short name of a shipped drafter.
        draft_int8: compute drafts in 8 bits (V1 runner on a CPU with VNNI, or AVX2 and no AVX-512); the default with
            VNNI and bfloat16 weights, unless the CPU has AMX and ``linear_rows`` is "all".
    """

    method: ClassVar[str] = "eagle2"
    drafter_packages: ClassVar[tuple[str, ...]] = ("hass", "eagle2")
    #: With a draft vocabulary on a CPU: most tokens of the requests' own texts that are drafted beside it, over all
    #: requests of a step.
    context_vocabulary: ClassVar[int] = 512

    model: str
    draft_int8: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_string("model", self.model)
        require_optional_bool("draft_int8", self.draft_int8)


#: Options that the size of a tree follows from.
_TREE_SIZES = ("num_speculative_tokens", "draft_depth", "draft_top_k")


def max_nodes(draft_depth: int, draft_top_k: int) -> int:
    """Return how many nodes are drafted before reranking, see ``GrownOptions.max_nodes``."""
    return draft_top_k + (draft_depth - 1) * draft_top_k**2


def node_floor(given: float | None, budget: str, measured: float = 0.0) -> float:
    """Return ``min_node_value`` as given, or the default of the budget."""
    return _or(given, DEFAULT_NODE_FLOOR if budget == "fixed" else measured)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class HassOptions(Eagle2Options):
    """Options of ``{"method": "hass"}``: those of EAGLE-2, since HASS (section 3) only changes the training."""

    method: ClassVar[str] = "hass"
    drafter_packages: ClassVar[tuple[str, ...]] = ("eagle2", "hass")


def check_typical_limits(typical_epsilon: Any, typical_delta: Any) -> None:
    """Raise ``ConfigError`` unless both are valid limits of typical acceptance; delta 0 accepts every token."""
    require_number("typical_epsilon", typical_epsilon, 0.0, 1.0)
    require_number("typical_delta", typical_delta, 0.0, 1e6)


def parts_of(options: TreeOptions) -> tuple[TreeOptions, ...]:
    """Return a method's options and, for a union, those of its sources."""
    return (options, *getattr(options, "sources", ()))


def model_drafter(options: TreeOptions) -> TreeOptions | None:
    """Return the options of the drafter with weights: the method itself or one of a union's sources."""
    return next((part for part in parts_of(options) if find_method(part.method).model is not None), None)


def with_drafter(options: TreeOptions, resolved: TreeOptions) -> TreeOptions:
    """Return options with ``resolved`` in the place of the drafter with weights."""
    drafter = model_drafter(options)
    if options is drafter:
        return resolved
    _, *sources = parts_of(options)
    changes: dict[str, Any] = {"sources": tuple(resolved if part is drafter else part for part in sources)}
    return replace(options, **changes)


def is_our_method(method: Any) -> bool:
    """Return whether a speculative-config ``method`` is registered with this plugin."""
    return isinstance(method, str) and method in method_names()


def parse_options(config: Mapping[str, Any]) -> TreeOptions:
    """Validate a speculative-config dictionary of one of our methods.

    Raises:
        ConfigError: unknown method or key, missing key, or a value of the wrong type or range.
    """
    given = dict(config)
    method = given.pop("method", None)
    if not is_our_method(method):
        raise unknown_method(method)
    options = find_method(method).options
    valid = [field.name for field in fields(options)]
    if unknown := sorted(set(given) - set(valid)):
        if removed := [key for key in unknown if key in REMOVED.get(method, {})]:
            raise ConfigError(_removed(method, removed))
        meant = [match for key in unknown if (match := nearest(key, valid))]
        raise ConfigError(
            f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} "
            f"for method {method!r}{_did_you_mean(meant)}; valid keys: method, {', '.join(valid)}"
        )
    required = [f.name for f in fields(options) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in given]:
        hint = ""
        if "model" in missing:
            names = ", ".join(shipped_drafters(method)) or "none shipped"
            hint = f": a drafter's directory, Hugging Face repository or short name ({names})"
        raise ConfigError(f"method {method!r} needs {', '.join(map(repr, missing))}{hint}")
    return options(**{**options.defaults_beside(given), **given})


def _removed(method: str, keys: list[str]) -> str:
    """Return the message for options of earlier versions."""
    instead = "; ".join(f"{key!r} was removed: {REMOVED[method][key]}" for key in keys)
    return f"method {method!r}: {instead}. Leave {'it' if len(keys) == 1 else 'them'} out"


def unknown_method(method: Any) -> ConfigError:
    """Return the error for a method that does not exist."""
    meant = nearest(method, method_names())
    return ConfigError(
        f"method={method!r} is unknown{_did_you_mean([meant] if meant else [])}; vllm-specplug serves: "
        f"{', '.join(method_names())}, beside vLLM's own methods"
    )


def nearest(word: Any, valid: Iterable[str]) -> str | None:
    """Return the valid word that ``word`` looks like, or None."""
    return next(iter(get_close_matches(str(word).lower(), list(valid), n=1, cutoff=0.7)), None)


def _did_you_mean(words: list[str]) -> str:
    return f" (did you mean {', '.join(map(repr, words))}?)" if words else ""


def shipped_drafters(method: str = "eagle2") -> dict[str, Path]:
    """Return the drafters in this package that the method can serve: short name and directory."""
    found: dict[str, Path] = {}
    for package in getattr(find_method(method).options, "drafter_packages", ()):
        spec = find_spec(f"vllm_specplug.proposers.{package}")
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent / "checkpoints"
            found |= {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}
    return found


def resolve_drafter(model: str, method: str = "eagle2") -> Path:
    """Return the directory of a drafter given by directory, short name or Hugging Face repository.

    Raises:
        ConfigError: nothing of that name was found.
    """
    shipped = shipped_drafters(method)
    if model in shipped:
        return shipped[model]
    path = Path(model).expanduser()
    if path.is_dir():
        return _checkpoint_of(path)
    names = ", ".join(shipped) or "none"
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(
            f"drafter {model!r} does not exist: give a directory with config.json and weights, a Hugging Face "
            f"repository (owner/name), or a shipped drafter ({names})"
        )
    return _download(model, names)


def _checkpoint_of(folder: Path) -> Path:
    """Return the checkpoint in a folder: of one that `specplug learn` publishes in, the current version's."""
    try:
        return current_folder(folder)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _download(repository: str, shipped: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.bin", "medusa_lm_head.pt"]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub has its own error classes beside HTTP errors
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"drafter {repository!r} is neither a directory nor a shipped drafter ({shipped}), and could not be "
            f"fetched from the Hugging Face hub ({type(error).__name__}: {reason}): check its name, the network and "
            f"HF_TOKEN, or download it elsewhere (hf download {repository} --local-dir DIR) and give DIR"
        ) from error


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise ``ConfigError`` unless ``value`` is an int from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: choose {low} to {high}")


def require_bool(name: str, value: Any) -> None:
    """Raise ``ConfigError`` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")


def require_optional_bool(name: str, value: Any) -> None:
    """Raise ``ConfigError`` unless ``value`` is true, false or None."""
    if value is not None:
        require_bool(name, value)


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is a number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number from {low} to {high}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: choose {low} to {high}")


def require_string(name: str, value: Any) -> None:
    """Raise ``ConfigError`` unless ``value`` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a non-empty string, not {value!r}")
