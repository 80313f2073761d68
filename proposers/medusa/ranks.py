"""Ranks of the target's own tokens in the Medusa heads' predictions: accuracies, values of paths, tau of a tree.

At T = 0 a path of ranks is accepted if the true token has the path's rank in each head's prediction.  So the ranks
along known answers give the tau of any tree without decoding (Medusa, section 2.3.3).
"""

from __future__ import annotations

import os

import torch

from ..eagle2.checkpoint import target_ids
from ..training.evaluate import Acceptance
from ..training.features import FeatureSet
from .checkpoint import load_medusa, validate_medusa
from .heads import MedusaHeads, heads_from_state
from .sparse_tree import MAX_RANKS, Paths


def load_for_ranking(path: str | os.PathLike, lm_head: torch.Tensor) -> tuple[MedusaHeads, torch.Tensor, torch.Tensor]:
    """Load a checkpoint's heads (float32), their LM heads and draft ids, as arguments of `rank_answers`.

    lm_head: [vocab, h], the target's.
    """
    info = validate_medusa(path, lm_head.shape[1], lm_head.shape[0])
    state = load_medusa(path)
    draft_ids = target_ids(state["d2t"]) if info.has_d2t else torch.arange(info.vocab_size)
    draft_head = lm_head[draft_ids]
    heads = heads_from_state(state, info.num_heads, info.num_layers)
    return heads, draft_head if heads.lm_heads is None else heads.lm_heads.detach(), draft_ids


@torch.no_grad()
def rank_answers(
    heads: MedusaHeads, data: FeatureSet, draft_head: torch.Tensor, draft_ids: torch.Tensor, max_ranks: int = MAX_RANKS
) -> list[torch.Tensor]:
    """Rank the true tokens along each answer in the heads' predictions.

    draft_head: [draft_vocab, h], the LM head's rows of draft_ids, or [num_heads, draft_vocab, h].

    Returns for each sequence int64 [rows, num_heads]. Row p belongs to the feature that predicts the answer's p-th
    token. Entry k is the rank (from 0), in head k's prediction, of the token k + 1 places after that token; `max_ranks`
    if the rank is `max_ranks` or more or the token is not in the draft vocabulary; -1 beyond the end.
    """
    draft_heads = draft_head if draft_head.dim() == 3 else draft_head.expand(heads.num_heads, -1, -1)
    draft_of = {int(token): draft for draft, token in enumerate(draft_ids)}
    result = []
    for start, length, prompt in zip(
        data.starts.tolist(), data.lengths.tolist(), data.prompt_lengths.tolist(), strict=True
    ):
        first, last = start + max(prompt - 1, 0), start + length - 1
        features = heads(data.features[first:last].to(heads.weight))
        ranks = torch.full((last - first, heads.num_heads), -1)
        for k in range(heads.num_heads):
            count = last - first - (k + 1)
            if count <= 0:
                break
            truth = [draft_of.get(token, -1) for token in data.ids[first + k + 2 : last + 1].tolist()]
            best = (features[:count, k].to(draft_heads.dtype) @ draft_heads[k].T).topk(
                min(max_ranks, draft_heads.shape[1])
            )
            hits = best.indices.cpu() == torch.tensor(truth).unsqueeze(1)
            ranks[:count, k] = torch.where(hits.any(1), hits.long().argmax(1), max_ranks)
        result.append(ranks)
    return result


def head_accuracies(ranks: list[torch.Tensor], max_ranks: int = MAX_RANKS) -> list[list[float]]:
    """[num_heads][ranks]: the share of positions where head k's i-th guess is the true token (the paper's a_k(i))."""
    joined = torch.cat(ranks)
    return [
        (torch.bincount(column[column >= 0], minlength=max_ranks + 1)[:max_ranks] / max(int((column >= 0).sum()), 1))
        .double()
        .tolist()
        for column in joined.unbind(1)
    ]


def chain_acceptance(ranks: list[torch.Tensor]) -> Acceptance:
    """Acceptance of the chain of each head's best guess."""
    alphas = []
    accepted = torch.cat(ranks)  # rows whose guesses are right at all levels so far
    for level in range(accepted.shape[1]):
        tried = accepted[accepted[:, level] >= 0]
        accepted = tried[tried[:, level] == 0]
        alphas.append(accepted.shape[0] / max(tried.shape[0], 1))
    return Acceptance(alphas, simulate_tau(ranks, tuple((0,) * depth for depth in range(1, len(alphas) + 1))))


class MeasuredProbabilities:
    """Probability that a guess is right after an accepted path, for `sparse_tree.grow`.

    It is the share of hits among the positions where the path is right.  Rare paths have few such positions, so `prior`
    positions with the head's overall accuracy are added.  With a large prior the value of a path is the paper's product
    of accuracies; without a prior the heads' hits are not assumed to be independent.

    ranks: int64 [positions, num_heads], see `rank_answers`.
    """

    def __init__(self, ranks: torch.Tensor, prior: float, num_ranks: int = MAX_RANKS):
        self.ranks, self.prior, self.num_ranks = ranks, prior, num_ranks
        self.accuracies = head_accuracies([ranks], num_ranks)
        self._positions: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(ranks.shape[0])}
        self._probabilities: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, path: tuple[int, ...], rank: int) -> float:
        if path not in self._probabilities:
            overall = torch.tensor(self.accuracies[len(path)], dtype=torch.float64)
            found = self.ranks[self._at(path), len(path)]
            found = found[found >= 0]
            hits = torch.bincount(found, minlength=self.num_ranks + 1)[: self.num_ranks]
            total = max(found.numel() + self.prior, 1e-9)
            self._probabilities[path] = ((hits + self.prior * overall) / total).tolist()
        return self._probabilities[path][rank]

    def _at(self, path: tuple[int, ...]) -> torch.Tensor:
        """Positions where the whole path is right."""
        if path not in self._positions:
            before = self._at(path[:-1])
            self._positions[path] = before[self.ranks[before, len(path) - 1] == path[-1]]
        return self._positions[path]


def simulate_tau(ranks: list[torch.Tensor], paths: Paths) -> float:
    """tau of greedy decoding of these answers with the tree `paths`: 1 + accepted tokens per step."""
    order = {path: index for index, path in enumerate(paths)}
    accepted = steps = 0
    for sequence in ranks:
        rows, position = sequence.tolist(), 0
        while position < len(rows) - 1:  # nothing is drafted after the last token
            depth = 0
            while depth < len(rows[position]) and tuple(rows[position][: depth + 1]) in order:
                depth += 1
            accepted, steps = accepted + depth, steps + 1
            position += depth + 1
    return 1 + accepted / max(steps, 1)
