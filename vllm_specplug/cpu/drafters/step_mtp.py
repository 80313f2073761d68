"""MTP layers of Step 3.5 on the V1 runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

from vllm_specplug.cpu.drafters.eagle import TreeEagleProposer


class TreeStepMTPProposer(TreeEagleProposer, Step3p5MTPProposer):
    """Step 3.5: layers of several KV cache groups, each with an LM head; the first one drafts all levels.

    So all metadata is that of its group; vLLM's own proposer keeps some of each group, for rows of the whole step.
    """

    build_per_group_and_layer_attn_metadata = EagleProposer.build_per_group_and_layer_attn_metadata
    _get_slot_mapping = EagleProposer._get_slot_mapping

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """Let the runner give the drafter the block tables of the first layer's group."""
        super().initialize_attn_backend(*args, **kwargs)
        layer = next(iter(self.model.model.layers.values())).mtp_block.self_attn.attn.layer_name
        group = next(group for group in self.draft_attn_groups if layer in group.layer_names)
        self.kv_cache_gid, self.block_size = group.kv_cache_group_id, group.kv_cache_spec.block_size
