"""Union: merges the drafts of several proposers into one tree of the nodes most likely to be accepted."""

from vllm_specplug.proposer import Method
from vllm_specplug.proposers.union.options import UnionOptions


def _make(options: UnionOptions):
    from vllm_specplug.proposers.union.drafting import UnionProposer

    return UnionProposer(options)


def _make_on_device(options: UnionOptions):
    from vllm_specplug.proposers.union.device_proposer import UnionOnDevice

    return UnionOnDevice(options)


METHOD = Method("union", UnionOptions, make=_make, make_on_device=_make_on_device)
