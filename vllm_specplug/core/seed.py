"""Re-seed: feed the drafter the target's true hidden states of the accepted tokens (PAPERS.md section 2, stable KV).

The drafter's sequence is one token ahead of its features: at the place of path node ``d`` it takes the target's hidden
state of that node together with the token that followed it, ``output_token_ids[d]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.types import PADDING, Walk


@dataclass(frozen=True)
class Reseed:
    """What the drafter re-runs after a walk.

    Attributes:
        source_rows: int64 ``[num_reqs, max_emitted]``; flat row of the verification forward whose hidden state is the
            feature (the root, then the accepted nodes).  Padding repeats the root's row: always a valid index.
        target_rows: int64 ``[num_reqs, max_emitted]``; flat row whose slot and position the entry takes,
            ``row_start + d``; ``PADDING`` behind, where nothing may be written.
        token_ids: int64 ``[num_reqs, max_emitted]``; token that followed each row, i.e. the emitted tokens;
            ``PADDING`` behind.
        lens: int64 ``[num_reqs]``; valid entries, equal to ``num_emitted``.
        next_token_ids: int64 ``[num_reqs]``; the last emitted token, the next tree's root; ``PADDING`` for a request
            that emitted nothing.
    """

    source_rows: torch.Tensor
    target_rows: torch.Tensor
    token_ids: torch.Tensor
    lens: torch.Tensor
    next_token_ids: torch.Tensor


def last_rows(walk: Walk, row_start: torch.Tensor) -> torch.Tensor:
    """Flat row of the last accepted node, whose logits gave the newest token: all that Medusa heads look at.

    Args:
        walk: the result of the walk.
        row_start: int ``[num_reqs]``; flat row of each request's root in the verification forward.

    Returns:
        int64 ``[num_reqs]``; the root's row for a request that emitted nothing.
    """
    last = (walk.num_emitted - 1).clamp(min=0).unsqueeze(1)
    return row_start.long() + walk.path_rows.gather(1, last).squeeze(1)


def plan_reseed(walk: Walk, row_start: torch.Tensor) -> Reseed:
    """Plan the drafter's run over the accepted tokens.

    Args:
        walk: the result of the walk.
        row_start: int ``[num_reqs]``; flat row of each request's root in the verification forward.
    """
    depths = torch.arange(walk.path_rows.shape[1], device=walk.path_rows.device)
    first = row_start.long().unsqueeze(1)
    token_ids = walk.output_token_ids.long()
    last = (walk.num_emitted - 1).clamp(min=0).unsqueeze(1)
    return Reseed(
        source_rows=first + walk.path_rows.clamp(min=0),
        target_rows=torch.where(depths < walk.num_emitted.unsqueeze(1), first + depths, PADDING),
        token_ids=token_ids,
        lens=walk.num_emitted,
        next_token_ids=token_ids.gather(1, last).squeeze(1),
    )
