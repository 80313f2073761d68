"""Recurrent states on a GPU: what the kernels of all kinds of layers share.

No state is kept per node.  A program begins with the request's own state, follows the path from the root to its row in
registers, and writes the row's output.  After the walk the same program follows the accepted rows and writes the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class StateTrees:
    """The trees of a forward, as layers with a recurrent state compute them.

    Attributes:
        blocks: int32 ``[num_trees]``, any stride; where each request keeps its state.
        context_lens: int32 ``[num_trees]``; cached tokens; 0: the state is empty.
        start, lens: int32 ``[num_trees]``; the tree's rows in the flat batch; 0 rows: no tree.
        bits: int64 ``[num_trees, num_rows, num_words]``, contiguous; ancestors of each row, see ``ancestor_bits``.
        max_rows: no tree has more rows.
    """

    blocks: torch.Tensor
    context_lens: torch.Tensor
    start: torch.Tensor
    lens: torch.Tensor
    bits: torch.Tensor
    max_rows: int

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return the first arguments of each kernel."""
        return (
            *(self.blocks, self.blocks.stride(0), self.context_lens, self.start, self.lens),
            *(self.bits, self.bits.stride(0), self.bits.shape[2]),
        )

    def paths(self, source_rows: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
        """Return the paths that a kernel's programs follow: accepted rows, the most rows of one, and the programs.

        Args:
            source_rows: int64 ``[num_reqs, max_emitted]``, contiguous; see ``StepPlan``; trees come first.  None: each
                row of a tree has a program, which finds its path by ``bits``.
        """
        if source_rows is None:
            return self.lens, self.max_rows, len(self.lens) * self.max_rows
        return source_rows, source_rows.shape[1], len(self.lens)


@triton.jit
def is_above(bits_ptr, row, other):
    """Whether ``other`` is on the path from the root to ``row``.

    Args:
        bits_ptr: of the row's words.
        row, other: in the tree.
    """
    word = tl.load(bits_ptr + other // 64)
    return (other < row) & (((word >> (other % 64)) & 1) != 0)


@triton.jit
def row_of_path(sources_ptr, bits_ptr, first, row, other, COMMITS: tl.constexpr):
    """Return a row of the flat batch, and whether the path has it.

    Args:
        sources_ptr: of the request's accepted rows, which are the path of a commit.
        bits_ptr: of the row's words: else the path leads from the root to before ``row``.
        first: the tree's first row in the flat batch.
        row, other: in the tree.
    """
    if COMMITS:
        flat = tl.load(sources_ptr + other)
        is_on = flat >= 0
    else:
        flat = first + other
        is_on = is_above(bits_ptr, row, other)
    return flat, is_on
