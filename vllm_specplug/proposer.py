"""The contract of a draft method: its inputs, its results, and how it is found.

A distribution adds a method with one folder and one entry point of the group ``vllm_specplug.proposers``.  The entry's
name is the ``method`` that users write, its value a :class:`Method`::

    [project.entry-points."vllm_specplug.proposers"]
    parrot = "my_package:PARROT"

    PARROT = Method("parrot", ParrotOptions, make=ParrotProposer)

There are three kinds of drafters.  A method is one of them; a union combines several.

1. **Model-free** (lookup): a :class:`Proposer` reads the tokens of each request and returns a tree.  ``Method.make``
   makes it for the V1 runner.  ``Method.make_on_device`` makes its :class:`DeviceProposer` for the V2 runner, where
   tokens and trees stay on the device.
2. **Heads on the target's hidden states** (Medusa): a :class:`Heads` class loads weights and drafts from the hidden
   state of each request's last token.  ``ModelDrafter.heads`` names it; it runs on both runners.
3. **A drafter with its own adapters** (EAGLE, SWIFT): classes that subclass parts of vLLM, named by
   ``ModelDrafter.v1`` and ``ModelDrafter.v2``.  They implement ``cpu/drafters/base.py: V1Drafter`` and
   ``gpu/drafters/base.py: TreeSpeculator``.

Adapters are named as ``"module:Class"`` strings, so that reading a method imports no vLLM.  Whatever a drafter returns,
the output stays the target's: drafts are checked, and a drafter that fails costs speed only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from vllm_specplug.types import PADDING, Draft, TokenTree

GROUP = "vllm_specplug.proposers"


# ---- 1. model-free drafters


@dataclass(frozen=True)
class DraftContext:
    """Input of a model-free proposer.

    A proposer needs no report of what became of its draft.  The tokens that a request has gained since the last call
    are those that the target chose after that draft.  A request may be missing for some calls (preempted, or not
    scheduled).

    Attributes:
        root_token_ids: int64 ``[num_reqs]``; the last emitted token of each request.
        token_ids: int32 ``[num_reqs, max_model_len]``; prompt and output of each request, the root included.  The
            memory is vLLM's and valid during the call only.
        num_tokens: int64 ``[num_reqs]``; valid entries of ``token_ids``.
        prompt_lens: int64 ``[num_reqs]``; tokens before the answer.  The model has generated those after them.  In a
            session with streamed input the answer is that of the last turn.
        namespaces: int64 ``[num_reqs]``; only requests of equal namespaces (equal ``cache_salt`` and LoRA adapter) may
            get drafts from each other's answers.  Prompts must never reach another request.
        request_ids: id of each request.  It does not change during the request's life; its batch index may.
        wanted: bool ``[num_reqs]``; false for requests whose draft is not used (in the middle of a chunked prefill): a
            root alone is enough.
        vocab_size: the target's; drafted ids are from 0 to ``vocab_size - 1``.
        draft_by_model: runs the method's drafter with weights (EAGLE, Medusa).  Its argument, float ``[num_reqs]``, is
            the number of tokens that the other drafts are expected to add.  It returns the checked draft, or None if
            that drafter is not worth its time or has failed.  None without such a drafter.
    """

    root_token_ids: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    prompt_lens: torch.Tensor
    namespaces: torch.Tensor
    request_ids: tuple[str, ...]
    wanted: torch.Tensor
    vocab_size: int
    draft_by_model: Callable[[torch.Tensor], Draft | None] | None = None


class Proposer(Protocol):
    """Drafts one tree per request from its tokens."""

    def propose(self, context: DraftContext) -> TokenTree | Draft:
        """Return trees of at most ``num_speculative_tokens + 1`` rows.  Row 0 is the root; a root alone is no draft."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps state for each request."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended (or were aborted).  Their ids may come again for other requests."""
        ...


@dataclass(frozen=True)
class DeviceDraftContext:
    """Input of a model-free proposer on the V2 runner.  All tensors are on the device.

    Attributes:
        root_token_ids: int64 ``[num_reqs]``; the last emitted token of each request.
        slots: int ``[num_reqs]``; place of each request in ``token_ids`` and ``num_tokens``.
        token_ids: int32 ``[max_num_reqs, max_model_len]``; prompt and output of each request.
        num_tokens: int32 ``[max_num_reqs]``; valid entries of ``token_ids``.
        namespaces: int64 ``[max_num_reqs]``; as of ``DraftContext``, by slot.
        draft_by_model: runs the method's drafter with weights.
    """

    root_token_ids: torch.Tensor
    slots: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    namespaces: torch.Tensor
    draft_by_model: Callable[[], Draft]


class DeviceProposer(Protocol):
    """Drafts on the device with tensors of fixed shapes; it must not read values back (no ``.item()``, ``.cpu()``)."""

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Return trees of ``num_speculative_tokens + 1`` rows, at most ``options.draft_depth`` deep."""
        ...


