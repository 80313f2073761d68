"""Another version's weights for an EAGLE drafter that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_specplug.proposers.eagle2.checkpoint import target_ids

if TYPE_CHECKING:
    from vllm_specplug.cpu.drafters.eagle import TreeEagleProposer


class NewEagleVersion:
    """Another version's weights for an EAGLE drafter, see ``base.NewVersion``.

    Args:
        drafter: takes them.
        state: tensors of the checkpoint.
        shared: ids of the target's parameters.
    """

    def __init__(self, drafter: TreeEagleProposer, state: dict[str, torch.Tensor], shared: set[int]):
        from vllm_specplug.cpu.drafters.twin_model import TwinModel  # older versions of vLLM lack what it builds on

        self._drafter = drafter
        self._twin = TwinModel(drafter.model, shared, state)
        self._draft_ids = target_ids(state["d2t"]) if "d2t" in state else None
        self._scorer, self._vocabulary = drafter._scorer, drafter._vocabulary

    def prepare(self) -> None:
        drafter, ids = self._drafter, self._draft_ids
        self._twin.pack()
        if ids is not None and not torch.equal(ids.cpu(), drafter._scorer.draft_ids.cpu()):
            self._scorer = drafter._scorer.over(ids)
            self._vocabulary = drafter.vocabulary_beside(self._scorer)

    def exchange(self) -> None:
        drafter = self._drafter
        self._twin.exchange()
        drafter._scorer, self._scorer = self._scorer, drafter._scorer
        drafter._vocabulary, self._vocabulary = self._vocabulary, drafter._vocabulary
