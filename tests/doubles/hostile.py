"""Proposers that do all they can do wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.tree import static_tree
from vllm_specplug.proposer import DraftContext, Method
from vllm_specplug.types import TokenTree

PARENTS = (0, 0, 1, 1, 2, 2)


def _tree(context: DraftContext, tokens: list[int], parents: tuple[int, ...] = PARENTS) -> TokenTree:
    count = len(context.request_ids)
    return static_tree(context.root_token_ids, torch.tensor([tokens] * count).view(count, len(tokens)), parents)


class Wrong:
    """Certain of tokens that never come."""

    def propose(self, context: DraftContext):
        from vllm_specplug.types import Draft

        tree = _tree(context, [3, 4, 3, 4, 3, 4])
        return Draft(tree, torch.zeros(tree.token_ids.shape))


class Twice:
    """Every child twice."""

    def propose(self, context: DraftContext):
        tree = _tree(context, [5, 5, 6, 6, 6, 6])
        tree.token_ids[:, 1:3] = context.token_ids[:, :1]
        return tree


class Nothing:
    def propose(self, context: DraftContext):
        return _tree(context, [], ())


class Raising:
    def propose(self, context: DraftContext):
        raise LookupError("no drafts today")

    def finish(self, request_ids):
        raise LookupError("nor an end")


class Garbage:
    def propose(self, context: DraftContext):
        return _tree(context, [1 << 40, -7, 3, 4, 5, 6])


class Misshapen:
    """Of all requests but one, or parents below their children, or no tree at all."""

    calls = 0

    def propose(self, context: DraftContext):
        self.calls += 1
        tree = _tree(context, [3, 4, 5, 6, 7, 8])
        if self.calls % 3 == 0:
            return None
        if self.calls % 3 == 1:
            return TokenTree(tree.token_ids[1:], tree.parents[1:], tree.depths[1:], tree.num_rows[1:])
        return TokenTree(tree.token_ids, tree.parents + 5, tree.depths, tree.num_rows)


def _method(kind: type) -> Method:
    name = kind.__name__.lower()
    options = dataclass(frozen=True, kw_only=True)(type(f"{kind.__name__}Options", (TreeOptions,), {"method": name}))
    options.__module__ = __name__
    globals()[options.__name__] = options  # options travel to other processes by name
    return Method(name, options, make=lambda _options: kind())


WRONG, TWICE, NOTHING, RAISING, GARBAGE, MISSHAPEN = map(_method, (Wrong, Twice, Nothing, Raising, Garbage, Misshapen))
