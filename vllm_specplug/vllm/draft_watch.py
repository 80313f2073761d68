"""Watches whether drafts help: a gauge for ``/metrics``, and one warning about a drafter with weights that never helps.

A draft helps if the target accepts its first token.  A head that fits is right in at least one of ten drafts, on any
text.  A head of another target, or one that reads the wrong layers, is right by accident: in about one of a hundred.
With 300 drafts the limit of 2% is more than four standard deviations away from one of ten.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.proposer import find_method
from vllm_specplug.utils.metrics import Counters

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import ServedStep

logger = logging.getLogger("vllm_specplug")

#: Drafts from which on a drafter is judged, and the share of helpful drafts below which it is useless.
JUDGED_DRAFTS, USELESS_SHARE = 300, 0.02
#: Older drafts count half after so many.
WINDOW = 1000


class Share:
    """The share of recent drafts that helped.

    Attributes:
        drafts, helpful: about the last 500 to 1000, and those of them that helped.
    """

    def __init__(self) -> None:
        self.drafts = self.helpful = 0.0

    def add(self, drafts: int, helpful: int) -> None:
        """Add drafts."""
        if self.drafts >= WINDOW:
            self.drafts, self.helpful = self.drafts / 2, self.helpful / 2
        self.drafts, self.helpful = self.drafts + drafts, self.helpful + helpful


class DraftWatch:
    """Counts drafts, and judges the drafter with weights.

    Args:
        options: of the method.
        config_entries: see ``DrafterConfig``; they name the layers that a drafter reads.
        counters: for the gauge.

    Attributes:
        method: of the drafter with weights; None: there is none, and nothing is judged.
        is_union: whether other drafters draft beside it.
        all, judged: all drafts; those of the drafter with weights.
    """

    def __init__(self, options: TreeOptions, config_entries: Mapping[str, Any] | None, counters: Counters):
        drafter = model_drafter(options)
        self._model = getattr(drafter, "model", None)  # None: the target drafts itself, or by its MTP layers
        has_layers = drafter is not None and find_method(drafter.method).model.is_vllm_model
        self.method = drafter.method if self._model is not None or has_layers else None
        self._layers = (config_entries or {}).get("eagle_aux_hidden_state_layer_ids")
        self.is_union = drafter is not None and drafter is not options
        self._counters, self._warned = counters, False
        self.all, self.judged = Share(), Share()

    def add(self, drafts: int, helpful: int) -> None:
        """Add drafts of a step."""
        if drafts:
            self.all.add(drafts, helpful)
            self._counters.set_recent(self.all.drafts, self.all.helpful)

    def judge(self, drafts: int, helpful: int) -> None:
        """Add drafts of the drafter with weights, and warn once if they do not help."""
        if self._warned or self.method is None:
            return
        self.judged.add(drafts, helpful)
        known = self.judged
        if known.drafts < JUDGED_DRAFTS or known.helpful >= USELESS_SHARE * known.drafts:
            return
        self._warned = True
        if self._model is None:
            logger.warning(
                "vllm-specplug: the target's MTP layers do not help: the first token of their drafts was accepted in "
                "%d of %d drafts. Likely cause: their weights are missing in the checkpoint, or are of another version "
                "of the model. Use another checkpoint, a drafter, or the method lookup",
                *(known.helpful, known.drafts),
            )
            return
        layers = "" if self._layers is None else f" (it reads {self._layers})"
        logger.warning(
            "vllm-specplug: the drafter %s does not help: the first token of its drafts was accepted in %d of %d "
            "drafts. Likely causes: it was trained for another model, or for another version of this one; it reads "
            "other layers of the target than in training%s; the prompts have another chat template than its training "
            "data. `specplug inspect %s` shows what it was trained for. Use another drafter, or the method lookup",
            self._model,
            known.helpful,
            known.drafts,
            layers,
            self._model,
        )


class StepWatch(DraftWatch):
    """Watches on the V1 runner, from the record of each step: of a union, the drafts of its drafter with weights."""

    def __call__(self, step: ServedStep) -> None:
        if step.tree is None:
            return
        emitted = step.walk.num_emitted.numpy()
        verified = (step.tree.num_rows.numpy() > 1) & (emitted > 0)
        helpful = verified & (emitted > 1)
        self.add(int(verified.sum()), int(helpful.sum()))
        if not self.is_union:
            self.judge(int(verified.sum()), int(helpful.sum()))
        elif self.method is not None:
            self._judge_source(step, verified, helpful)

    def _judge_source(self, step: ServedStep, verified: np.ndarray, helpful: np.ndarray) -> None:
        """Judge the trees to whose first level the drafter added a node."""
        drafts = accepted = 0
        for place in np.flatnonzero(verified).tolist():
            tokens = step.tree.token_ids[place, 1 : int(step.tree.num_rows[place])].tolist()
            draft = step.drafts.get(step.req_ids[place])
            if draft is None or draft.token_ids[: len(tokens)] != tokens:  # a grammar has left out nodes
                continue
            own = [self.method in names for names in draft.sources]
            if any(is_own and parent == 0 for is_own, parent in zip(own, draft.parents, strict=False)):
                drafts += 1
                accepted += bool(helpful[place]) and own[int(step.walk.path_rows[place, 1]) - 1]
        self.judge(drafts, accepted)


class WatchedDrafts:
    """Mixed into a scheduler of vLLM: watches on the V2 runner, from the tokens that arrive there one step late."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config, parallel = self.vllm_config.speculative_config, self.vllm_config.parallel_config
        counters = Counters(config.metrics_file, parallel.data_parallel_index)
        self.draft_watch = DraftWatch(config.specplug, config.draft_entries, counters)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        tokens, places = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafted = [places[req_id] for req_id, nodes in scheduled.items() if nodes and req_id in places]
        emitted = [count for place in drafted if tokens and (count := len(tokens[place]))]
        helpful = sum(count > 1 for count in emitted)
        self.draft_watch.add(len(emitted), helpful)
        self.draft_watch.judge(len(emitted), helpful)
        return super().update_from_output(scheduler_output, model_runner_output)