@dataclass(frozen=True)
class LateOutcome:
    """Tokens that the target emitted after some drafts.

    Attributes:
        requests: int64 ``[n]``; rows of the draft.
        token_ids: int32 ``[batch_size, width]``; emitted tokens of the step that verified it.
        token_rows: int64 ``[n]``; each request's row in ``token_ids``.
        num_tokens: int64 ``[n]``; valid entries of that row.
    """

    requests: np.ndarray
    token_ids: np.ndarray
    token_rows: np.ndarray
    num_tokens: np.ndarray

    def arguments(self) -> tuple[np.ndarray, ...]:
        """Return ``requests``, and the arguments of ``core.outcomes.find_outcomes`` after ``first_nodes``."""
        return self.requests, self.token_ids, self.token_rows, np.zeros_like(self.num_tokens), self.num_tokens


@runtime_checkable
class DeviceLearner(Protocol):
    """A device proposer that learns which of its nodes are accepted, some steps after it drafted them.

    It learns on the CPU, from copies that nothing waited for.  What it has learned is in tables.  The runner copies
    them to the device between two draft phases.
    """

    def drafted(self) -> tuple[torch.Tensor, ...]:
        """Return the arrays of the last draft that learning needs, on the device; empty before the first draft.

        Each is ``[>= num_reqs, ...]``, in the order of its requests.  The addresses do not change.
        """
        ...

    def learn(self, drafted: Sequence[torch.Tensor], outcome: LateOutcome) -> None:
        """Learn from a draft: ``drafted`` holds rows of ``drafted()``, copied to CPU memory."""
        ...

    def tables(self) -> list[tuple[np.ndarray, torch.Tensor]]:
        """Return the learned arrays, and for each the tensor on the device that drafting reads."""
        ...


class EndedRequest(NamedTuple):
    """A request, or a turn of a session, that has ended.

    Attributes:
        token_ids, num_tokens, namespaces: as of ``DeviceDraftContext``.
        slot: place of the request in them.
        prompt_len: number of tokens before its answer, as of ``DraftContext``.
        end: number of tokens up to the end of its answer; ``num_tokens`` may count some after a stop.
    """

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    namespaces: torch.Tensor
    slot: int
    prompt_len: int
    end: int


@runtime_checkable
class DeviceRemembering(Protocol):
    """A device proposer that keeps tokens of ended requests."""

    def finish(self, ended: EndedRequest) -> None:
        """Keep the tokens that it needs of a request that has ended, on the device and without waiting."""
        ...


# ---- 2. and 3. drafters with weights


@dataclass(frozen=True)
class TargetInfo:
    """Facts about the target, known before it is loaded.

    Attributes:
        hidden_size, vocab_size, num_layers: of the target model.
        dtype: of its weights.
        has_mtp_layers: whether `mtp_tree` can draft with it; known where a method is chosen.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    has_mtp_layers: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """The result of ``ModelDrafter.configure``.

    Attributes:
        options: the method's options, completed from the checkpoint.
        vllm_method: the method under which vLLM loads and schedules the drafter; ``custom_class`` if it loads none.
        model: directory of the draft model that vLLM loads; None if it loads none.
        supports_int8: whether the adapters implement the option ``draft_int8``.
        config_entries: entries of the draft model's config that vLLM reads in place of the file's.
    """

    options: Any
    vllm_method: str = "custom_class"
    model: str | None = None
    supports_int8: bool = False
    config_entries: dict[str, Any] = field(default_factory=dict)


class Heads(Protocol):
    """Draft heads on the target's last hidden states.  They keep no state between steps.

    Attributes:
        num_levels: depth of the deepest tree.
    """

    num_levels: int

    def __init__(self, options: Any, target: TargetInfo):
        """Make the heads; weights are read in ``load``."""

    def load(self, target_model: torch.nn.Module) -> None:
        """Read the weights.  ``target_model`` is vLLM's loaded model: its embedding and LM head may be shared."""

    def draft(
        self, root_token_ids: torch.Tensor, hidden: torch.Tensor, sampling: Any = None, min_node_value: float = 0.0
    ) -> Draft:
        """Draft one tree per request without reading values back from a device.

        Args:
            root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
            hidden: ``[num_reqs, hidden_size]``; the target's hidden state that each root was sampled from.
            sampling: a ``core.draft_sampling.DraftSampling``, or None to take the likeliest tokens.
            min_node_value: nodes of a lower estimated acceptance probability may be left out.
        """


