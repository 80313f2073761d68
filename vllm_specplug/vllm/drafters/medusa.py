"""Medusa heads beside vLLM's loaded target, for both model runners: loading, logits, drafts."""

from __future__ import annotations

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.core.draft_sampling import DraftSampling
from vllm_specplug.core.growth import TORCH
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS
from vllm_specplug.proposer import TargetInfo
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.medusa.checkpoint import load_medusa, validate_medusa
from vllm_specplug.proposers.medusa.drafting import choose_tree, fill_tree
from vllm_specplug.proposers.medusa.heads import MedusaHeads, heads_from_state
from vllm_specplug.proposers.medusa.options import MedusaOptions
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.draft_head import DraftHead
from vllm_specplug.vllm.drafters.target_parts import TargetHead


class MedusaHeadsDrafter:
    """Drafts from the hidden states that enter the target's LM head (``proposer.Heads``).

    The heads keep no state between steps, so that preemption, prefix caching and chunked prefill need no special case.
    """

    def __init__(self, options: MedusaOptions, target: TargetInfo):
        self.options, self._target = options, target
        #: Heads in use, which is the depth of the deepest tree.
        self.num_levels = options.draft_depth
        self._heads: MedusaHeads | None = None
        self._lm_heads: list[DraftHead] = []
        self._target_head: TargetHead | None = None
        self._draft_ids: torch.Tensor | None = None
        self._ops = TORCH

    def load(self, target_model: torch.nn.Module) -> None:
        """Read the checkpoint; heads without an LM head of their own use the target's."""
        options, hidden_size, dtype = self.options, self._target.hidden_size, self._target.dtype
        target_head = TargetHead(target_model, hidden_size, dtype)
        info = validate_medusa(options.model, hidden_size, self._target.vocab_size)
        state = load_medusa(options.model)
        heads = heads_from_state(state, self.num_levels, info.num_layers, dtype)
        self._heads = heads.to(target_head.device).eval()
        self._ops = OPERATORS if target_head.device.type == "cpu" else TORCH
        self._draft_ids = target_ids(state["d2t"]).to(target_head.device) if info.has_d2t else None
        in_int8 = bool(options.draft_int8)
        if info.has_lm_heads:
            self._lm_heads = [DraftHead(weight, in_int8) for weight in self._heads.lm_heads.detach()]
        elif self._draft_ids is not None and get_tensor_model_parallel_world_size() == 1:
            self._lm_heads = [DraftHead(target_head.rows(self._draft_ids), in_int8)]
        else:
            self._target_head = target_head

    @torch.inference_mode()
    def draft(
        self,
        root_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        sampling: DraftSampling | None = None,
        min_node_value: float = 0.0,
    ) -> Draft:
        """Draft one tree per request, without reading values back from a device.

        Args:
            root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
            hidden: ``[num_reqs, hidden_size]``; the target's at the row that each was sampled from.
            sampling: how to sample; by default the likeliest tokens are taken.
            min_node_value: of dynamic trees, which are of a fixed size without it.
        """
        options, logits = self.options, self._logits(hidden)
        if options.dynamic:
            return choose_tree(
                root_token_ids,
                logits,
                self._draft_ids,
                num_nodes=options.num_speculative_tokens,
                draft_top_k=options.draft_top_k,
                min_node_value=min_node_value,
                sampling=sampling,
                ops=self._ops,
            )
        return fill_tree(root_token_ids, logits, self._draft_ids, options.tree, sampling, self._ops)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_reqs, hidden_size]`` -> ``[num_reqs, num_heads, draft_vocab]``."""
        assert self._heads is not None
        features = self._heads(hidden)
        if len(self._lm_heads) > 1:
            return torch.stack([head(features[:, i]) for i, head in enumerate(self._lm_heads)], dim=1)
        flat = features.flatten(0, 1)
        if self._lm_heads:
            logits = self._lm_heads[0](flat)
        else:
            assert self._target_head is not None
            logits = self._target_head.logits(flat)
            if self._draft_ids is not None:  # of a head whose rows are spread over ranks
                logits = logits[:, self._draft_ids]
        return logits.view(*features.shape[:2], -1)
