"""Convolutions and recurrences against vLLM's own operators on a CPU, each row a decode step."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
from vllm.platforms import current_platform

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.state_scan import Sequences, causal_conv, gated_delta, mamba2_scan

pytestmark = pytest.mark.skipif(operators() is None, reason="needs the C++ operators")
ROWS, HEADS = 12, 4
ONE = Sequences(torch.tensor([0, ROWS]), torch.tensor([1]), torch.tensor([1]))


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def test_convolution():
    x, weight, states = random(ROWS, 64), random(64, 4), random(3, 3, 64)
    start, place = torch.tensor([0, ROWS]), torch.tensor([1])
    theirs = states.clone().transpose(1, 2)
    expected = causal_conv1d_fn_cpu(x.T, weight, None, theirs, start, place, torch.tensor([True]), "silu").T
    found = causal_conv(x, weight.T.contiguous(), None, states, states, ONE, True)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(states[1], theirs[1].T)


def test_mamba2():
    x, dt, a, d, bias = random(ROWS, HEADS, 32), random(ROWS, HEADS), -random(HEADS).exp(), random(HEADS), random(HEADS)
    b, c, states = random(ROWS, 2, 16), random(ROWS, 2, 15 + 1) * 0.5, random(3, HEADS, 32, 16)
    theirs, expected = states.clone(), torch.empty(ROWS, HEADS, 32)
    for row in range(ROWS):
        wide = dt[row, None, :, None].expand(-1, -1, 32)
        selective_state_update(
            theirs,
            x[row : row + 1],
            wide,
            a[:, None, None].expand(-1, 32, 16).float(),
            b[row : row + 1],
            c[row : row + 1],
            d[:, None].expand(-1, 32),
            dt_bias=bias[:, None].expand(-1, 32),
            dt_softplus=True,
            state_batch_indices=torch.tensor([1], dtype=torch.int32),
            dst_state_batch_indices=torch.tensor([1], dtype=torch.int32),
            out=expected[row : row + 1],
        )
    found = mamba2_scan(x, dt, a, b, c, d, bias, states, states, ONE)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(states, theirs, atol=1e-4)


def test_gated_delta():
    """In bfloat16 and with heads of 128, the only ones that vLLM's operator takes."""
    query, key, value = random(ROWS, 2, 128), random(ROWS, 2, 128) + 0.1, random(ROWS, HEADS, 128)
    rows = [one.bfloat16() for one in (query, key, value, random(ROWS, HEADS), random(ROWS, HEADS) * 0.5)]
    a_log, bias, states = random(HEADS), random(HEADS).bfloat16(), 0.1 * random(3, HEADS, 128, 128)
    theirs, expected = states.clone(), []
    for row in range(ROWS):
        q, k, v, a, b = (one[row : row + 1] for one in rows)
        expected.append(
            ops.fused_sigmoid_gating_delta_rule_update_cpu(
                A_log=a_log,
                dt_bias=bias,
                q=q.unsqueeze(0),
                k=k.unsqueeze(0),
                v=v.unsqueeze(0),
                a=a,
                b=b,
                initial_state_source=theirs,
                initial_state_indices=torch.tensor([1], dtype=torch.int32),
                cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
                use_qk_l2norm_in_kernel=True,
            ).view(HEADS, 128)
        )
    found = gated_delta(*(one.float() for one in rows), a_log, bias.float(), states, states, ONE)
    assert torch.allclose(found, torch.stack(expected).float(), atol=2e-2)
    assert torch.allclose(states, theirs, atol=2e-2)
