"""Medusa heads in the host: no draft model of the host's is needed, only the target's hidden states and LM head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.config import host_drafter
from vllm_specplug.hosts.draft_head import DraftHead
from vllm_specplug.hosts.drafter import CustomDrafter
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.medusa.checkpoint import load_medusa, validate_medusa
from vllm_specplug.proposers.medusa.drafting import choose_tree, fill_tree
from vllm_specplug.proposers.medusa.heads import MedusaHeads, heads_from_state
from vllm_specplug.types import Draft


class HostMedusaProposer(CustomDrafter):
    """The runner hands it the hidden states it asks for.

    The heads keep no state between steps: preemption, prefix caching and chunked prefill need no care.
    """

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        self.options = host_drafter(vllm_config.speculative_config.specplug)
        self.dtype = vllm_config.model_config.dtype
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        #: ``[num_reqs, hidden_size]``: the hidden state of each request's last accepted row; set by the runner.
        self.hidden: torch.Tensor | None = None
        self._heads: MedusaHeads | None = None
        self._lm_heads: list[DraftHead] = []
        self._target_model: torch.nn.Module | None = None
        self._draft_ids: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        options = self.options
        hidden_size = target_model.lm_head.weight.shape[1]
        info = validate_medusa(options.model, hidden_size, self.vocab_size)
        state = load_medusa(options.model)
        self._heads = heads_from_state(state, options.draft_depth, info.num_layers, self.dtype).eval()
        self._draft_ids = target_ids(state["d2t"]) if info.has_d2t else None
        if info.has_lm_heads:
            self._lm_heads = [DraftHead(weight) for weight in self._heads.lm_heads.detach()]
        elif self._draft_ids is not None and get_tensor_model_parallel_world_size() == 1:
            self._lm_heads = [DraftHead(target_model.lm_head.weight.data[self._draft_ids].contiguous())]
        else:
            self._target_model = target_model

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> Draft:
        """Draft one tree per request."""
        requests = np.arange(len(sampled_token_ids))
        last = np.maximum(num_tokens_no_spec[requests] - 1, 0)
        roots = torch.from_numpy(token_ids_cpu[requests, last]).long()
        assert self.hidden is not None
        logits = self._logits(self.hidden)
        options, num_heads = self.options, logits.shape[1]
        sampling = self.runner.draft_noise.sampling(num_heads, 1)
        if options.dynamic:
            return choose_tree(
                roots,
                logits,
                self._draft_ids,
                num_nodes=options.num_speculative_tokens,
                draft_top_k=options.draft_top_k,
                min_node_value=options.node_floor,
                sampling=sampling,
            )
        return fill_tree(roots, logits, self._draft_ids, options.tree, sampling)

    @torch.inference_mode()
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
            assert self._target_model is not None
            logits = self._target_model.compute_logits(flat)
            if self._draft_ids is not None:  # of a head whose rows are spread over ranks
                logits = logits[:, self._draft_ids]
        return logits.view(*features.shape[:2], -1)
