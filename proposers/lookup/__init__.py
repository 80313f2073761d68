"""Lookup: drafts what followed the same tokens earlier, in the request itself or in recent traffic, as a tree."""

from vllm_specplug.proposer import Method
from vllm_specplug.proposers.lookup.options import LookupOptions


def _make(options: LookupOptions):
    from vllm_specplug.proposers.lookup.drafting import LookupProposer

    return LookupProposer(options)


METHOD = Method("lookup", LookupOptions, make=_make)
