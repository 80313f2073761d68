"""Linear layers by our operator, against torch in float64."""

from pathlib import Path

import pytest
import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.row_linear import (
    CODED,
    DTYPES,
    exact_dtype,
    head_linear,
    make_row_linear,
    pack_heads,
    uses_tiles,
)

pytestmark = pytest.mark.skipif(operators() is None, reason="the C++ operators cannot be built")
CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
#: Of a sum of 600 products of numbers around 1, and of the rounding of the result.
BOUND = {torch.float32: 2e-4, torch.bfloat16: 0.6, torch.float16: 0.08}


def inputs_of(rows, outputs, size, dtype):
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    made = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, size), (outputs, size), (outputs,))]
    return made


def check(found, x, weight, bias):
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == x.dtype and found.shape == expected.shape
    assert (found.double() - expected).abs().max() < BOUND[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "size"), [(1, 1), (7, 30), (96, 64), (100, 576), (33, 601)])
def test_same_as_torch(dtype, outputs, size):
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 20, 25, 50, 301):  # 301 rows of 601: several chunks
        x, weight, bias = inputs_of(rows, outputs, size, dtype)
        linear = make_row_linear(weight)
        for added in (None, bias):
            if rows:
                check(linear(x, weight, added), x, weight, added)
            else:
                assert linear(x, weight, added).shape == (0, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "size"), [(33, 30), (512, 32), (128, 512)])
def test_a_weight_for_each_head(dtype, outputs, size):
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 5, size), (5, outputs, size)))
    found = head_linear(x, packed := pack_heads(weights), outputs)
    for head in range(5):
        check(found[:, head], x[:, head], weights[head], None)
    for rows in (1, 7):  # with the same bits
        assert torch.equal(head_linear(x[-rows:], packed, outputs), found[-rows:])
    assert head_linear(x[:0], packed, outputs).shape == (0, 5, outputs)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
@pytest.mark.parametrize("size", [5000, 5001, 5024])  # the last one in tiles, with AMX
def test_many_inputs(dtype, kept, size):
    """Sums over several panels of inputs, of several chunks of rows; of small integers, so that they are exact."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(1, 4, (40, size), generator=generator).float()
    weight[:, ::2] *= -1
    linear = make_row_linear(weight.to(dtype), kept)
    for rows in (1, 2, 5, 13, 48, 50, 200):
        x = torch.randint(-2, 3, (rows, size), generator=generator).float()
        assert torch.equal(linear(x.to(dtype), None, None), torch.nn.functional.linear(x, weight).to(dtype))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_float32_weights_in_16_bits(kept):
    """The same bits as with the weights in float32, as exact with AMX; weights that do not fit are rounded."""
    for rows in (1, 2, 3, 7, 40):
        x, weight, bias = inputs_of(rows, 100, 576, torch.float32)
        rounded = weight.to(kept).float()
        assert exact_dtype(rounded) == kept and exact_dtype(weight) == torch.float32
        found, whole = (make_row_linear(rounded, dtype)(x, None, bias) for dtype in (kept, torch.float32))
        assert torch.equal(make_row_linear(weight, kept)(x, None, bias), found)
        if kept == torch.bfloat16 and uses_tiles(rounded.to(kept)):  # sums in another order
            expected = torch.nn.functional.linear(x.double(), rounded.double(), bias.double())
            error, usual = ((each - expected).abs().max() for each in (found, whole))
            assert error <= 2 * usual
        else:
            assert torch.equal(whole, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 31, 100])
def test_each_weight_is_kept(dtype, outputs):
    """In 12 bits where the CPU can, unless too many exponents are rare; few stand in a list."""
    generator = torch.Generator().manual_seed(outputs)
    usual = torch.randn(outputs, 576, generator=generator).bfloat16()
    rare, wide = usual.clone(), usual * 2.0 ** torch.randint(-60, 60, usual.shape, generator=generator)
    rare[0, :3], rare[-1, -1] = torch.tensor([1e-30, 1e-37, -3e20]), 1e30
    zeros = usual.where(torch.rand(usual.shape, generator=generator) < 0.5, -0.0)
    single = torch.full_like(usual, -0.75)
    for weight, fits in (
        (usual, True),
        (rare, True),
        (zeros, True),
        (single, True),
        (wide.bfloat16(), False),
    ):
        linears = [make_row_linear(weight.to(dtype), kept) for kept in (None, torch.bfloat16)]
        if is_coded := fits and can_code(usual, dtype):
            linears.append(make_row_linear(weight.to(dtype), CODED))
        else:
            with pytest.raises(ValueError, match="12 bits"):
                make_row_linear(weight.to(dtype), CODED)
        assert linears[0].dtype == (CODED if is_coded else torch.bfloat16)
        for linear in linears:
            rows = torch.eye(576, dtype=dtype).split([1, 7, 20, 48, 500])
            assert torch.equal(torch.cat([linear(each, None, None) for each in rows]).T, weight.to(dtype))


def can_code(weight, dtype):
    """Whether this CPU keeps weights in 12 bits for rows of this type."""
    return uses_tiles(weight.bfloat16()) or (dtype == torch.bfloat16 and {"avx512_bf16", "avx512vbmi"} <= FLAGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_listed_weights_of_several_panels(dtype):
    """The same bits as with weights of 16 bits; each panel of inputs has some that stand in the list."""
    weight = torch.randn(40, 5024, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 7::400] = 1e-20
    weight[5, 5000:5003] = 1e20
    weight = weight.to(dtype)
    if not can_code(weight, dtype):
        pytest.skip("this CPU does not keep these weights in 12 bits")
    coded, plain = make_row_linear(weight, CODED), make_row_linear(weight, torch.bfloat16)
    for rows in (1, 5, 13, 48, 200):
        x = torch.randn(rows, 5024, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(coded(x, None, None), plain(x, None, None))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
)
def test_each_row_is_its_own(dtype, kept):
    """A row's result does not depend on how many rows there are, nor on their values."""
    x, weight, _ = inputs_of(301, 100, 576, dtype)
    linear = make_row_linear(weight, kept)
    whole = linear(x, weight, None)
    for count in (*range(1, 26), 100, 200):
        assert torch.equal(linear(x[:count], weight, None), whole[:count])


