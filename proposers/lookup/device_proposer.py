"""The lookup proposer of vLLM's V2 runner."""

from __future__ import annotations

from vllm_specplug.kernels.triton_growth import rerank_draft
from vllm_specplug.kernels.triton_lookup import continuations
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.lookup.device import kernel_weights
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import Draft


class LookupOnDevice:
    """Drafts continuations of matches in each request's own tokens, which V2 keeps on the GPU.

    ``device.draft_matches`` is the reference; here it takes three launches.
    """

    def __init__(self, options: LookupOptions):
        self._options = options

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        options = self._options
        pool = continuations(
            context.token_ids,
            context.slots,
            context.num_tokens,
            min_match=options.min_match,
            max_match=options.max_match,
            max_candidates=options.max_candidates,
            draft_depth=options.draft_depth,
            weights=kernel_weights(context.token_ids.device),
        )
        return rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens)[0]
