"""Interface of a drafter with weights on the V1 runner.  An adapter overrides what concerns it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from vllm_specplug.budget.choose import EVERYTHING, Plan, StepRecord
from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.drafters.catch_up import MissedRows
from vllm_specplug.proposer import find_method
from vllm_specplug.types import Draft
from vllm_specplug.utils.lazy import load

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import AcceptedRows


class NewVersion(Protocol):
    """Another version of a drafter's weights, read and checked."""

    def prepare(self) -> None:
        """Bring the weights into the form that is computed with; called between two steps, once.

        Raises:
            CheckpointError: they cannot be used.
        """

    def exchange(self) -> None:
        """Exchange these weights and those in use, between two steps; a second call brings the old ones back."""


class DraftHooks:
    """Called around every draft phase: follow, before_draft, catch_up, propose or skip_draft, after_draft.

    Attributes:
        grows_by_level: whether further levels are drafted one by one, so that a budget can stop the growth.
        draft_layers: attention layers of a draft model, by name.
        shortest_draft: of a drafter that drafts no longer than ``limits.seconds``, the share of a plain step that its
            shortest draft takes; None of others.
        operator: function that runs the draft phase in place of vLLM's ``propose``; None: vLLM's runs.
        before_draft: method ``(wanted, hidden_states)`` that prepares to draft; None: nothing is to be prepared.
            ``wanted`` is bool ``[num_reqs]``, false for requests that take no draft.  ``hidden_states`` are the
            target's, ``[num_flat_rows, hidden_size]``.
        after_draft: method ``(step_began)`` that works after the drafts of a step; None: there is no such work.
            ``step_began`` is in seconds of ``time.perf_counter``.
        missed: rows of the target that the drafter has not read; always none for a drafter without a KV cache.
        plan: the rows to read next, from the last step.
        limits: how far the draft phase that runs may go.
        record: of the step; the drafter adds the times of its forwards.
    """

    grows_by_level: ClassVar[bool] = False
    shortest_draft: float | None = None
    draft_layers: dict[str, Any] = {}
    operator: Any = None
    before_draft: Any = None
    after_draft: Any = None
    missed = MissedRows(0)
    plan: StepPlan
    limits: Plan = EVERYTHING
    record = StepRecord()

    def follow(self, plan: StepPlan) -> None:
        """Keep the accepted rows of the step.  A plain step's plan has one row for each request."""
        self.plan = plan

    def catch_up(self) -> None:
        """Read the rows that were missed while drafting paused."""

    def skip_draft(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        accepted: AcceptedRows,
    ) -> None:
        """Take notice of a step after which the drafter does not run.

        Args:
            hidden_states: ``[num_flat_rows, hidden_size]`` of the step.
            aux_hidden_states: the same of further layers, for EAGLE-3.
            accepted: the step's rows of accepted tokens.
        """

    def version_check(self, folder: str) -> Any:
        """Return the check of other versions of the checkpoint in ``folder``, which is in use; see ``new_version``."""
        raise NotImplementedError(f"{type(self).__name__} cannot take other weights while it serves")

    def new_version(self, folder: Path, check: Any) -> Any:
        """Read and check another version beside the steps; return a ``NewVersion``.

        Raises:
            CheckpointError, OSError: it cannot take the place of the version in use.
        """
        raise NotImplementedError

    def run_forward(self, num_rows: int, is_first: bool) -> None:
        """Run a forward over rows of one request, to time it: the first one of a draft phase, or a further level."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""


class V1Drafter(DraftHooks):
    """A drafter that is no draft model of vLLM: it has no KV cache.  As it is, it drafts nothing.

    Args:
        vllm_config: vLLM's configuration.
        device, runner: the runner's; vLLM's own loader of ``custom_class`` drafters passes neither.
    """

    def __init__(self, vllm_config: Any, device: torch.device | None = None, runner: Any = None):
        self.vllm_config, self.device, self.runner = vllm_config, device, runner
        self.options: TreeOptions | None = model_drafter(vllm_config.speculative_config.specplug)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load weights beside the target."""

    def propose(self, *_: Any, **__: Any) -> Draft | None:
        """Draft one tree per request; the arguments are vLLM's for ``custom_class`` drafters."""
        return None


def make_v1_drafter(vllm_config: Any, device: torch.device, runner: Any) -> DraftHooks:
    """Make the V1 adapter that the configured method names."""
    options = model_drafter(vllm_config.speculative_config.specplug)
    adapter = V1Drafter if options is None else load(find_method(options.method).model.v1)
    return adapter(vllm_config, device, runner)
