"""Arguments of attention: a layer's pages, and the rows of a forward that belong to trees."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from vllm_specplug.core.kv import KvScratch


class KvPages(NamedTuple):
    """The pages of a layer, and those of each request.

    Attributes:
        kv_cache: vLLM's cache of the layer, ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; the dtype of the
            queries, or a type of 8 bits.  Of latents (MLA) ``[num_blocks, 1, block_size, head_size]``.
        block_table: int32 ``[num_reqs, max_blocks]``; entries after the context are never read.
        layout: how keys and values are packed, see ``cpu.kernels.tree_attention``; ``token``: side by side.
    """

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    layout: str = "token"


@dataclass(frozen=True, kw_only=True)
class TreeRows:
    """Rows of a forward that attend by a tree mask.

    Attributes:
        context_lens: int32 ``[num_trees]``; cached tokens that every row sees.
        query_start, query_lens: int32 ``[num_trees]``; the tree's rows in the flat batch; 0 rows: no tree.
        tree_start, tree_lens: int32 ``[num_trees]``; its rows among the tree keys.
        all_rows: whether the forward has no other rows, so that vLLM's attention kernel is not needed.
        scratch: by layer name, where the tree keys are kept; None: they are the key/value of this forward.
    """

    context_lens: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    tree_start: torch.Tensor
    tree_lens: torch.Tensor
    all_rows: bool = False
    scratch: dict[str, KvScratch] | None = None

    @classmethod
    def of_level(
        cls,
        context_lens: torch.Tensor,
        tree_start: torch.Tensor,
        width: int,
        tree_len: int,
        scratch: dict[str, KvScratch],
        **fields: Any,
    ) -> Self:
        """Make the rows of a draft level: ``width`` per request, their key/value in the scratch."""
        query_start, query_lens, tree_lens = _equal_trees(len(context_lens), width, tree_len, context_lens.device)
        return cls(
            context_lens=context_lens,
            query_start=query_start,
            query_lens=query_lens,
            tree_start=tree_start,
            tree_lens=tree_lens,
            all_rows=True,
            scratch=scratch,
            **fields,
        )


@functools.lru_cache(maxsize=1024)
def _equal_trees(num_reqs: int, width: int, tree_len: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return ``query_start``, ``query_lens`` and ``tree_lens`` of a level; they are made once, and only read."""
    requests = torch.arange(num_reqs, dtype=torch.int32, device=device)
    return requests * width, torch.full_like(requests, width), torch.full_like(requests, tree_len)


@dataclass(frozen=True, kw_only=True)
class CpuTreeRows(TreeRows):
    """Tree rows for the CPU attention; all tensors are in CPU memory.

    With ``all_rows``, nothing is written to the pages before the commit.

    Attributes:
        mask: bool ``[num_trees, max_query_len, max_tree_len]``; row i attends to tree row j.
        commit_rows: int64 ``[num_rows]``: flat rows whose key/value are kept for the commit; None keeps nothing.
        kept: where they are kept, for layers that are alike: ``[num_layers, 2, num_rows, num_kv_heads, head_size]``.
        kept_of: by layer name, its part of ``kept``.
    """

    mask: torch.Tensor
    commit_rows: torch.Tensor | None = None
    kept: tuple[torch.Tensor, ...] = ()
    kept_of: dict[str, torch.Tensor] = field(default_factory=dict)

    def rows_of(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tree keys and values of a layer that ran before in this forward.

        Returns:
            Key and value, ``[num_rows, num_kv_heads, head_size]``; int32 ``[num_trees]``, each tree's first row there.
        """
        if self.scratch is not None:
            return self.scratch[layer_name].key, self.scratch[layer_name].value, self.tree_start
        key, value = self.kept_of[layer_name].unbind(0)
        return key, value, self._kept_start

    @functools.cached_property
    def _kept_start(self) -> torch.Tensor:
        assert self.commit_rows is not None
        return torch.searchsorted(self.commit_rows, self.tree_start.long(), out_int32=True)


@dataclass(frozen=True, kw_only=True)
class DeviceTreeRows(TreeRows):
    """Tree rows for the paged attention; all tensors are on the device, all numbers are Python ints on the CPU.

    Attributes:
        bits: int64 ``[num_trees, >= max_query_len, num_words]``; see ``layout.ancestor_bits``.
        max_query_len: the largest of ``query_lens``.
        max_context_len: at least the largest of ``context_lens``; None: unknown.
        uniform: whether every tree has ``max_query_len`` rows, which are the first ones of the forward.
        num_tree_rows: rows of all trees, if they come first in the forward; requests after them have no trees.
            None: unknown, or the forward has no other rows.
    """

    bits: torch.Tensor
    max_query_len: int
    max_context_len: int | None = None
    uniform: bool = False
    num_tree_rows: int | None = None
