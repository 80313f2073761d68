"""vLLM's layers with recurrent states on a CPU, in steps with trees: their caches, their metadata, their hooks.

vLLM is told of no drafts: a layer keeps one state per request, in the layout of plain decoding, and its metadata are
those of plain decoding.  In a step with trees the builder adds a ``StateStep``, and a hook computes by it.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.config import ConfigError
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.states import Core, StateRows, StateStep, commit_states, compute, rows_of_one_tree
from vllm_specplug.vllm.patches import Patch, apply_all

logger = logging.getLogger("vllm_specplug")

_PREPROCESS = "vllm.v1.worker.mamba_utils"

#: Where a step's metadata have the ``StateStep``.
_STEP = "specplug_states"

_LAYERS = "vllm.model_executor.layers.mamba"
#: By class, the method that computes convolution and recurrence, from inputs and an output with a row per token.
CORES = {
    f"{_LAYERS}.mamba_mixer2.MambaMixer2": "conv_ssm_forward",
    f"{_LAYERS}.short_conv.ShortConv": "forward_native",
}
_GATED_DELTA = f"{_LAYERS}.ops.cpu.gdn_attention"


def _wrap_gated_delta(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def nonspec(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out):
        step = getattr(attn_metadata_i, _STEP, None)
        if step is None:
            original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
        else:
            compute(layer, layer.prefix, step, gated_delta_core(layer), (mixed_qkv, b, a), core_attn_out)

    return nonspec


#: vLLM's operator looks this function up in its module.
GATED_DELTA = Patch(
    target=_GATED_DELTA,
    attribute="_cpu_gdn_attention_nonspec",
    parameters=("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
    reason="a custom operator calls it, and the layer has no method for it",
    wrap=_wrap_gated_delta,
)


def _wrap_preprocess(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def preprocess_mamba(scheduler_output, kv_cache_config, cache_config, *args, **kwargs):
        drafts = scheduler_output.scheduled_spec_decode_tokens
        specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        if drafts and all(spec.num_speculative_blocks == 0 for spec in specs if isinstance(spec, MambaSpec)):
            rows = scheduler_output.num_scheduled_tokens
            rows = {name: count - len(drafts.get(name, ())) for name, count in rows.items()}
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=rows)
        return original(scheduler_output, kv_cache_config, cache_config, *args, **kwargs)

    return preprocess_mamba


#: It brings a state to the block of the step's last token; a tree's states come there in the commit.
PREPROCESS = Patch(
    target=_PREPROCESS,
    attribute="preprocess_mamba",
    parameters=(
        "scheduler_output",
        "kv_cache_config",
        "cache_config",
        "mamba_state_idx",
        "input_batch",
        "requests",
        "forward_context",
        "mamba_state_copy_funcs",
        "copy_bufs",
        "align_ctx",
    ),
    reason="the runner calls it between two lines of execute_model, with the rows of drafts",
    wrap=_wrap_preprocess,
)


def gated_delta_core(layer: Any) -> Core:
    """Return the core of a layer with the gated delta rule."""
    function = GATED_DELTA.owner()._cpu_gdn_attention_nonspec

    def core(metadata: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        function(layer, metadata, *inputs, output)

    return core


def method_core(layer: Any, method: Callable[..., Any]) -> Core:
    """Return the core of a layer from its method, which finds its metadata in the forward's context."""

    def core(metadata: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        of_layers = get_forward_context().attn_metadata
        kept, of_layers[layer.prefix] = of_layers[layer.prefix], metadata
        try:
            method(*inputs, output)
        finally:
            of_layers[layer.prefix] = kept

    return core


def _has_gated_delta(layer: MambaBase) -> bool:
    return getattr(layer, "_forward_method", None) == getattr(layer, "forward_cpu", 0)


def _apply(name: str, patch: Patch) -> None:
    if problems := apply_all([patch]):
        raise ConfigError(f"tree speculation does not support {name} with this vLLM: {problems[0]}")


def hook(name: str, layer: MambaBase) -> Core:
    """Let a layer compute by the step's ``StateStep``; return its core.

    Raises:
        ConfigError: naming the layer, if it is of a kind that is not served.
    """
    if _has_gated_delta(layer):
        _apply(name, GATED_DELTA)
        return gated_delta_core(layer)
    method = CORES.get(f"{type(layer).__module__}.{type(layer).__qualname__}", "")
    if not hasattr(layer, method):
        raise ConfigError(
            f"tree speculation does not know the layer {name} ({type(layer).__name__}), which has a recurrent state; "
            "serve this model without speculation"
        )
    original = getattr(layer, method)
    core = method_core(layer, original)

    @functools.wraps(original)
    def hooked(*inputs, output, **named):
        of_layers = get_forward_context().attn_metadata
        step = getattr(of_layers.get(name), _STEP, None) if of_layers else None
        if step is None:
            return original(*inputs, output=output, **named)
        return compute(layer, name, step, core, (*inputs, *named.values()), output)

    setattr(layer, method, hooked)
    return core


class StateBuilder:
    """Mixed into vLLM's builder of metadata for a group of layers with states; see ``state_builder``."""

    supports_update_block_table = False
    #: Returns the rows of the step's trees, or None.
    rows_of_step: Callable[[], StateRows | None] = staticmethod(lambda: None)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **_: Any) -> Any:
        rows = self.rows_of_step()
        if rows is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        others = None
        if len(rows.others):
            others = super().build(0, _of_requests(common_attn_metadata, rows.others, rows.other_lens))
        return self.of_trees(
            rows, self.blocks(common_attn_metadata.block_table_tensor, rows.requests, rows.contexts), others
        )

    def of_trees(self, rows: StateRows, blocks: torch.Tensor, others: Any = None) -> Any:
        """Return metadata with a ``StateStep``; see there."""
        levels = [self.decodes(torch.arange(1, 1 + len(level.rows))) for level in rows.levels]
        metadata = copy.copy(others or levels[0])
        setattr(metadata, _STEP, StateStep(rows, others, blocks, levels))
        return metadata

    def blocks(self, table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where requests keep their state after these tokens: int64 ``[num_rows]`` all."""
        aligned = self.vllm_config.cache_config.mamba_cache_mode == "align"
        columns = positions // self.kv_cache_spec.block_size if aligned else torch.zeros_like(positions)
        return table[requests, columns].long()

    def decodes(self, blocks: torch.Tensor) -> Any:
        """Return metadata for decodes of one token on the states in these blocks: int64 ``[num_rows]``."""
        count = len(blocks)
        start = torch.arange(count + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=torch.full((count,), 2, dtype=torch.int32),  # with a state, and in the first column
            seq_lens_cpu_upper_bound=torch.full((count,), 2, dtype=torch.int32),
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=2,
            block_table_tensor=blocks.to(torch.int32).unsqueeze(1),
            slot_mapping=torch.zeros(count, dtype=torch.int64),
            is_prefilling=torch.zeros(count, dtype=torch.bool),
        )
        return super().build(0, common)


_NO_CACHES: dict[str, Any] = {
    "_num_computed_tokens_cache": None,
    "_token_to_req_indices_cache": None,
    "positions": None,
    "encoder_seq_lens": None,
    "encoder_seq_lens_cpu": None,
}


def _of_requests(common: Any, requests: torch.Tensor, lens: torch.Tensor) -> Any:
    """Return vLLM's metadata of the first rows of some requests: int64 ``[num_others]`` both, requests ascending."""
    dropped = (common.query_start_loc_cpu.diff()[requests] - lens).to(torch.int32)
    start = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)
    return common.replace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=common.seq_lens[requests] - dropped,
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[requests] - dropped,
        num_reqs=len(requests),
        num_actual_tokens=int(start[-1]),
        max_query_len=int(lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[: int(start[-1])],
        is_prefilling=common.is_prefilling[requests],
        **_NO_CACHES,
    )


