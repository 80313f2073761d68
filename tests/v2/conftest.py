"""The V2 model runner and the Triton kernels on a CPU, under Triton's interpreter; on a GPU as they are.

Run alone (``python -m pytest tests/v2``): the interpreter is chosen when triton is imported, and the host asks once
whether there is a Triton backend.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if "vllm" in sys.modules or ("triton" in sys.modules and "triton.language" in sys.modules):
    pytest.exit("tests/v2 needs a process of its own: python -m pytest tests/v2", returncode=4)

if not torch.cuda.is_available():
    from vllm_specplug.interpreter import use_interpreter

    use_interpreter()
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_CI_ENV="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from tests.hosts.conftest import checkpoints, cost_models, engine  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def host_without_its_top_k_kernel():
    """The host's Triton top-k/top-p kernel does not run in the interpreter; its torch one does."""
    from vllm.v1.sample.ops import topk_topp_sampler

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        yield
