"""A proposer that is told the answers: trees of right tokens, each behind a wrong sibling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.tree import static_tree
from vllm_specplug.proposer import DraftContext, Method
from vllm_specplug.types import TokenTree

#: A wrong and a right child of the root, a wrong and a right child of the right one, and so on.
DEPTH = 5
PARENTS = tuple(max(0, 2 * level) for level in range(DEPTH) for _ in range(2))

#: Prompts with their answers.
ANSWERS: list[list[int]] = []


@dataclass(frozen=True, kw_only=True)
class KnowingOptions(TreeOptions):
    method: ClassVar[str] = "knowing"

    num_speculative_tokens: int = 2 * DEPTH


class Knowing:
    """Every third draft is wrong from its third level on."""

    def __init__(self, options: KnowingOptions):
        self._drafts = 0

    def propose(self, context: DraftContext) -> TokenTree:
        nodes = []
        for tokens, count in zip(context.token_ids.tolist(), context.num_tokens.tolist(), strict=True):
            self._drafts += 1
            known = next((answer[count:] for answer in ANSWERS if answer[:count] == tokens[:count]), [])
            right = (known + [0] * DEPTH)[:DEPTH]
            if self._drafts % 3 == 0:
                right[2:] = [token ^ 1 for token in right[2:]]
            nodes.append([token for one in right for token in (one ^ 2, one)])
        return static_tree(context.root_token_ids, torch.tensor(nodes), PARENTS)


KNOWING = Method("knowing", KnowingOptions, make=Knowing)
