"""The V2 model runner with trees; the phases of a step are in ``step``, and these overrides of vLLM call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_specplug.config import ConfigError, model_drafter
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu import step
from vllm_specplug.gpu.attention import check_caches, committed_caches, compile_kernels, tell_builders
from vllm_specplug.gpu.draft_sampling import most_children
from vllm_specplug.gpu.draft_tokens import TreeDraftTokensHandler
from vllm_specplug.gpu.drafters.base import TreeSpeculator
from vllm_specplug.gpu.drafters.model_free import ModelFreeSpeculator
from vllm_specplug.gpu.late_trace import LateTrace
from vllm_specplug.gpu.rounds import most_rows
from vllm_specplug.gpu.sampler import TreeRejectionSampler
from vllm_specplug.gpu.scheduler import answer_ends
from vllm_specplug.gpu.settling import RejectionSettling, TypicalSettling
from vllm_specplug.gpu.slot_params import SlotParams
from vllm_specplug.gpu.states import StateLayers
from vllm_specplug.gpu.tree_graphs import wrap_init_candidates
from vllm_specplug.proposer import find_method
from vllm_specplug.proposers.eagle2.layout import AUX_KEY
from vllm_specplug.types import Walk
from vllm_specplug.utils.frames import with_room
from vllm_specplug.utils.lazy import load
from vllm_specplug.vllm.kv_groups import alike_layers
from vllm_specplug.vllm.patches import Patch, apply_all
from vllm_specplug.vllm.ranks import leads
from vllm_specplug.vllm.states import by_state, specs_for_trees


def _wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config, device, req_states):
        options = getattr(vllm_config.speculative_config, "specplug", None)
        if options is None:
            return original(vllm_config, device, req_states)
        drafter = model_drafter(options)
        speculator = ModelFreeSpeculator if drafter is None else load(find_method(drafter.method).model.v2)
        return speculator(vllm_config, device, req_states)

    return init_speculator


PATCHES = (
    Patch(
        target="vllm.v1.worker.gpu.model_runner",
        attribute="init_speculator",
        parameters=("vllm_config", "device", "req_states"),
        reason="vLLM's list of speculators is closed, and its runner accepts no other",
        wrap=_wrap_init_speculator,
    ),
    Patch(
        target="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        attribute="_init_candidates",
        parameters=("self",),
        reason="vLLM makes its managers itself, and derives full graphs from the sizes of its piecewise ones",
        wrap=wrap_init_candidates,
    ),
)


def install_v2() -> None:
    """Apply the patches of the V2 runner.

    Raises:
        ConfigError: the runner of this vLLM has other signatures.
    """
    if problems := apply_all(PATCHES):
        raise ConfigError("tree speculation cannot run on the V2 model runner of this vLLM: " + "; ".join(problems))


class TreeModelState:
    """vLLM's model state; it adds the trees to the attention metadata of target layers.

    Layers with a recurrent state have theirs from ``StateBuilder``, which reads ``rows``.
    """

    #: The trees of the step, or of a recorded graph; None: it has none.
    rows: DeviceTreeRows | None = None

    def __init__(self, inner: Any, runner: TreeRunner):
        self._inner, self._runner = inner, runner
        self._trees, self._draft_layers = runner.speculator.trees, runner.speculator.draft_attn_layer_names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        rows = self.rows = self._stage(input_batch, cudagraph_mode, for_capture)
        metadata = self._inner.prepare_attn(input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs)
        if rows is None or (cudagraph_mode == CUDAGraphMode.FULL and not for_capture):
            return metadata  # a replayed graph reads the buffers that it was recorded with
        return step.verify(metadata, rows, self._draft_layers)

    def prepare_inputs(self, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self._inner.prepare_inputs(input_batch, *args, **kwargs)
        if "positions" in inputs:  # M-RoPE; computed from the flat positions
            self._trees.move_positions(input_batch, inputs["positions"])
        return inputs

    def _stage(self, input_batch: Any, cudagraph_mode: CUDAGraphMode, for_capture: bool) -> DeviceTreeRows | None:
        trees, num_reqs = self._trees, input_batch.num_reqs_after_padding
        if for_capture:
            # A uniform batch of that many tokens will be replayed with trees.
            width, rest = divmod(input_batch.num_tokens_after_padding, num_reqs)
            uniform = rest == 0 and width - 1 in self._runner.speculator.depths
            return trees.stage_for_capture(num_reqs, width, self._inner.max_model_len) if uniform else None
        rows = step.stage(trees, input_batch)
        if rows is not None:
            self._runner.speculator.timer.begin_step()
        if cudagraph_mode == CUDAGraphMode.FULL and (rows is None or not rows.all_rows):
            longest = int(input_batch.num_scheduled_tokens.max())
            if longest > 1:
                raise RuntimeError(f"a CUDA graph recorded for trees would run other rows (query length {longest})")
        return rows


class TreeRunner:
    """Mixed into a V2 runner of vLLM; ``step`` has the phases of a step."""

    speculator: TreeSpeculator
    #: int ``[num_reqs]`` of the step: rows of each request that have logits; None: one each.
    _num_logits: np.ndarray | None = None
    _slot_params: SlotParams
    trace: LateTrace
    #: The target's layers with recurrent states; set when it is loaded.
    state_layers: StateLayers

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._check_config()
        if (self.speculative_config.draft_entries or {}).get(AUX_KEY) == []:
            self.use_aux_hidden_state_outputs = False  # of an EAGLE-3 head that reads the last hidden state
        super().load_model(*args, **kwargs)
        self.speculator.load_heads(self.model)
        self.model_state = TreeModelState(self.model_state, self)
        self.draft_tokens_handler = TreeDraftTokensHandler(self.device, self.speculator.trees)
        options, trees = self.speculative_config.specplug, self.speculator.trees
        self.trace = LateTrace(options.trace_trees if leads() else None, self.device)
        params = self._slot_params = self.speculator.slot_params = SlotParams(options, self.sampler, self.device)
        settling = None
        if params.rejects:
            settling = RejectionSettling(
                *(params, trees, self.sampler),
                proposals=self.speculator.proposals,
                num_children=most_children(self.speculator.options),
            )
        elif options.verification == "typical":
            settling = TypicalSettling(params, trees, self.sampler)
        self.rejection_sampler = TreeRejectionSampler(
            *(self.sampler, self.speculative_config, self.device, self, trees, settling, self.trace),
            learning=self.speculator.learning,
        )

    def _check_config(self) -> None:
        for used, what, fix in (
            (self.model_config.return_sampling_mask, "sampling masks", "leave return_sampling_mask out"),
            (self.model_config.enable_trace_replay, "trace replay", "leave enable_trace_replay out"),
            # vLLM warms up again when it changes the replicas, and the proof at start then forgets running requests.
            (self.parallel_config.enable_elastic_ep, "elastic expert parallelism", "leave out --enable-elastic-ep"),
            (self.vllm_config.watermark_config is not None, "watermarks", "leave the watermark config out"),
            (
                self.parallel_config.prefill_context_parallel_size > 1
                or self.parallel_config.decode_context_parallel_size > 1,
                "context parallelism",
                "use context parallel sizes of 1",
            ),
            (
                self.compilation_config.cudagraph_mode is not None
                and self.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL,
                "full CUDA graphs of mixed batches",
                "use cudagraph_mode FULL_AND_PIECEWISE",
            ),
        ):
            if used:
                raise ConfigError(f"tree speculation does not support {what} on the V2 model runner: {fix}")

    def add_requests(self, scheduler_output: Any) -> None:
        added = scheduler_output.scheduled_new_reqs
        known = [new.req_id for new in added]  # before they are added: sessions, whose last turn has ended
        self.speculator.finish(known, answer_ends(scheduler_output))
        super().add_requests(scheduler_output)
        if added:
            for new in added:
                slot = self.req_states.req_id_to_index[new.req_id]
                self._slot_params.add(slot, new.sampling_params, getattr(new, "namespace", 0))  # the proof's have none
            self._slot_params.upload()

    def finish_requests(self, scheduler_output: Any) -> None:
        # Their places are given away below.
        self.speculator.finish(scheduler_output.finished_req_ids, answer_ends(scheduler_output))
        super().finish_requests(scheduler_output)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.trace.close()
        super().shutdown(*args, **kwargs)

    @with_room
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(*args, **kwargs)

    @with_room
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample_tokens(*args, **kwargs)

    def prepare_attn(self, input_batch: Any) -> Any:
        self._num_logits = np.diff(input_batch.cu_num_logits_np)
        return super().prepare_attn(input_batch)

    def _set_active_loras(self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # vLLM gives the logits of one row per request the adapter's LM head; each row of a tree has logits.
        if self._num_logits is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, self._num_logits).tolist())
            self._num_logits = None
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Profile the memory of sampling: each row of a tree has logits, vLLM's own run has one row per request."""
        most = most_rows(self.speculative_config.specplug, self.max_num_tokens)
        num_rows = min(max(most, self.max_num_reqs), self.max_num_reqs * self.speculator.trees.width)
        logits = self.model.compute_logits(hidden_states.new_zeros(num_rows, hidden_states.shape[1]))
        super()._dummy_sampler_run(hidden_states)
        if logits is not None:  # one chunk, as the rejection sampler copies it
            logits[: get_max_chunk_logits(logits.shape[1])].to(torch.float32, copy=True)

    def use_states(self, layers: dict[str, Any]) -> None:
        """Serve these layers with recurrent states; called when the target is loaded.

        Raises:
            ConfigError: naming what is not served.
        """
        if (odd := next(iter(self.speculator.draft_attn_layer_names & layers.keys()), None)) is not None:
            raise ConfigError(f"no trees are drafted by layers with a recurrent state ({odd}): use another drafter")
        most = most_rows(self.speculative_config.specplug, self.max_num_tokens)
        rows = min(most, self.max_num_reqs * self.speculator.trees.width)
        self.state_layers = StateLayers(layers, self.vllm_config, rows)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return specs_for_trees(super().get_kv_cache_spec())

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        self.state_layers.make_room()
        super().profile_run(*args, **kwargs)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        _, layers = by_state(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase))
        check_caches(layers, self.speculative_config.specplug.tree_attention)
        compile_kernels(layers, self.speculator.trees.bits, self.max_model_len)
        target = {name: layer for name, layer in layers.items() if name not in self.speculator.draft_attn_layer_names}
        self._committed = committed_caches(alike_layers(self.kv_cache_config, target))
        tell_builders(self.attn_groups, lambda: self.model_state.rows)
        if self.state_layers:
            self.state_layers.make_room()
            self.state_layers.build_by(self.attn_groups, lambda: self.model_state.rows)
            self.state_layers.compile_kernels(self.speculator.trees.stage_for_capture(1, 1, self.max_model_len))

    def commit(self, walk: Walk) -> None:
        """Commit the accepted rows; the step's trees were then walked."""
        trees = self.speculator.trees
        step.commit(trees, walk, self._committed, self.block_tables.slot_mappings)
        self.state_layers.commit(trees.plan.source_rows)
        self.speculator.timer.end_step()


class TreeGPUModelRunner(TreeRunner, GPUModelRunner):
    """vLLM's V2 runner on CUDA with draft trees."""
