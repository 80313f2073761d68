"""Measures the linear layers by rows, vLLM's and ours (`linear_rows`): what each further row of a tree costs.

    python benchmarks/micro/matrix_rows.py --out matrix_rows.json [--target DIR]

All matrices of one layer of SmolLM2-135M, or of the target in DIR and its LM head, random weights of so many layers
that they do not fit into the cache, one thread.  vLLM chooses the implementation for this CPU, as it does for a served
model.  In float32 our operator is measured with weights kept in 32 bits and in 16, and the latter also without huge
pages; where the CPU can, also in 12 bits.  A figure is the fastest of several passes over all layers, in milliseconds
of one layer.

With a target there are two limits beside them: the time to read a layer's weights from memory in 16 bits, and the time
of its products at the rate of one large product in torch.
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_specplug.cpu.kernels.row_linear import CODED, make_row_linear
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

Shapes = Sequence[tuple[int, int]]

#: Outputs and inputs of the products of SmolLM2-135M: query/key/value, attention output, gate/up, down.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128, 256, 512)
PASSES = 5
#: Weights of all layers: more than the cache of a server's CPU that two cores get a share of.
WEIGHTS = 100_000_000


def shapes_of(target: str) -> tuple[Shapes, Shapes]:
    """Return the shapes of a layer's products and of the LM head of a model in the layout of Llama."""
    config = AutoConfig.from_pretrained(target)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    attention = heads * head_size
    keys_values = 2 * config.num_key_value_heads * head_size
    inner = config.intermediate_size
    layer = ((attention + keys_values, hidden), (hidden, attention), (2 * inner, hidden), (hidden, inner))
    return layer, ((config.vocab_size, hidden),)


def size(shapes: Shapes) -> int:
    """Return the number of weights."""
    return sum(outputs * inputs for outputs, inputs in shapes)


def layer_milliseconds(shapes: Shapes, dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a layer's products by rows, of vLLM's operator and ours; they take turns."""
    layers = []
    copies = -(-WEIGHTS // size(shapes))
    for outputs, inputs in tuple(shapes) * copies:
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
        inputs = {width: torch.randn(rows, width, dtype=dtype) for _, width in shapes}
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(PASSES):
            for name, passed in seconds.items():
                begin = time.perf_counter()
                for layer, linear in zip(layers, computed[name], strict=True):
                    linear(inputs[layer.in_features], layer.weight, None)
                passed.append(time.perf_counter() - begin)
        for name, passed in seconds.items():
            found[name][rows] = round(min(passed) / copies * 1e3, 3)
    return found


def limits(shapes: Shapes) -> dict[str, dict[int, float]]:
    """Return the milliseconds that a layer takes at least: to read its weights once, and to multiply them."""
    weights = torch.ones(WEIGHTS, dtype=torch.bfloat16)
    reading = _fastest(lambda: weights.view(torch.int64).sum()) / WEIGHTS
    square = torch.randn(2048, 2048).bfloat16()
    product = _fastest(lambda: square @ square) / 2048**3
    return {
        "limit, memory in 16 bits": {rows: round(reading * size(shapes) * 1e3, 3) for rows in ROWS},
        "limit, products": {rows: round(product * size(shapes) * rows * 1e3, 3) for rows in ROWS},
    }


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    return min(timeit.repeat(call, number=1, repeat=PASSES))


def _in_small_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--target", metavar="DIR", help="folder of a model: its sizes, in bfloat16 only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.target:
        layer, lm_head = shapes_of(args.target)
        found = {
            "layer": layer_milliseconds(layer, torch.bfloat16) | limits(layer),
            "LM head": layer_milliseconds(lm_head, torch.bfloat16) | limits(lm_head),
        }
    else:
        found = {name: layer_milliseconds(SHAPES, getattr(torch, name)) for name in ("float32", "bfloat16")}
    result = {"provenance": provenance("vLLM's operator, and the same product of one row"), "ms_by_rows": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    body = [
        [f"{part}, {name}", *(f"{ms:.2f}" for ms in milliseconds.values())]
        for part, operators in found.items()
        for name, milliseconds in operators.items()
    ]
    print(format_table(["rows", *map(str, ROWS)], body))


if __name__ == "__main__":
    main()