_HEADS_V1 = "vllm_specplug.cpu.drafters.heads:HeadsDrafter"
_HEADS_V2 = "vllm_specplug.gpu.drafters.heads:HeadsSpeculator"


@dataclass(frozen=True)
class ModelDrafter:
    """A drafter with weights: how it is checked against the target, and the adapters that run it.

    Attributes:
        configure: checks the options and the checkpoint against the target.  Raises ``ConfigError`` or
            ``CheckpointError`` with the fix in the message.
        heads: ``"module:Class"`` of the :class:`Heads` that the standard adapters run.
        v1: ``"module:Class"``, or a function, that makes the adapter for the V1 runner, called with
            ``(vllm_config, device, runner)``.
        v2: the same for the V2 runner, called with ``(vllm_config, device, req_states)``; None: not on V2.
        is_vllm_model: whether vLLM loads the drafter as a draft model with a KV cache.
    """

    configure: Callable[[Any, TargetInfo], DrafterConfig]
    heads: str | None = None
    v1: str = _HEADS_V1
    v2: str | None = _HEADS_V2
    is_vllm_model: bool = False


# ---- methods


@dataclass(frozen=True)
class Choice:
    """Configuration that ``auto``, or another method without a drafter of its own, has chosen.

    Attributes:
        config: a configuration of another method.
        why: for people.
        trainer: command line after ``specplug`` of a trainer that runs beside the server; empty: none.
    """

    config: dict[str, Any]
    why: str
    trainer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A draft method.

    Attributes:
        name: the ``method`` of the speculative config.
        options: frozen dataclass of its options, with the fields of ``config.TreeOptions``.
        make: makes the model-free proposer from its options; None if the method only has a drafter with weights.  It is
            called more than once at start: some of these proposers are only timed.
        make_on_device: makes the proposer for the V2 runner; None: not on V2.
        model: the drafter with weights; None for a model-free method.
        choose: of a method that stands for others' configurations: called with its options, the target, the target's
            name, and whether it runs on a CPU.
    """

    name: str
    options: type[Any]
    make: Callable[[Any], Proposer] | None = None
    make_on_device: Callable[[Any], DeviceProposer] | None = None
    model: ModelDrafter | None = None
    choose: Callable[[Any, TargetInfo, str, bool], Choice] | None = None

    @property
    def runs_on_v2(self) -> bool:
        return self.make_on_device is not None or (self.model is not None and self.model.v2 is not None)


def as_draft(proposed: TokenTree | Draft) -> Draft:
    """Return a draft with values.  For a tree without values, every edge counts as accepted with probability 1/2."""
    if isinstance(proposed, Draft):
        return proposed
    depths = proposed.depths.float()
    return Draft(proposed, torch.where(proposed.token_ids == PADDING, float("-inf"), depths * math.log(0.5)))


@cache
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def method_names() -> list[str]:
    """Return the names of all registered methods; none is loaded."""
    return sorted(_registered())


def loadable_methods() -> list[str]:
    """Return the names of the registered methods whose packages can be loaded."""

    def loads(name: str) -> bool:
        try:
            return bool(find_method(name))
        except (ImportError, TypeError):
            return False

    return [name for name in method_names() if loads(name)]


@cache
def find_method(name: str) -> Method:
    """Load a registered method.

    Raises:
        KeyError: no such method.
        ImportError: its package cannot be loaded; the message names the package.
        TypeError: the entry point is not a ``Method`` of that name.
    """
    entry = _registered()[name]
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
    try:
        method = entry.load()
    except Exception as error:  # whatever the package's own code raises
        raise ImportError(
            f"method {name!r} of the installed package {package} cannot be loaded ({type(error).__name__}: {error}): "
            "repair or uninstall that package"
        ) from error
    if not isinstance(method, Method) or method.name != name:
        raise TypeError(
            f"entry point {name!r} of the installed package {package} must be a vllm_specplug.proposer.Method named "
            f"{name!r}, found {method!r}"
        )
    return method
