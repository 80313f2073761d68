"""The decode step of an 8B-shaped target in plain torch, by rows: the table from which a budget can be chosen.

Rows of one forward are the tokens of all requests: plain decoding has one per request, a tree one per node and one for
its root.  Weights are random; some layers share theirs, more of them than the GPU's cache holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.attention import PAGE
from benchmarks.gpu.device import bandwidth_gb_s, device, timed
from tests.doubles.attention_inputs import device_arguments, make_inputs
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.gpu.kernels.tree_attention import tree_attention

Row = dict[str, Any]
SHAPE_8B = {"hidden": 4096, "inner": 14336, "heads": (32, 8, 128), "vocab": 128256, "layers": 32, "distinct": 4}
TINY = {"hidden": 64, "inner": 96, "heads": (4, 2, 16), "vocab": 96, "layers": 2, "distinct": 2}
#: Rows of one request's tree in the step with attention.
TREE_ROWS = 16


def measure(question: Row) -> Iterator[Row]:
    """Time the step without attention, and with tree attention over a context, for each number of rows."""
    shape = SHAPE_8B if device().type == "cuda" else TINY
    model = DenseModel(shape)
    context = min(question["contexts"])
    for rows in question["rows"]:
        row: Row = {"rows": rows}
        hidden = torch.randn(rows, shape["hidden"], dtype=model.dtype, device=device())
        row |= timed(functools.partial(model.step, hidden))
        row["floor_ms"] = model.weight_bytes / bandwidth_gb_s() / 1e6
        attend = tree_of(shape["heads"], rows, context, model.dtype)
        row["with_attention"] = {"context": context, **timed(functools.partial(model.step, hidden, attend))}
        yield row


class DenseModel:
    """Weights of a Llama on the device, and its forward; attention is left out unless it is given."""

    def __init__(self, shape: Row):
        self.shape, on_gpu = shape, device().type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        hidden, inner, (heads, kv_heads, size) = shape["hidden"], shape["inner"], shape["heads"]

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=self.dtype, device=device()).mul_(columns**-0.5)

        self.layers = [
            (
                weights((heads + 2 * kv_heads) * size, hidden),
                weights(hidden, heads * size),
                weights(2 * inner, hidden),
                weights(hidden, inner),
            )
            for _ in range(shape["distinct"])
        ]
        self.lm_head = weights(shape["vocab"], hidden)
        per_layer = sum(weight.numel() for weight in self.layers[0])
        self.weight_bytes = (per_layer * shape["layers"] + self.lm_head.numel()) * self.lm_head.element_size()

    @torch.inference_mode()
    def step(self, hidden: torch.Tensor, attend: Any = None) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> the likeliest token of each row, int64 ``[num_rows]``."""
        width, (heads, _, size) = (self.shape["hidden"],), self.shape["heads"]
        for layer in range(self.shape["layers"]):
            qkv, out, gate_up, down = self.layers[layer % self.shape["distinct"]]
            projected = F.rms_norm(hidden, width) @ qkv.T
            attended = projected[:, : heads * size]
            if attend is not None:
                attended = attend(projected).flatten(1)
            hidden = hidden + attended @ out.T
            gate, up = (F.rms_norm(hidden, width) @ gate_up.T).chunk(2, dim=1)
            hidden = hidden + (F.silu(gate) * up) @ down.T
        return (F.rms_norm(hidden, width) @ self.lm_head.T).argmax(dim=1)


def tree_of(heads: tuple[int, int, int], rows: int, context: int, dtype: torch.dtype) -> Any:
    """Return an attention of ``rows`` rows, in trees of up to ``TREE_ROWS``, each with a context of its own."""
    lens = [min(TREE_ROWS, rows - first) for first in range(0, rows, TREE_ROWS)]
    num_heads, num_kv_heads, head_size = heads
    inputs = make_inputs(
        [context] * len(lens), lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=PAGE, dtype=dtype, kv_layout=TOKEN_LAYOUT, garbage=0.0, gap=0, device=device(),
    )  # fmt: skip
    for name in ("query", "tree_key", "tree_value"):
        del inputs[name]
    arguments = device_arguments(**inputs, max_context_len=context)

    def attend(projected: torch.Tensor) -> torch.Tensor:
        query, key, value = projected.unflatten(1, (-1, head_size)).split([num_heads, num_kv_heads, num_kv_heads], 1)
        tree_attention(query, tree_key=key, tree_value=value, **arguments)
        return inputs["output"]

    return attend
