"""What ``tests/v2/conftest.py`` does for one process, in each tensor-parallel rank.

vLLM imports this in every rank, as its ``worker_extension_cls``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.ops import topk_topp_sampler

from tests.doubles import interpreted  # noqa: F401
from vllm_specplug.core.loops import arrays

topk_topp_sampler.HAS_TRITON = False
_torch_operations = arrays.torch_operations()
_torch_operations.__enter__()


class Rank:
    """Mixed into the worker."""

    def kept(self) -> dict[str, Any]:
        """Return the tokens of this rank's requests, and what it has learned."""
        states, speculator = self.model_runner.req_states, getattr(self.model_runner, "speculator", None)
        found = {"tokens": states.all_token_ids.gpu.tolist(), "lengths": states.total_len.gpu.tolist()}
        if learning := getattr(speculator, "learning", None):
            found["tables"] = [table.tolist() for _, table in learning._proposer.tables()]
        return found

    def spoil(self) -> None:
        """Let the second rank draft other tokens than the first one."""
        speculator = self.model_runner.speculator
        if self.rank == 1:
            honest = speculator.propose
            speculator.propose = lambda *args, **kwargs: (honest(*args, **kwargs) + 1) % 40
