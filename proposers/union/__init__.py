"""Union: the best nodes of several proposers in one tree, by one scale of belief."""

from vllm_specplug.proposer import Method
from vllm_specplug.proposers.union.options import UnionOptions


def _make(options: UnionOptions):
    from vllm_specplug.proposers.union.drafting import UnionProposer

    return UnionProposer(options)


def _make_on_device(options: UnionOptions):
    from vllm_specplug.proposers.union.device_proposer import UnionOnDevice

    return UnionOnDevice(options)


METHOD = Method("union", UnionOptions, make=_make, make_on_device=_make_on_device)
