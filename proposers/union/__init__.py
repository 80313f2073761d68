"""Union: merges the drafts of several proposers into one tree of the nodes most likely to be accepted."""

from vllm_specplug.proposer import Method
from vllm_specplug.proposers.union.options import UnionOptions


def _make(options: UnionOptions):
    from vllm_specplug.proposers.union.drafting import UnionProposer

    return UnionProposer(options)


METHOD = Method("union", UnionOptions, make=_make)
