"""Recurrent states in a step with trees on a GPU, see ``kernels/tree_states.py``.

A request keeps one state, as in plain decoding, and vLLM's layers know of no drafts.  In a step with trees a hook runs
our kernels on the rows of trees, and vLLM's code on the requests after them.  The inputs of tree rows are kept, and the
commit computes the accepted rows anew from them.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.config import ConfigError
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.kernels.tree_states import StateTrees
from vllm_specplug.gpu.state_layers import LAYERS, TreeLayer
from vllm_specplug.vllm.states import NO_CACHES, state_bytes

logger = logging.getLogger("vllm_specplug")


@dataclass(frozen=True)
class StateStep:
    """Metadata of a layer with a recurrent state in a step with trees.

    Attributes:
        trees: they come first in the batch.
        num_tree_rows: their rows; None: all of the forward.
        others: vLLM's metadata of the requests after them; None: there are none.
        has_trees: so ``step.verify`` adds none.
    """

    has_trees: ClassVar[bool] = True
    trees: StateTrees
    num_tree_rows: int | None
    others: Any = None


class StateBuilder:
    """Mixed into vLLM's builder of metadata for a group of layers with states."""

    supports_update_block_table = False
    #: Returns the step's trees, or None.
    rows_of_step: Callable[[], DeviceTreeRows | None] = staticmethod(lambda: None)
    #: Of the last step with trees.
    step: StateStep

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **_: Any) -> Any:
        rows = self.rows_of_step()
        if rows is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build=fast_build)
        if rows.num_tree_rows is None and not rows.all_rows:
            raise RuntimeError("vLLM has scheduled prompt rows before a tree, which recurrent states do not support")
        count, others = len(rows.context_lens), None
        if not rows.all_rows:
            others = super().build(0, requests_after(common_attn_metadata, count, rows.num_tree_rows))
        blocks = common_attn_metadata.block_table_tensor[:count, 0]
        trees = StateTrees(
            blocks, rows.context_lens, rows.tree_start, rows.tree_lens, rows.bits, max_rows=rows.max_query_len
        )
        self.step = StateStep(trees, rows.num_tree_rows, others)
        return self.step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        if self.rows_of_step() is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)


def requests_after(common: Any, num_trees: int, num_rows: int) -> Any:
    """Return vLLM's metadata of the requests after the trees."""
    starts = common.query_start_loc_cpu[num_trees:] - num_rows
    return common.replace(
        query_start_loc=common.query_start_loc[num_trees:] - num_rows,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[num_trees:],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[num_trees:],
        num_reqs=common.num_reqs - num_trees,
        num_actual_tokens=common.num_actual_tokens - num_rows,
        max_query_len=int(starts.diff().max()),
        block_table_tensor=common.block_table_tensor[num_trees:],
        slot_mapping=common.slot_mapping[num_rows:],
        is_prefilling=common.is_prefilling[num_trees:],
        **NO_CACHES,
    )


