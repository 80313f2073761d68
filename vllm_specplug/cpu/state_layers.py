"""vLLM's layers with recurrent states on a CPU: their caches, their metadata, their hooks.

vLLM is told of no drafts: a layer keeps one state per request, in the layout of plain decoding.  All rows of these
layers run in our operators: ``state_cores.py``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.config import ConfigError
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.kernels.state_scan import Sequences
from vllm_specplug.cpu.state_cores import hook
from vllm_specplug.cpu.states import StateRows, StateStep, commit_states, rows_of_one_tree
from vllm_specplug.vllm.patches import Patch, apply_all
from vllm_specplug.vllm.states import state_bytes

logger = logging.getLogger("vllm_specplug")

_PREPROCESS = "vllm.v1.worker.mamba_utils"


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


def _apply_preprocess(name: str) -> None:
    if problems := apply_all([PREPROCESS]):
        raise ConfigError(f"tree speculation does not support {name} with this vLLM: {problems[0]}")


class StateBuilder(AttentionMetadataBuilder[StateStep]):
    """Builds the metadata of a group of layers with states.

    Args:
        rows_of_step: returns the rows of the step's trees, or None.
    """

    def __init__(self, rows_of_step: Callable[[], StateRows | None], *args: Any):
        super().__init__(*args)
        self._rows_of_step = rows_of_step

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StateStep:
        common, rows = common_attn_metadata, self._rows_of_step()
        scheduled = common.query_start_loc_cpu.diff().long()
        contexts, table = common.seq_lens.long() - scheduled, common.block_table_tensor
        if rows is None:
            others = self._sequences(table, torch.arange(len(scheduled)), contexts, scheduled)
            return StateStep(others, None, others.places[:0])
        others = self._sequences(table, rows.others, contexts[rows.others], rows.other_lens)
        return StateStep(others, rows, self.blocks(table, rows.requests, rows.contexts))

    def _sequences(
        self, table: torch.Tensor, requests: torch.Tensor, contexts: torch.Tensor, lens: torch.Tensor
    ) -> Sequences:
        """Return the rows of requests without trees: int64 ``[num_others]`` each."""
        places = self.blocks(table, requests, contexts + (lens - 1).clamp(min=0))
        starts = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
        return Sequences(starts, torch.where(contexts > 0, places, -1), places)

    def blocks(self, table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where requests keep their state after these tokens: int64, all of one shape."""
        aligned = self.vllm_config.cache_config.mamba_cache_mode == "align"
        columns = positions // self.kv_cache_spec.block_size if aligned else torch.zeros_like(positions)
        return table[requests, columns].long()


class StateLayers:
    """The layers of a target that have recurrent states.

    Args:
        layers: by name; none if the target has no such layers.
        vllm_config: of the engine.

    Raises:
        ConfigError: naming a layer that is not served.
    """

    def __init__(self, layers: Mapping[str, MambaBase], vllm_config: Any):
        self.layers, self._config = dict(layers), vllm_config
        mode = vllm_config.cache_config.mamba_cache_mode
        if layers and mode not in ("none", "align"):
            raise ConfigError(f"tree speculation does not support --mamba-cache-mode {mode}: use align or none")
        if layers and vllm_config.kv_transfer_config is not None:
            raise ConfigError(
                f"tree speculation does not support KV connectors with the recurrent state of {next(iter(layers))}: "
                "leave out --kv-transfer-config"
            )
        self._cores = {name: hook(name, layer) for name, layer in layers.items()}
        if layers:
            _apply_preprocess(next(iter(layers)))
        for layer in layers.values():
            layer.num_spec = 0  # the convolution keeps as many inputs as in plain decoding
        self._builders: list[tuple[int, StateBuilder]] = []

    def build_by(self, attn_groups: Sequence[Sequence[Any]], rows_of_step: Callable[[], StateRows | None]) -> None:
        """Replace the builders of metadata of these layers' groups."""
        sizes = [state_bytes(layer) / 2**20 for layer in self.layers.values()]
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
                    of_group = part.kv_cache_spec, part.layer_names, self._config, torch.device("cpu")
                    builder = StateBuilder(rows_of_step, *of_group)
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
        if not self.layers:
            return None
        rows = rows_of_one_tree((np.arange(num_rows) - 1) // 2)
        first = torch.zeros(1, dtype=torch.int64)
        step = StateStep(Sequences(first, first[:0], first[:0]), rows, first)
        others = get_layers_from_vllm_config(self._config, AttentionLayerBase)
        return dict.fromkeys(others) | dict.fromkeys(self.layers, step)

    def commit(self, attn_metadata: Mapping[str, StateStep], plan: StepPlan, block_table: Any) -> None:
        """Bring the states of a step's requests to their accepted tokens.

        Args:
            attn_metadata: of the step, by layer name.
            plan: of the step.
            block_table: vLLM's, by KV cache group.
        """
        for group, builder in self._builders:
            layers = {name: (self.layers[name], self._cores[name]) for name in builder.layer_names}
            table = block_table[group].get_device_tensor(len(plan.source_rows))
            step = attn_metadata[builder.layer_names[0]]
            commit_states(step, plan.source_rows, layers, functools.partial(builder.blocks, table))
