"""Lookup: drafts what followed the same tokens earlier, in the request itself or in recent traffic, as a tree."""

from vllm_specplug.proposer import Method
from vllm_specplug.proposers.lookup.options import LookupOptions


def _make(options: LookupOptions):
    from vllm_specplug.proposers.lookup.drafting import LookupProposer

    return LookupProposer(options)


def _make_on_device(options: LookupOptions):
    from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice

    return LookupOnDevice(options)


METHOD = Method("lookup", LookupOptions, make=_make, make_on_device=_make_on_device)