def test_several_threads():
    x, weight, bias = inputs_of(9, 500, 64, torch.float32)
    linear, threads = make_row_linear(weight), torch.get_num_threads()
    expected = linear(x, None, bias)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(linear(x, None, bias), expected)
    finally:
        torch.set_num_threads(threads)


def test_other_shapes_and_strides():
    x, weight, bias = inputs_of(12, 100, 64, torch.float32)
    linear = make_row_linear(weight)
    expected = linear(x, weight, bias)
    assert torch.equal(linear(x.view(3, 4, 64), weight, bias), expected.view(3, 4, 100))
    wider = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wider[:, :64], weight, bias), expected)


def test_vllms_product_takes_more_rows():
    ops = pytest.importorskip("vllm._custom_ops")
    x, weight, bias = inputs_of(9, 96, 64, torch.float32)
    handler = ops.create_onednn_mm(weight.t(), 32)
    linear = make_row_linear(-weight, None, handler.handler_tensor, 4)  # the sign tells which one computes
    check(linear(x, None, bias), x, weight, bias)
    assert torch.equal(linear(x, None, bias), ops.onednn_mm(handler, x, bias))
    check(linear(x[:4], None, bias), x[:4], -weight, bias)


def test_compiled_for_any_number_of_rows():
    weight, bias = inputs_of(1, 96, 64, torch.float32)[1:]
    linear, calls = make_row_linear(weight), []

    def count(graph, _):
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: linear(x * 2, weight, bias), backend=count, dynamic=True, fullgraph=True)
    for rows in (7, 5, 9):  # another number than the matrix has blocks: torch would take them for the same
        x = inputs_of(rows, 96, 64, torch.float32)[0]
        assert torch.equal(compiled(x), linear(x * 2, weight, bias))
    assert len(calls) == 1


def test_wrong_inputs_are_refused():
    x, weight, bias = inputs_of(2, 96, 64, torch.float32)
    linear = make_row_linear(weight)
    for arguments in (
        (x[:, :32], None, None),
        (x.bfloat16(), None, None),
        (x, None, bias.bfloat16()),
        (x, None, bias[:9]),
    ):
        with pytest.raises(RuntimeError, match="row_linear"):
            linear(*arguments)
    with pytest.raises(RuntimeError, match="row_linear"):
        make_row_linear(weight.t())
    with pytest.raises(RuntimeError, match="row_linear"):
        make_row_linear(weight.double())
