"""Watches on the V1 runner whether drafts help: of a union, those of its drafter with weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_specplug.vllm.draft_watch import DraftWatch

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import ServedStep


class StepWatch(DraftWatch):
    """Takes the record of each step."""

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
