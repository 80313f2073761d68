"""What the V2 runner asks of every speculator of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_specplug.config import TreeOptions, lookup_of, model_drafter
from vllm_specplug.hosts.v2.growth import Growth
from vllm_specplug.hosts.v2.trees import DeviceTrees
from vllm_specplug.kernels.triton_lookup import match_keys
from vllm_specplug.proposers.lookup.device import draft_matches
from vllm_specplug.proposers.union.device import merge_drafts
from vllm_specplug.types import Draft


class TreeSpeculator:
    """Mixed into a speculator of the host: trees of a fixed size, drafted without a look at the device.

    Attributes:
        options: of the drafter; None where lookup is all there is.
        trees: what was drafted last.
        draft_attn_layer_names: attention layers of a draft model; empty where there is none.
    """

    options: TreeOptions | None
    trees: DeviceTrees
    draft_attn_layer_names: set[str]
    #: Trees of the drafter, where there is one: from the last emitted tokens (int64 ``[num_reqs]``) and what ``_draft``
    #: was given (``[num_reqs, ...]`` each).
    _draft_by_model: Callable[..., Draft]

    def init_trees(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        """To be called by ``__init__``."""
        scheduler, config = vllm_config.scheduler_config, vllm_config.speculative_config
        self.options, self._lookup = model_drafter(config.specplug), lookup_of(config.specplug)
        self._merges, self._req_states = config.specplug.method == "union", req_states
        self.trees = DeviceTrees(
            scheduler.max_num_seqs,
            config.num_speculative_tokens,
            max(part.draft_depth for part in (self.options, self._lookup) if part is not None),
            scheduler.max_num_batched_tokens,
            device,
        )
        self._growth = Growth(self._grow, scheduler.max_num_seqs)

    def load_heads(self, target_model: torch.nn.Module) -> None:
        """Load what the host does not load itself."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Asked for with every KV cache.  The first one may be small, to measure what graphs take, and is freed again:
        what was recorded then would read it."""
        self._growth.forget()
        super().init_cudagraph_manager(cudagraph_mode)

    def _record(self, *inputs: torch.Tensor) -> None:
        """Record the growth, see ``Growth.record``."""
        slots = torch.zeros_like(self.trees.parents[:, 0])
        self._growth.record(slots, slots.clone(), *inputs)

    def _draft(
        self, input_batch: Any, dummy_run: bool, last_sampled: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Grow the trees, keep their parents, and hand the nodes' tokens to the host.

        Returns:
            int64 ``[num_reqs, num_speculative_tokens]``.
        """
        slots = input_batch.idx_mapping
        token_ids, parents = self._growth(input_batch.num_reqs, slots, last_sampled[slots].view(-1), *inputs)
        if not dummy_run:
            self.trees.keep(parents, slots)
        # A node that could not be drafted still is a row of the next forward: any valid id will do.
        return token_ids[:, 1:].clamp(min=0)

    def _grow(
        self, num_reqs: int, slots: torch.Tensor, root_token_ids: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and parents, int64 ``[num_reqs, num_rows]``; see ``v2_growth.Grow``."""
        drafts = []
        if self.options is not None:
            drafts.append(self._draft_by_model(root_token_ids, *inputs))
        if self._lookup is not None:
            known = self._req_states
            token_ids, lens = known.all_token_ids.gpu, known.total_len.gpu
            drafts.append(draft_matches(token_ids, slots, lens, root_token_ids, self._lookup, match_keys))
        tree = (merge_drafts(drafts, self.trees.width - 1) if self._merges else drafts[0]).tree
        return tree.token_ids, tree.parents
