"""The unit tier: no engine, one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The tests and the processes they start use one thread: for tensors this small, more threads only wait."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1):
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patch.setenv(name, "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)
