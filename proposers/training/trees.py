"""Trees on the target's own greedy answers, offline: tau of EAGLE-2's choice of nodes and of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..eagle2.head import EagleHead, rotary_table
from .features import FeatureSet
from .loop import Batch, make_batch


@dataclass(frozen=True)
class Drafted:
    """A node of the pool of drafted nodes."""

    value: float  # log-probability of the path from the root
    confidence: float  # log-probability of this token after its parent
    parent: int  # pool index; -1: the root
    token: int
    ranks: tuple[int, ...]  # the rank of each node on the path among its siblings


#: (level, tokens of the nodes to extend, their parents' rows in the features before, those features [parents, h]) ->
#: features [nodes, h], from which the nodes' children are scored.
Extend = Callable[[int, list[int], list[int], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TreePolicy:
    """Choice of the nodes that are fed to the drafter, and of those that are verified.

    `feed(pool, first)` returns pool indices of the newest level, which starts at `first`. `keep(pool)` returns pool
    indices of any level; a kept node's parent is kept too.
    """

    feed: Callable[[list[Drafted], int], list[int]]
    keep: Callable[[list[Drafted]], list[int]]


def eagle2_policy(nodes: int, beam: int) -> TreePolicy:
    """Feed the best `beam` nodes of each level, keep the best `nodes` of all levels, by value (EAGLE-2, section 4)."""

    # sorted() is stable: of equal values the lower pool index comes first, so a parent comes before its child.
    def best(pool: list[Drafted], count: int, first: int = 0) -> list[int]:
        return sorted(range(first, len(pool)), key=lambda n: -pool[n].value)[:count]

    return TreePolicy(lambda pool, first: best(pool, beam, first), lambda pool: best(pool, nodes))


@torch.no_grad()
def tree_tau(
    head: EagleHead,
    data: FeatureSet,
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    ids: torch.Tensor,
    nodes: int = 16,
    depth: int = 4,
    beam: int = 6,
    policy: TreePolicy | None = None,
) -> list[tuple[int, int]]:
    """(tokens, cycles) of each sequence with EAGLE-2 trees of `nodes` nodes; tau is tokens / cycles.

    Each fed node gets `beam` children. `policy` replaces EAGLE-2's choice of the nodes to feed and to keep.
    """
    decoder = _TreeDecoder(head, embedding, lm_head, ids, depth, beam, policy or eagle2_policy(nodes, beam))
    return [decoder.decode(data, i) for i in range(len(data))]


@dataclass(frozen=True)
class _TreeDecoder:
    """Decodes known answers with trees; arguments as in `tree_tau`."""

    head: EagleHead
    embedding: torch.Tensor
    lm_head: torch.Tensor
    ids: torch.Tensor
    depth: int
    beam: int
    policy: TreePolicy

    def decode(self, data: FeatureSet, i: int) -> tuple[int, int]:
        """(tokens, cycles) of answer `i`."""
        batch = make_batch(data, [i], dtype=self.lm_head.dtype)
        grow = self._reader(batch)
        rows = batch.next_ids.shape[1]
        start = int(data.prompt_lengths[i]) - 1
        tokens = cycles = 0
        while start < rows:
            tree = grow(start)
            accepted, node = 0, -1
            while start + accepted < rows:
                truth = int(batch.label_ids[0, start + accepted])
                node = next((n for n, (parent, token) in tree.items() if parent == node and token == truth), None)
                if node is None:
                    break
                accepted += 1
            tokens += accepted + 1
            cycles += 1
            start += accepted + 1
        return tokens, cycles

    def _reader(self, batch: Batch) -> Callable[[int], dict[int, tuple[int, int]]]:
        """Read the answer of a batch of one; the returned function drafts the tree whose root is a given row."""
        layer = self.head.layers[0]
        rows = batch.next_ids.shape[1]
        cos, sin = rotary_table(self.head.config, torch.arange(rows + self.depth))
        x = self._inputs(batch.next_ids, batch.features)
        query, key, value = layer.self_attn.project(x, cos[:rows], sin[:rows])
        output = layer.finish(x, scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))[0]

        def grow(start: int) -> dict[int, tuple[int, int]]:
            context = (key[:, :, : start + 1], value[:, :, : start + 1])
            return self._grow(output[start], _Levels(self, context, (cos[start + 1 :], sin[start + 1 :])))

        return grow

    def _inputs(self, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.head.combine(self.embedding[token_ids].to(self.lm_head.dtype), features)

    def _grow(self, feature: torch.Tensor, extend: Extend) -> dict[int, tuple[int, int]]:
        """Draft a tree: {pool index: (parent's pool index, token)} of the kept nodes; -1 is the root.

        feature: [h], the root's output.
        """
        pool: list[Drafted] = []
        fed, features = [-1], feature[None]
        for level in range(self.depth):
            first = len(pool)
            self._add_children(pool, fed, features)
            chosen = self.policy.feed(pool, first) if level < self.depth - 1 else []
            if not chosen:
                break
            rows = [fed.index(pool[node].parent) for node in chosen]
            fed = chosen
            features = extend(level, [pool[node].token for node in fed], rows, features)
        return {n: (pool[n].parent, pool[n].token) for n in sorted(self.policy.keep(pool))}

    def _add_children(self, pool: list[Drafted], fed: list[int], features: torch.Tensor) -> None:
        """Append the `beam` best children of each fed node, whose output is `features` [len(fed), h]."""
        best, draft = (features @ self.lm_head.T).float().log_softmax(-1).topk(self.beam)
        for row, parent in enumerate(fed):
            value, ranks = (pool[parent].value, pool[parent].ranks) if parent >= 0 else (0.0, ())
            children = zip(best[row].tolist(), self.ids[draft[row]].tolist(), strict=True)
            for rank, (log_prob, token) in enumerate(children):
                pool.append(Drafted(value + log_prob, log_prob, parent, token, (*ranks, rank)))


class _Levels:
    """The forwards of an EAGLE head over the nodes of a tree, one level after the other.

    context: keys and values [1, G, rows, D] of the rows before the tree. rotary: cos and sin [levels or more, D] of the
    positions after the root.
    """

    def __init__(self, decoder: _TreeDecoder, context: tuple, rotary: tuple):
        self.decoder, self.rotary = decoder, rotary
        self.keys, self.values = context
        self.context_rows = self.keys.shape[2]
        self.paths: list[list[int]] = [[]]  # for each fed node, the key rows of its path from the root

    def __call__(self, level: int, tokens: list[int], rows: list[int], features: torch.Tensor) -> torch.Tensor:
        layer = self.decoder.head.layers[0]
        x = self.decoder._inputs(tokens, features[rows])[None]
        query, key, value = layer.self_attn.project(x, *(table[level : level + 1] for table in self.rotary))
        offset = self.keys.shape[2]
        self.keys, self.values = torch.cat([self.keys, key], dim=2), torch.cat([self.values, value], dim=2)
        self.paths = [self.paths[row] + [offset + i] for i, row in enumerate(rows)]
        mask = torch.zeros(len(tokens), self.keys.shape[2], dtype=torch.bool)
        mask[:, : self.context_rows] = True
        for i, path in enumerate(self.paths):
            mask[i, path] = True
        attended = scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=mask[None, None], enable_gqa=True
        )
        return layer.finish(x, attended)[0]
