"""Logits of heads that predict a block of positions in one forward, for both model runners."""

from __future__ import annotations

from typing import Any

import torch


class BlockHead:
    """The part of a head after its forward: vLLM's LM head, and its pairwise term if it has one.

    - DFlash: the logits of a position are the same after every token.
    - DSpark: a low-rank bias by the token before is added (``markov_head``).
    - DFlash 2: each position has a few candidates; a term by the token before is added (``candidate_selector``).

    Args:
        model: vLLM's draft model.

    Attributes:
        is_pairwise: whether logits depend on the token before.
        predicts_at_root: whether the root's row predicts the first position; otherwise a mask token does.
        draft_ids: int64 ``[draft_vocab]``; the target's token id of each logit; None: the same.
    """

    def __init__(self, model: Any):
        self._model, self._selector = model, getattr(model.model, "candidate_selector", None)
        self._has_bias = hasattr(model, "markov_bias")
        self.is_pairwise = self._has_bias or self._selector is not None
        part = getattr(model.config, "dflash_config", None) or {}
        given = getattr(model.config, "sample_from_anchor", self._has_bias)
        self.predicts_at_root = bool(part.get("sample_from_anchor", given))
        offsets = getattr(model, "draft_id_to_target_id", None) if self._has_bias else None
        self.draft_ids = None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets
        self._logits = self._candidates = self._features = torch.empty(0)

    def read(self, hidden: torch.Tensor) -> None:
        """Compute what does not depend on drafted tokens, of ``[num_reqs, num_positions, hidden_size]``."""
        shape, flat = hidden.shape[:2], hidden.flatten(0, 1)
        if self._selector is not None:
            candidates, logits = self._model.compute_candidates(flat)
            self._candidates = candidates.long().unflatten(0, shape)
            self._features = self._selector.hidden_projection(flat).unflatten(0, shape)
        elif self._has_bias:
            logits = self._model.compute_draft_logits(flat)
        else:
            logits = self._model.compute_logits(flat)
        self._logits = logits.unflatten(0, shape)

    def logits(self) -> torch.Tensor:
        """Return the logits ``[num_reqs, num_positions, draft_vocab]`` of a head without a pairwise term."""
        return self._logits

    def logits_after(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a position after each of some tokens.

        Args:
            position: from 0.
            token_ids: int64 ``[num_reqs, width]``; the tokens before it.

        Returns:
            ``[num_reqs * width, draft_vocab]``.
        """
        logits = self._logits[:, position, None]
        if self._selector is not None:
            return self._scattered(position, token_ids)
        bias = self._model.markov_bias(self._model.markov_embed(token_ids.flatten()))
        return (logits + bias.unflatten(0, token_ids.shape)).flatten(0, 1)

    def _scattered(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a position's candidates; those of all other tokens are -inf."""
        selector, candidates = self._selector, self._candidates[:, position]
        before = selector.predecessor_codebook[token_ids] * self._features[:, position, None]
        after = selector.successor_codebook[candidates]
        scores = self._logits[:, position, None] + torch.einsum("rwh,rch->rwc", before, after)
        everything = scores.new_full((*token_ids.shape, len(selector.successor_codebook)), float("-inf"))
        return everything.scatter_(2, candidates.unsqueeze(1).expand_as(scores), scores).flatten(0, 1)
