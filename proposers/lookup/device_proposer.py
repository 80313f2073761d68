"""The lookup proposer of vLLM's V2 runner."""

from __future__ import annotations

from vllm_specplug.kernels.triton_lookup import match_keys
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.lookup.device import draft_matches
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import Draft


class LookupOnDevice:
    """Drafts continuations of matches in each request's own tokens, which V2 keeps on the GPU."""

    def __init__(self, options: LookupOptions):
        self._options = options

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        return draft_matches(
            context.token_ids, context.slots, context.num_tokens, context.root_token_ids, self._options, match_keys
        )
