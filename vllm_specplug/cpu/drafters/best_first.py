"""Trees from the logits of all positions, for drafters that predict them in one forward on the V1 runner."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.cpu.drafters.levels import LevelDrafter
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS
from vllm_specplug.proposers.dflash.drafting import WIDTH, ChildrenOf, grow_block, same_after_all
from vllm_specplug.types import Draft
from vllm_specplug.utils.lazy import load

#: By method under which vLLM loads a head: the adapter.
_ADAPTERS = {
    "dflash": "vllm_specplug.cpu.drafters.dflash:TreeDFlashProposer",
    "eagle3": "vllm_specplug.cpu.drafters.peagle:TreePEagleProposer",
}


class BestFirstDrafter(LevelDrafter):
    """Mixed into a drafter whose one forward predicts all positions."""

    grows_by_level = False

    def _best_first(self, root_token_ids: torch.Tensor, hidden: torch.Tensor) -> Draft:
        """Draft a tree for each request.

        Args:
            root_token_ids: int ``[num_reqs]``; the last emitted tokens.
            hidden: ``[num_reqs, num_positions, hidden_size]``; inputs of the LM head.
        """
        found = self._of_positions(hidden, min(self.options.num_speculative_tokens, WIDTH))

        def of_position(position: int, top_k: int) -> Children:
            return Children(found.token_ids[:, position, :top_k], found.log_probs[:, position, :top_k])

        return self._grow_block(root_token_ids, hidden.shape[1], same_after_all(of_position))

    def _by_pairs(self, root_token_ids: torch.Tensor, num_positions: int, logits_after: Any) -> Draft:
        """Draft a tree for each request, by a head whose logits depend on the token before.

        Args:
            root_token_ids: int ``[num_reqs]``; the last emitted tokens.
            num_positions: levels of the trees.
            logits_after: see ``BlockHead.logits_after``; also returns the target's token ids, or None.
        """
        sampling = self.runner.draft_noise.sampling(num_positions, WIDTH)

        def children(position: int, token_ids: torch.Tensor, top_k: int) -> Children:
            logits, draft_ids = logits_after(position, token_ids)
            if sampling is None:
                return likeliest(logits, top_k, draft_ids)
            return sampling.children(logits, position, top_k, draft_ids)

        return self._grow_block(root_token_ids, num_positions, children)

    def _grow_block(self, root_token_ids: torch.Tensor, num_positions: int, children: ChildrenOf) -> Draft:
        draft = grow_block(
            root_token_ids.long(),
            children,
            num_positions=num_positions,
            num_nodes=self.options.num_speculative_tokens,
            width=WIDTH,
            min_node_value=self.options.node_floor,
            ops=OPERATORS,
        )
        return self._without_unread(draft)

    def _of_positions(self, hidden: torch.Tensor, top_k: int) -> Children:
        """Choose the tokens of each position: ``[num_reqs, num_positions, top_k]``."""
        shape = hidden.shape[:2]
        logits, draft_ids = self._logits(hidden.flatten(0, 1))
        sampling = self.runner.draft_noise.sampling(shape[1], 1)
        if sampling is None:
            found = likeliest(logits, top_k, draft_ids)
            return Children(found.token_ids.unflatten(0, shape), found.log_probs.unflatten(0, shape))
        levels = logits.unflatten(0, shape).unbind(1)
        sampled = [sampling.children(one, level, top_k, draft_ids) for level, one in enumerate(levels)]
        token_ids, log_probs = zip(*((one.token_ids, one.log_probs) for one in sampled), strict=True)
        return Children(torch.stack(token_ids, 1), torch.stack(log_probs, 1))


def make_drafter(vllm_config: Any, device: torch.device, runner: Any) -> BestFirstDrafter:
    """Make the adapter of the configured head."""
    return load(_ADAPTERS[vllm_config.speculative_config.method])(vllm_config, device, runner)
