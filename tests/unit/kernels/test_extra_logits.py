"""The operator that computes logits of further tokens, against torch."""

import pytest
import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.extra_logits import extra_logits, extra_logits_reference

pytestmark = pytest.mark.skipif(operators() is None, reason="the C++ operators cannot be built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_reqs", "width", "num_extra", "size"), [(1, 1, 1, 16), (1, 3, 38, 576), (3, 7, 130, 83)])
def test_same_as_torch(num_reqs, width, num_extra, size, dtype):
    """Also sizes that no vector divides, and rows of a wider tensor."""
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(num_reqs * width, size + 5, generator=generator).to(dtype)[:, :size]
    rows = torch.randn(num_extra, size, generator=generator).to(dtype)
    others = torch.rand(num_reqs, num_extra, generator=generator) < 0.4
    exact = extra_logits_reference(hidden.double(), rows.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * exact.abs().max().item()
    for other_requests in (None, others):
        found = extra_logits(hidden, rows, other_requests)
        expected = extra_logits_reference(hidden.double(), rows.double(), other_requests)
        assert found.dtype == dtype
        assert torch.equal(found.isinf(), expected.isinf())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_wrong_shapes_are_refused():
    with pytest.raises(RuntimeError, match="hidden_size"):
        extra_logits(torch.zeros(2, 8), torch.zeros(3, 9))
    with pytest.raises(RuntimeError, match="other_requests"):
        extra_logits(torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(2, 3, dtype=torch.bool))
