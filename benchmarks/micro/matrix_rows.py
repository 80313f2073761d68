"""Measures the linear layers by rows, vLLM's and ours (`linear_rows`): what each further row of a tree costs.

    python benchmarks/micro/matrix_rows.py --out matrix_rows.json

All matrices of one layer of SmolLM2-135M, random weights of so many layers that they do not fit into the cache, one
thread.  vLLM chooses the implementation for this CPU, as it does for a served model.  In float32 our operator is
measured with weights kept in 32 bits and in 16, and the latter also without huge pages; where the CPU can, also in 12
bits.  A figure is the fastest of several passes over all layers, in milliseconds of one layer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from unittest.mock import patch

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_specplug.cpu.kernels.row_linear import CODED, make_row_linear
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

#: Outputs and inputs of the products: query/key/value, attention output, gate/up, down.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128, 256, 512)
LAYERS, PASSES = 30, 5


def layer_milliseconds(dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a layer's products by rows, of vLLM's operator and ours; they take turns."""
    layers = []
    for outputs, inputs in SHAPES * LAYERS:
        layers.append(torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False))
        dispatch_cpu_unquantized_gemm(layers[-1], remove_weight=False)
    computed = {
        "vllm": [layer.cpu_linear for layer in layers],
        "ours": [make_row_linear(layer.weight, dtype) for layer in layers],
    }
    if dtype == torch.float32:
        computed["ours, weights of 16 bits"] = [make_row_linear(layer.weight, torch.bfloat16) for layer in layers]
        with patch("vllm_specplug.cpu.kernels.row_linear.empty_in_huge_pages", _in_small_pages):
            small = [make_row_linear(layer.weight, torch.bfloat16) for layer in layers]
        computed["ours, weights of 16 bits, pages of 4 KiB"] = small
    smallest = [make_row_linear(layer.weight.bfloat16().to(dtype)) for layer in layers]
    if smallest[0].dtype == CODED:
        computed["ours, weights of 12 bits"] = smallest
    found: dict[str, dict[int, float]] = {name: {} for name in computed}
    for rows in ROWS:
        inputs = {size: torch.randn(rows, size, dtype=dtype) for _, size in SHAPES}
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(PASSES):
            for name, passed in seconds.items():
                begin = time.perf_counter()
                for layer, linear in zip(layers, computed[name], strict=True):
                    linear(inputs[layer.in_features], layer.weight, None)
                passed.append(time.perf_counter() - begin)
        for name, passed in seconds.items():
            found[name][rows] = round(min(passed) / LAYERS * 1e3, 3)
    return found


def _in_small_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {
        "provenance": provenance("vLLM's operator, and the same product of one row"),
        "ms_by_rows": {name: layer_milliseconds(getattr(torch, name)) for name in ("float32", "bfloat16")},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    body = [
        [f"{dtype}, {name}", *(f"{ms:.2f}" for ms in found.values())]
        for dtype, both in result["ms_by_rows"].items()
        for name, found in both.items()
    ]
    print(format_table(["rows", *map(str, ROWS)], body))


if __name__ == "__main__":
    main()
