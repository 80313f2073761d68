"""A third party's proposer: guesses that history repeats itself, and is wrong on purpose beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.tree import static_tree
from vllm_specplug.proposer import DraftContext, Method
from vllm_specplug.types import TokenTree

#: Two chains of three behind the root: the repetition, and a wrong guess.
PARENTS = (0, 0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class ParrotOptions(TreeOptions):
    method: ClassVar[str] = "parrot"

    num_speculative_tokens: int = 6
    wrong_token_id: int = 3


class Parrot:
    def __init__(self, options: ParrotOptions):
        self.options = options

    def propose(self, context: DraftContext) -> TokenTree:
        nodes = []
        for tokens, count in zip(context.token_ids.tolist(), context.num_tokens.tolist(), strict=True):
            history = tokens[:count]
            root = history[-1]
            places = [i for i in range(count - 1) if history[i] == root]
            after = history[places[-1] + 1 : places[-1] + 4] if places else []
            after += [root] * (3 - len(after))
            wrong = self.options.wrong_token_id
            nodes.append([after[0], wrong, after[1], wrong, after[2], wrong])
        return static_tree(context.root_token_ids, torch.tensor(nodes), PARENTS)


PARROT = Method("parrot", ParrotOptions, make=Parrot)
