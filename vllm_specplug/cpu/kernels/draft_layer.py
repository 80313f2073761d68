"""The draft phase of an EAGLE head of one Llama layer on a CPU, in C++: a call for each level of a tree, or for all.

Its references are vLLM's model of such a head and ``grow_tree`` of EAGLE-2, which run where this cannot.  A
draft decides how many tokens a step emits and never which ones, so that sums may be rounded elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.types import Draft, TokenTree

#: The lowest finite float32: only values of -inf are below it.
_LOWEST = torch.finfo(torch.float32).min


class DraftLinear:
    """A linear layer that ``DraftLayer`` can call.

    Args:
        weight: what ``make_row_linear`` or ``ByteLinear`` packed.
        codes: beside weights in 12 bits.
        bias: ``[outputs]``, in the type of the inputs.
        outputs: number of them.
        scales: beside weights in 8 bits.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        codes: torch.Tensor | None,
        bias: torch.Tensor | None,
        outputs: int,
        scales: torch.Tensor | None = None,
    ):
        self.linear = _classes().DraftLinear(weight, codes, bias, outputs, scales)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of an EAGLE head of one layer, and its sizes.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``.
        cos_sin: float32 ``[num_positions, head_size]``; cosines, then sines, of the rotation by halves.
        norm: ``[hidden_size]``; between attention and MLP.
        epsilon: of the norm.
        scale: factor of the attention's scores.
        num_heads: query heads.
        fc, qkv, o, gate_up, down: the linear layers.
        max_position: the last one of a token; deeper nodes stay there.
    """

    embedding: torch.Tensor
    cos_sin: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    scale: float
    num_heads: int
    fc: DraftLinear
    qkv: DraftLinear
    o: DraftLinear
    gate_up: DraftLinear
    down: DraftLinear
    max_position: int


@dataclass(frozen=True)
class DraftVocabulary:
    """Inputs for choosing an EAGLE head's tokens.

    Attributes:
        head: the LM head; its input is a hidden state.
        ids: int64 ``[draft_vocab + num_extra]``; the target's id of each token; None: the same.
        extra_rows, other_requests: of further tokens after the head's, see ``extra_logits``; None: there are none.
    """

    head: DraftLinear
    ids: torch.Tensor | None
    extra_rows: torch.Tensor | None = None
    other_requests: torch.Tensor | None = None


class DraftLayer:
    """Runs an EAGLE head of one layer.

    Args:
        weights: its weights; they may change their contents between two draft phases.
        capacity: nodes that a request feeds to the levels of a draft phase.
        attention: vLLM's attention layer of the head.  Its pages are ``kv_cache``, of the layout ``isa``, see
            ``tree_attention``.
    """

    def __init__(self, weights: LayerWeights, capacity: int, attention: Any):
        self.capacity, self._attention = capacity, attention
        self._num_reqs = 0  # of the draft phase
        linear = (one.linear for one in (weights.fc, weights.qkv, weights.o, weights.gate_up, weights.down))
        self._layer = _classes().DraftLayer(
            weights.embedding,
            weights.cos_sin[: weights.max_position + 1].float().contiguous(),
            weights.norm,
            weights.epsilon,
            weights.scale,
            weights.num_heads,
            *linear,
            min(weights.max_position, len(weights.cos_sin) - 1),
        )

    def first(
        self,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        hidden_states: torch.Tensor,
        rows: torch.Tensor | None,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Read tokens of each request into the pages, and begin a draft phase after the last ones.

        Args:
            token_ids: int32 ``[num_reqs or more, max_len]``; tokens of each request, and the one after them.
            starts, counts: int64 ``[num_reqs]``; which tokens are read: ``[start, start + count)``, ``count`` > 0.
            hidden_states: ``[num_flat_rows, hidden_size]``; the target's.
            rows: int64 ``[sum of counts]``; the tokens' rows there, request by request; None: they are the first ones.
            block_table: int32 ``[num_reqs or more, max_blocks]``.

        Returns:
            The output of each request's last row: ``[num_reqs, hidden_size]``.
        """
        self._num_reqs = len(counts)
        pages = self._attention.kv_cache, self._attention.isa == "amx"
        return self._layer.first(token_ids, starts, counts, hidden_states, rows, *pages, block_table)

    def forward(
        self, number: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor, capacity: int = 0
    ) -> torch.Tensor:
        """Run a level, see ``proposers.eagle2.drafting.grow_tree``; ``capacity`` takes the place of the layer's.

        Args:
            number: of the level, from 0; each level has as many nodes.
            token_ids: int64 ``[num_reqs, width]``.
            features: ``[num_reqs, width, hidden_size]``.
            mask: bool ``[num_reqs, width, (number + 1) * width]``.

        Returns:
            ``[num_reqs, width, hidden_size]``.
        """
        return self._layer.level(number, token_ids, features, mask, capacity or self.capacity)

    def grow(
        self,
        root_token_ids: torch.Tensor,
        root: torch.Tensor,
        vocabulary: DraftVocabulary,
        *,
        num_nodes: int,
        draft_top_k: int,
        level_floors: list[float],
        min_node_value: float = 0.0,
    ) -> tuple[Draft, list[float], list[float]]:
        """Draft a tree for each request after ``first``, as ``grow_tree`` does with the likeliest tokens.

        Args:
            root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
            root: ``[num_reqs, hidden_size]``; what ``first`` returned.
            vocabulary: to draft from.
            num_nodes, draft_top_k, min_node_value: of ``grow_tree``.
            level_floors: of each level after the first one; the growth ends at a level that runs over nodes whose
                values sum to less, over all requests.  ``capacity`` must hold these levels.

        Returns:
            The trees; of each level after the first one that was drafted, the sum of its nodes' values; its seconds.
        """
        *tree, log_values, beams, seconds = self._layer.grow(
            root_token_ids,
            root,
            vocabulary.head.linear,
            vocabulary.ids,
            vocabulary.extra_rows,
            vocabulary.other_requests,
            num_nodes,
            draft_top_k,
            level_floors,
            math.log(min_node_value) if min_node_value > 0 else _LOWEST,
            self.capacity,
        )
        return Draft(TokenTree(*tree), log_values), beams, seconds

    def run(self, rows: int, hidden_states: torch.Tensor, is_first: bool, block_table: torch.Tensor) -> torch.Tensor:
        """Run a forward over rows of one request, to time it; a first one writes to the blocks of ``block_table``."""
        token_ids = torch.zeros(1, rows + 1, dtype=torch.int32)
        if is_first or self._num_reqs != 1:  # a level is timed after the first forward of one request
            counts = torch.tensor([rows if is_first else 1])
            output = self.first(token_ids, torch.zeros_like(counts), counts, hidden_states, None, block_table)
            if is_first:
                return output
        mask = torch.eye(rows, dtype=torch.bool).unsqueeze(0)
        features = hidden_states[:rows].unsqueeze(0)
        return self.forward(0, token_ids[:, :rows].long(), features, mask, capacity=rows).flatten(0, 1)


def _classes() -> Any:
    assert (ops := operators()) is not None
    return getattr(torch.classes, ops.__name__.rpartition(".")[2])