def specs_for_trees(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's KV cache specs with one state per request, and with prompts in chunks that end at cached states.

    Mamba-2 asks for states from inside of a chunk, which vLLM's CPU code does not give (``IndexError`` in vLLM 0.32).
    """
    wanted = {"num_speculative_blocks": 0, "num_prefill_checkpoint_blocks": 0}
    return {
        name: replace(spec, **{one: value for one, value in wanted.items() if hasattr(spec, one)})
        if isinstance(spec, MambaSpec)
        else spec
        for name, spec in specs.items()
    }


def _state_bytes(layer: MambaBase) -> int:
    """Return the size of one state."""
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


class StateLayers:
    """The layers of a target that have recurrent states.

    Args:
        layers: by name.
        vllm_config: of the engine.

    Raises:
        ConfigError: naming a layer that is not served.
    """

    def __init__(self, layers: Mapping[str, MambaBase], vllm_config: Any):
        self._layers, self._config = dict(layers), vllm_config
        mode = vllm_config.cache_config.mamba_cache_mode
        if layers and mode not in ("none", "align"):
            raise ConfigError(f"tree speculation does not support --mamba-cache-mode {mode}: use align or none")
        if layers and vllm_config.kv_transfer_config is not None:
            raise ConfigError(
                f"tree speculation does not support KV connectors with the recurrent state of {next(iter(layers))}: "
                "leave out --kv-transfer-config"
            )
        self._plain = copy.copy(vllm_config)
        self._plain.speculative_config = None
        self._cores = {name: hook(name, layer) for name, layer in layers.items()}
        if layers:
            _apply(next(iter(layers)), PREPROCESS)
        for layer in layers.values():
            layer.num_spec = 0  # the convolution keeps as many inputs as in plain decoding
        self._builders: list[tuple[int, StateBuilder]] = []

    @property
    def names(self) -> Collection[str]:
        return self._layers.keys()

    @property
    def layers(self) -> Collection[Any]:
        return self._layers.values()

    def __bool__(self) -> bool:
        return bool(self._layers)

    def build_by(self, attn_groups: Sequence[Sequence[Any]], rows_of_step: Callable[[], StateRows | None]) -> None:
        """Replace the builders of metadata of these layers' groups."""
        sizes = [_state_bytes(layer) / 2**20 for layer in self._layers.values()]
        logger.info(
            "vllm-specplug: recurrent states take %.1f MiB per request in %d layers, and up to %.2f MiB more per tree "
            "row while a layer runs",
            sum(sizes),
            len(sizes),
            2 * max(sizes),
        )
        self._builders = []
        for group, parts in enumerate(attn_groups):
            for part in parts:
                if isinstance(part.kv_cache_spec, MambaSpec):
                    self._check_blocks(part.kv_cache_spec.block_size)
                    base = part.backend.get_builder_cls()
                    cls = type("State" + base.__name__, (StateBuilder, base), {})
                    builder = cls(part.kv_cache_spec, part.layer_names, self._plain, torch.device("cpu"))
                    builder.rows_of_step = rows_of_step
                    part.metadata_builders = [builder]
                    self._builders.append((group, builder))

    def _check_blocks(self, block_size: int) -> None:
        """A tree may reach into the next block, and no further: vLLM gives out no blocks between these."""
        rows = self._config.num_speculative_tokens + 1
        if self._config.cache_config.mamba_cache_mode == "align" and rows > block_size:
            raise ConfigError(
                f"num_speculative_tokens={rows - 1} is too large for cached prefixes of states in blocks of "
                f"{block_size} tokens: use at most {block_size - 1}, or --no-enable-prefix-caching"
            )

    def timed(self, num_rows: int) -> dict[str, Any] | None:
        """Return metadata of a step with one tree of no request, for a measurement; None without such layers."""
        if not self._layers:
            return None
        rows = rows_of_one_tree((np.arange(num_rows) - 1) // 2)
        others = get_layers_from_vllm_config(self._config, AttentionLayerBase)
        metadata: dict[str, Any] = dict.fromkeys(others)
        for _, builder in self._builders:
            metadata |= dict.fromkeys(builder.layer_names, builder.of_trees(rows, torch.zeros(1, dtype=torch.int64)))
        return metadata

    @contextmanager
    def _context(self) -> Any:
        """A forward's context for cores that look their metadata up."""
        with set_forward_context(dict.fromkeys(self._layers), self._config):
            yield

    def commit(self, attn_metadata: Mapping[str, Any], plan: StepPlan, block_table: Any) -> None:
        """Bring the states of a step's requests to their accepted tokens.

        Args:
            attn_metadata: of the step, by layer name.
            plan: of the step.
            block_table: vLLM's, by KV cache group.
        """
        with self._context():
            for group, builder in self._builders:
                layers = {name: (self._layers[name], self._cores[name]) for name in builder.layer_names}
                step = getattr(attn_metadata[builder.layer_names[0]], _STEP)
                table = block_table[group].get_device_tensor(len(plan.source_rows))
                commit_states(step, plan.source_rows, layers, functools.partial(builder.blocks, table), builder.decodes)