def hook(name: str, layer: MambaBase) -> TreeLayer:
    """Let a layer compute by the step's ``StateStep``.

    Raises:
        ConfigError: naming the layer, if it is of a kind that is not served.
    """
    kind = LAYERS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if kind is None:
        raise ConfigError(
            f"tree speculation does not know the layer {name} ({type(layer).__name__}) on the V2 model runner, which "
            "has a recurrent state; serve this model without speculation"
        )
    tree_layer = kind(name, layer)
    original = getattr(layer, kind.method)

    @functools.wraps(original)
    def hooked(*inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        of_layers = get_forward_context().attn_metadata
        step = of_layers.get(name) if of_layers else None
        if not isinstance(step, StateStep):
            return original(*inputs, **named)
        tensors = (*inputs, *named.values())  # an input for each, and the output
        if step.others is not None:
            _compute_others(original, of_layers, name, step, tensors)
        tree_layer.compute(step.trees, step.num_tree_rows, *tensors)
        return None

    setattr(layer, kind.method, hooked)
    return tree_layer


def _compute_others(
    original: Callable[..., Any], of_layers: dict[str, Any], name: str, step: StateStep, tensors: Sequence[torch.Tensor]
) -> None:
    of_layers[name] = step.others
    try:
        original(*(one[step.num_tree_rows :] for one in tensors))
    finally:
        of_layers[name] = step


class StateLayers:
    """The layers of a target that have recurrent states.

    Args:
        layers: by name.
        vllm_config: of the engine.
        max_rows: most rows of trees in a step.

    Raises:
        ConfigError: naming what is not served.
    """

    def __init__(self, layers: Mapping[str, MambaBase], vllm_config: Any, max_rows: int):
        self._layers, self._max_rows, self._has_room = dict(layers), max_rows, False
        if layers:
            _check(vllm_config)
        self._plain = copy.copy(vllm_config)
        self._plain.speculative_config = None
        self._tree_layers = {name: hook(name, layer) for name, layer in layers.items()}
        for layer in layers.values():
            layer.num_spec = 0  # the convolution keeps as many inputs as in plain decoding
        self._builders: list[StateBuilder] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def make_room(self) -> None:
        """Allocate what tree rows leave for the commit, once; called where vLLM measures the memory of a step."""
        if not self._layers or self._has_room:
            return
        self._has_room = True
        kept = sum(layer.make_room(self._max_rows) for layer in self._tree_layers.values())
        logger.info(
            "vllm-specplug: recurrent states take %.1f MiB per request in %d layers, whatever the number of nodes; the "
            "inputs of up to %d tree rows take %.1f MiB",
            sum(map(state_bytes, self._layers.values())) / 2**20,
            len(self._layers),
            self._max_rows,
            kept / 2**20,
        )

    def build_by(self, attn_groups: Sequence[Sequence[Any]], rows_of_step: Callable[[], DeviceTreeRows | None]) -> None:
        """Replace the builders of metadata of these layers' groups."""
        self._builders = []
        for part in (part for parts in attn_groups for part in parts if isinstance(part.kv_cache_spec, MambaSpec)):
            base = part.backend.get_builder_cls()
            cls = type("State" + base.__name__, (StateBuilder, base), {})
            device = next(iter(self._layers.values())).kv_cache[0].device
            builder = cls(part.kv_cache_spec, part.layer_names, self._plain, device)
            builder.rows_of_step = rows_of_step
            part.metadata_builders = [builder]
            self._builders.append(builder)

    def compile_kernels(self, rows: DeviceTreeRows) -> None:
        """Launch each kernel on trees without rows, so that no step waits for its compilation."""
        blocks = torch.zeros_like(rows.tree_lens)
        none = StateTrees(blocks, rows.context_lens, rows.tree_start, torch.zeros_like(blocks), rows.bits, max_rows=1)
        sources = torch.full((len(blocks), 2), -1, device=blocks.device)
        for layer in self._tree_layers.values():
            layer.compute(none, 1, *layer.empty_inputs())
            layer.commit(none, sources)

    def commit(self, source_rows: torch.Tensor) -> None:
        """Bring the states of the step's trees to the accepted rows: int64 ``[num_reqs, max_emitted]``, see
        ``StepPlan``."""
        for builder in self._builders:
            for name in builder.layer_names:
                self._tree_layers[name].commit(builder.step.trees, source_rows)


def _check(vllm_config: Any) -> None:
    cache = vllm_config.cache_config
    for used, what, fix in (
        (cache.mamba_cache_mode != "none", "prefix caching", "use --no-enable-prefix-caching"),
        (vllm_config.kv_transfer_config is not None, "KV connectors", "leave out --kv-transfer-config"),
        (vllm_config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism", "use tensor parallelism"),
        (getattr(cache, "use_replayssm", False), "--use-replayssm", "leave it out"),
        (
            getattr(vllm_config.mamba_config, "enable_stochastic_rounding", False),
            "states that are rounded at random",
            "leave out --enable-mamba-cache-stochastic-rounding",
        ),
    ):
        if used:
            raise ConfigError(
                f"tree speculation on a target with recurrent states does not support {what} on the V2 model runner: "
                f"{fix}"
            )
