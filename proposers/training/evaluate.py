"""Offline acceptance of a head on the target's own greedy answers.

A drafted token is accepted at T = 0 iff it is the token the target wrote, and everything before it was accepted too.
So along the answer the drafter's own tokens equal the true ones, and pass j of `EagleHead.aligned` on the true
sequence is exactly draft level j of a draft that started j rows earlier (with stable KV before it).

tau counts the target's own token: plain decoding is 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..eagle2.head import EagleHead, rotary_table
from .features import FeatureSet
from .loop import make_batch


@dataclass(frozen=True)
class Acceptance:
    """alphas[j]: share of accepted tokens at draft level j, given that all levels before were accepted; tau over
    `cycles` verifications."""

    alphas: list[float]
    tau: float
    cycles: int = 0

    def __str__(self) -> str:
        return f"tau {self.tau:.3f}, alpha " + " ".join(f"{alpha:.3f}" for alpha in self.alphas)


@dataclass(frozen=True)
class Drafted:
    """A drafted node. `parent` is a pool index, -1 for the root; `ranks` are the child ranks from the root to it."""

    value: float  # log, from the root
    confidence: float  # log, of this token behind its parent
    parent: int
    token: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TreePolicy:
    """Which nodes of a growing pool are fed to the drafter, and which are verified in the end.

    `feed(pool, first)` gives pool indices from the newest level, which starts at `first`; `keep(pool)` gives any,
    parents included.
    """

    feed: Callable[[list[Drafted], int], list[int]]
    keep: Callable[[list[Drafted]], list[int]]


def eagle2_policy(nodes: int, beam: int) -> TreePolicy:
    """Feed the best `beam` of a level by value, keep the best `nodes` of all (EAGLE-2, section 4)."""

    # sorted() is stable: ties keep the lower pool index, so a parent is never left behind its child
    def best(pool: list[Drafted], count: int, first: int = 0) -> list[int]:
        return sorted(range(first, len(pool)), key=lambda n: -pool[n].value)[:count]

    return TreePolicy(lambda pool, first: best(pool, beam, first), lambda pool: best(pool, nodes))


@torch.no_grad()
def chain_acceptance(
    head: EagleHead, data: FeatureSet, embedding: torch.Tensor, lm_head: torch.Tensor, ids: torch.Tensor, depth: int = 6
) -> Acceptance:
    """Acceptance of greedy chains of `depth` tokens; `ids` [draft_vocab] are the target ids of `lm_head`'s rows."""
    accepted, tried = torch.zeros(depth), torch.zeros(depth)
    tokens = cycles = 0
    for i in range(len(data)):
        hits = _chain_hits(head, data, i, embedding, lm_head, ids, depth)
        first = int(data.prompt_lengths[i]) - 1  # the feature row that gave the answer's first token
        rows = hits.shape[1]
        for start in range(first, rows):
            for level in range(min(depth, rows - start)):
                tried[level] += 1
                if not hits[level, start + level]:
                    break
                accepted[level] += 1
        position = first
        while position < rows:
            run = 0
            while run < depth and position + run < rows and hits[run, position + run]:
                run += 1
            tokens += run + 1
            cycles += 1
            position += run + 1
    return Acceptance((accepted / tried.clamp(min=1)).tolist(), tokens / max(cycles, 1), cycles)


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
    """(tokens, cycles) of every sequence with EAGLE-2 trees of `nodes` drafted nodes; tau is their quotient.

    Every fed node gets `beam` children; another `policy` may feed and keep others than EAGLE-2 does.
    """
    policy = policy or eagle2_policy(nodes, beam)
    return [_tree_run(head, data, i, embedding, lm_head, ids, depth, beam, policy) for i in range(len(data))]


def _chain_hits(head, data, i, embedding, lm_head, ids, depth) -> torch.Tensor:
    """bool [depth, rows]: the level's arg-max at row t is token t+2."""
    batch = make_batch(data, [i], dtype=lm_head.dtype).to(lm_head.device)
    outputs = head.aligned(embedding[batch.next_ids].to(lm_head.dtype), batch.features, depth)
    return torch.stack(
        [ids[(out[0].to(lm_head.dtype) @ lm_head.T).argmax(-1)] == batch.label_ids[0] for out in outputs]
    ).cpu()


def _tree_run(head, data, i, embedding, lm_head, ids, depth, beam, policy) -> tuple[int, int]:
    """Decode one known answer with trees."""
    batch = make_batch(data, [i], dtype=lm_head.dtype)
    layer = head.layers[0]
    rows = batch.next_ids.shape[1]
    cos, sin = rotary_table(head.config, torch.arange(rows + depth))
    x = head.combine(embedding[batch.next_ids].to(lm_head.dtype), batch.features)
    query, key, value = layer.self_attn.project(x, cos[:rows], sin[:rows])
    output = layer.finish(
        x, torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    )[0]
    start = int(data.prompt_lengths[i]) - 1
    tokens = cycles = 0
    while start < rows:
        stable = (key[:, :, : start + 1], value[:, :, : start + 1])
        tree = _grow(head, stable, output[start], start + 1, cos, sin, embedding, lm_head, ids, depth, beam, policy)
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


def _grow(head, stable, feature, position, cos, sin, embedding, lm_head, ids, depth, beam, policy):
    """The kept nodes of a pool: {pool index: (parent pool index, token)}; -1 is the root."""
    layer = head.layers[0]
    pool: list[Drafted] = []
    keys, values = stable
    context = keys.shape[2]
    paths: list[list[int]] = [[]]  # per fed row: cache rows of its drafted ancestors
    fed, features = [-1], feature[None]
    for level in range(depth):
        best, draft = (features @ lm_head.T).float().log_softmax(-1).topk(beam)
        first = len(pool)
        for row, parent in enumerate(fed):
            value, ranks = (pool[parent].value, pool[parent].ranks) if parent >= 0 else (0.0, ())
            for rank, (log_prob, token) in enumerate(zip(best[row].tolist(), ids[draft[row]].tolist(), strict=True)):
                pool.append(Drafted(value + log_prob, log_prob, parent, token, (*ranks, rank)))
        chosen = policy.feed(pool, first) if level < depth - 1 else []
        if not chosen:
            break
        rows = [fed.index(pool[node].parent) for node in chosen]
        fed = chosen
        x = head.combine(embedding[[pool[node].token for node in fed]].to(lm_head.dtype), features[rows])[None]
        at = slice(position + level, position + level + 1)
        query, key, value = layer.self_attn.project(x, cos[at], sin[at])
        offset = keys.shape[2]
        keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        paths = [paths[row] + [offset + i] for i, row in enumerate(rows)]
        mask = torch.zeros(len(fed), keys.shape[2], dtype=torch.bool)
        mask[:, :context] = True
        for i, path in enumerate(paths):
            mask[i, path] = True
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask[None, None], enable_gqa=True
        )
        features = layer.finish(x, attended)[0]
    return {n: (pool[n].parent, pool[n].token) for n in sorted(policy.keep(pool))}
