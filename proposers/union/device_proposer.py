"""The union proposer of vLLM's V2 runner."""

from __future__ import annotations

from vllm_specplug.proposer import DeviceDraftContext, find_method
from vllm_specplug.proposers.union.device import merge_drafts
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.types import Draft


class UnionOnDevice:
    """Merges the drafts of its sources: the drafter with weights first, then the model-free ones."""

    def __init__(self, options: UnionOptions):
        methods = [(find_method(source.method), source) for source in options.sources]
        self._has_model = any(method.model is not None for method, _ in methods)
        self._sources = [method.make_on_device(source) for method, source in methods if method.model is None]
        self._num_nodes = options.num_speculative_tokens

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        drafts = [context.draft_by_model()] if self._has_model else []
        drafts += [source.propose(context) for source in self._sources]
        return merge_drafts(drafts, self._num_nodes)
