"""Code that EAGLE drafters of both model runners share: logits of drafted nodes, and the forwards of draft levels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_specplug.core.kv import DraftScratch
from vllm_specplug.cpu.row_linear import row_linear_layers
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.vllm.drafters.draft_head import DraftHead
from vllm_specplug.vllm.drafters.target_parts import TargetHead


class EagleScorer:
    """Computes logits over the drafter's vocabulary.

    Args:
        model: vLLM's draft model.
        target_head: of which a draft vocabulary takes its rows.
        in_int8: whether those rows are quantised, see ``DraftHead``.

    Attributes:
        draft_ids: int64 ``[draft_vocab]``; the target's token id of each logit; None: the target's own vocabulary.
    """

    def __init__(self, model: Any, target_head: TargetHead, in_int8: bool):
        self._model, self._target_head, self._in_int8 = model, target_head, in_int8
        d2t, own = getattr(model, "d2t", None), getattr(model, "draft_id_to_target_id", None)
        self._has_own_head = d2t is None and own is not None  # EAGLE-3
        offsets = own if d2t is None else d2t
        self.draft_ids = None if offsets is None else target_ids(offsets.data).to(target_head.device)
        # With several ranks, no rank has all rows of the target's head.
        shares = d2t is not None and get_tensor_model_parallel_world_size() == 1
        self.head = DraftHead(target_head.rows(self.draft_ids), in_int8) if shares else None

    def over(self, draft_ids: torch.Tensor) -> EagleScorer:
        """Return a scorer over another draft vocabulary: int64 ``[draft_vocab]``, token ids of the target."""
        other = copy.copy(self)
        other.draft_ids = draft_ids.to(self._target_head.device)
        if self.head is not None:
            with row_linear_layers(getattr(self.head, "linear_rows", 0), is_bounded=False):
                other.head = DraftHead(self._target_head.rows(other.draft_ids), self._in_int8)
        return other

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, draft_vocab]``."""
        if self.head is not None:
            return self.head(hidden)
        if self._has_own_head:
            return self._model.logits_processor(self._model.lm_head, hidden)
        logits = self._model.compute_logits(hidden)
        return logits if self.draft_ids is None else logits[:, self.draft_ids]


class LevelScratch:
    """Key/value of drafted nodes, for all draft layers; each request has room for the nodes of one tree.

    Args:
        vllm_config: vLLM's configuration.
        layer_names: the draft layers.
        capacity: rows of one request.
        device: of the layers.
    """

    def __init__(self, vllm_config: Any, layer_names: Collection[str], capacity: int, device: torch.device):
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
        shapes = {name: (layer.impl.num_kv_heads, layer.impl.head_size) for name, layer in layers.items()}
        self.vllm_config, self.layer_names, self.device = vllm_config, tuple(shapes), device
        plain = vllm_config.model_config.dtype  # of latents
        dtypes = {name: getattr(layer, "kv_cache_torch_dtype", plain) for name, layer in layers.items()}
        self.scratch = DraftScratch(shapes, dtypes, device)
        self.capacity = capacity
        self._places: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def places(self, num_reqs: int, width: int, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the nodes of a level are in the scratch; the tensors are made once, and only read.

        Returns:
            int32 ``[num_reqs]``, each request's first row; int64 ``[num_reqs * width]``, the rows of the level.
        """
        key = num_reqs, width, level
        if key not in self._places:
            first = torch.arange(num_reqs, device=self.device) * self.capacity
            columns = torch.arange(level * width, (level + 1) * width, device=self.device)
            self._places[key] = first.to(torch.int32), (first.unsqueeze(1) + columns).flatten()
        return self._places[key]


class EagleLevels:
    """The drafter's forwards after its first one, for one draft phase.

    Args:
        model: vLLM's draft model.
        scratch: where the levels keep their key/value.
        positions: int64 ``[num_reqs]`` (with M-RoPE ``[num_dims, num_reqs]``); of each request's newest accepted row.
        context_lens: int32 ``[num_reqs]``; tokens up to that row.
        block_table: int32 ``[>= num_reqs, max_blocks]``.
        max_num_reqs: requests that the scratch must hold.
        level_metadata: makes a level's attention metadata.
        place: copies the positions of a level to where the model must read them; None: it reads them anywhere.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scratch: LevelScratch,
        positions: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_num_reqs: int,
        level_metadata: Callable[..., Any],
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self._model, self._scratch, self._level_metadata = model, scratch, level_metadata
        self._positions, self._block_table = positions, block_table[: len(context_lens)]
        self._context_lens, self._place = context_lens, place
        self._size = max_num_reqs * scratch.capacity
        self._max_position = scratch.vllm_config.model_config.max_model_len - 1

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        """Run the drafter over the nodes of one level, see ``proposers.eagle2.drafting.grow_tree``."""
        # All nodes of a level share a position.
        positions = (self._positions + level + 1).repeat_interleave(token_ids.shape[1], dim=-1)
        num_reqs, width = token_ids.shape
        tree_start, rows = self._scratch.places(num_reqs, width, level)
        scratch = self._scratch.scratch.at(rows, self._size)
        metadata = self._level_metadata(self._block_table, self._context_lens, tree_start, mask, scratch)
        # Near max_model_len the last nodes cannot be emitted anyway.
        positions = positions.clamp(max=self._max_position)
        if self._place is not None:
            positions = self._place(positions)
        return run_level(self._model, self._scratch, token_ids, features, positions, metadata)


def keep_output(model: torch.nn.Module, keep: Callable[[Any], None]) -> None:
    """Pass each output of a drafter to ``keep``.  A class that vLLM compiles as a whole calls no hooks."""
    kind = type(model)
    if kind.__call__ is torch.nn.Module.__call__:
        model.register_forward_hook(lambda _model, _args, output: keep(output))
        return

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        keep(output)
        return output

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def pair_of(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a drafter's input of the LM head, and of its next level; many have the same for both."""
    return output if isinstance(output, tuple) else (output, output)


def run_level(
    model: torch.nn.Module,
    scratch: LevelScratch,
    token_ids: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    metadata: Any,
) -> DraftFeatures:
    """Run the drafter over token ids ``[num_reqs, width]`` and features ``[num_reqs, width, hidden_size]``."""
    layers = dict.fromkeys(scratch.layer_names, metadata)
    return run_forward(model, scratch.vllm_config, token_ids, features, positions, layers)


def run_forward(
    model: Callable[..., Any],
    vllm_config: Any,
    token_ids: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    metadata: dict[str, Any],
) -> DraftFeatures:
    """Run the drafter as ``run_level`` does, with attention metadata by layer name."""
    with set_forward_context(metadata, vllm_config, num_tokens=token_ids.numel(), slot_mapping={}):
        output = model(
            input_ids=token_ids.flatten().to(torch.int32),
            positions=positions,
            hidden_states=features.flatten(0, 1),
            inputs_embeds=None,
        )
    score, feed = pair_of(output)
    return DraftFeatures(score.unflatten(0, token_ids.shape), feed.unflatten(0, token_ids.shape))
