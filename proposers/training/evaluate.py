"""Offline acceptance of a head on the target's own greedy answers.

At T = 0 a drafted token is accepted if it is the token that the target wrote and all drafted tokens before it are
accepted. So the accepted tokens of a draft equal the answer's, and pass j of `EagleHead.aligned` on the answer computes
level j of a draft that starts j rows earlier, after keys and values from the target's features.

tau, the tokens per verification, counts the target's own token: plain decoding has tau 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..eagle2.head import EagleHead
from .features import FeatureSet
from .loop import make_batch


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts along known answers."""

    alphas: list[float]  # share of accepted tokens at each draft level, if all levels before it are accepted
    tau: float
    cycles: int = 0  # verifications that tau is measured over
    by_answer: list[tuple[int, int]] = field(
        default_factory=list, repr=False
    )  # tokens and verifications of each answer

    def __str__(self) -> str:
        return f"tau {self.tau:.3f}, alpha " + " ".join(f"{alpha:.3f}" for alpha in self.alphas)


@torch.no_grad()
def chain_acceptance(
    head: EagleHead, data: FeatureSet, embedding: torch.Tensor, lm_head: torch.Tensor, ids: torch.Tensor, depth: int = 6
) -> Acceptance:
    """Acceptance of greedy chains of `depth` tokens; `ids` [draft_vocab] are the target ids of `lm_head`'s rows."""
    accepted, tried = torch.zeros(depth), torch.zeros(depth)
    by_answer = []
    for i in range(len(data)):
        hits = _chain_hits(head, data, i, embedding, lm_head, ids, depth)
        first = int(data.prompt_lengths[i]) - 1  # the feature that predicts the answer's first token
        rows = hits.shape[1]
        for start in range(first, rows):
            for level in range(min(depth, rows - start)):
                tried[level] += 1
                if not hits[level, start + level]:
                    break
                accepted[level] += 1
        position, tokens, cycles = first, 0, 0
        while position < rows:
            run = 0
            while run < depth and position + run < rows and hits[run, position + run]:
                run += 1
            tokens += run + 1
            cycles += 1
            position += run + 1
        by_answer.append((tokens, cycles))
    alphas = (accepted / tried.clamp(min=1)).tolist()
    return Acceptance(alphas, tau_of(by_answer), sum(cycles for _, cycles in by_answer), by_answer)


def tau_of(by_answer: list[tuple[int, int]]) -> float:
    """Tokens per verification over all answers, from (tokens, verifications) of each."""
    return sum(tokens for tokens, _ in by_answer) / max(sum(cycles for _, cycles in by_answer), 1)


def _chain_hits(head, data, i, embedding, lm_head, ids, depth) -> torch.Tensor:
    """bool [depth, rows]: whether the level's arg-max at row t is token t+2."""
    batch = make_batch(data, [i], dtype=lm_head.dtype).to(lm_head.device)
    outputs = head.aligned(embedding[batch.next_ids].to(lm_head.dtype), batch.features, depth)
    best = [ids[(out[0].to(lm_head.dtype) @ lm_head.T).argmax(-1)] for out in outputs]
    return torch.stack([level == batch.label_ids[0] for level in best]).cpu()
