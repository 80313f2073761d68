"""vLLM's CPU worker with our V1 model runner."""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.envs as envs
from vllm.config import CompilationMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.config import ConfigError
from vllm_specplug.cpu.attention import check_layers, tree_backend_selected
from vllm_specplug.cpu.kernels.tree_attention import select_backend
from vllm_specplug.cpu.processors import custom_processors_hidden
from vllm_specplug.cpu.rotary import check_rotary_positions
from vllm_specplug.cpu.row_linear import row_linear_layers
from vllm_specplug.cpu.runner import TreeCPUModelRunner
from vllm_specplug.cpu.state_layers import StateLayers
from vllm_specplug.vllm.proof.driver import attributes
from vllm_specplug.vllm.proof.worker import ProvesTrees
from vllm_specplug.vllm.states import by_state

#: vLLM's attention on a CPU takes blocks of multiples of so many tokens.
_BLOCK_STEP = 32


class TreeCPUWorker(ProvesTrees, CPUWorker):
    """Selected through ``worker_cls`` on a CPU with the V1 runner."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            raise ConfigError("on a CPU, trees run on vLLM's V1 model runner only: set VLLM_USE_V2_MODEL_RUNNER=0")
        self._widen_blocks()
        # vLLM's own proposer of draft models, which each runner makes first, takes padded batches only.
        with attributes(self.vllm_config.speculative_config, disable_padded_drafter_batch=False):
            with custom_processors_hidden(self.model_config), _triton_operators_left_out():
                super().init_device()
            # vLLM builds its own runner inside init_device; its buffers are freed here.
            self.model_runner = TreeCPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        # Loading and compiling two models has freed some 60 MiB.  The pages of the KV cache are not touched yet.
        _return_freed_memory()
        return available

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.prepare_greedy_head()
        self.model_runner.prepare_budget()
        self.model_runner.follow_versions()
        self.model_runner.start_recording()
        _return_freed_memory()  # of the proof at start
        return times

    def shutdown(self) -> None:
        # A start that has failed may have left vLLM's own runner, or none.
        runner = getattr(self, "model_runner", None)
        if (recorder := getattr(runner, "recorder", None)) is not None:
            recorder.close()
        if (trainer := getattr(runner, "trainer", None)) is not None:
            trainer.end()
        super().shutdown()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        backend = select_backend()  # builds the op, or logs why it cannot, before the first request
        if envs.VLLM_BATCH_INVARIANT and backend != "cpp":
            raise ConfigError("VLLM_BATCH_INVARIANT=1 needs the C++ operators: install g++, or leave it out")
        linear_rows = self.vllm_config.speculative_config.specplug.linear_rows
        with tree_backend_selected(), row_linear_layers(linear_rows):
            super().load_model(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        with_states, others = by_state(layers)
        check_layers(others)
        if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            check_rotary_positions(self.model_runner.get_model())
        self.model_runner.state_layers = StateLayers(with_states, self.vllm_config)
        self._widen_blocks()  # vLLM sets the size again when it makes a drafter's configuration

    def _widen_blocks(self) -> None:
        """Take blocks of latents beside which a head can lie: without AMX vLLM takes 16 tokens, for its own kernel."""
        cache = self.vllm_config.cache_config
        if self.model_config.use_mla and cache.block_size % _BLOCK_STEP:
            cache.block_size = _BLOCK_STEP


@contextmanager
def _triton_operators_left_out() -> Iterator[None]:
    """Keep torch's operators: with VLLM_BATCH_INVARIANT=1 vLLM puts Triton kernels in their place, also on a CPU."""
    if not envs.VLLM_BATCH_INVARIANT:
        yield
        return
    try:
        module = importlib.import_module("vllm.model_executor.determinism.batch_invariant")
    except ModuleNotFoundError:
        raise ConfigError("VLLM_BATCH_INVARIANT=1 on a CPU needs vLLM 0.32 or newer: leave it out") from None
    with attributes(module, init_batch_invariance=lambda: None):
        yield


def _return_freed_memory() -> None:
    """Give memory that Python and the allocator keep for later back to the system."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
