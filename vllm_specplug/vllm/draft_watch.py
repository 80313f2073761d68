"""Watches whether drafts help: a gauge for ``/metrics``, and one warning about a drafter with weights that never helps.

A draft helps if the target accepts its first token.  A head that fits is right in at least one of ten drafts, on any
text.  A head of another target, or one that reads the wrong layers, is right by accident: in about one of a hundred.
With 300 drafts the limit of 2% is more than four standard deviations away from one of ten.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.proposer import find_method
from vllm_specplug.utils.metrics import Counters

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
