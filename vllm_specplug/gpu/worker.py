"""vLLM's CUDA worker with our V2 runner."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.attention import check_layers, device_tree_backends, log_backends, use_tree_attention
from vllm_specplug.gpu.runner import TreeGPUModelRunner, install_v2
from vllm_specplug.gpu.step_times import measure_if_unknown
from vllm_specplug.vllm.proof.worker import ProvesTrees
from vllm_specplug.vllm.states import by_state


class TreeWorkerV2(ProvesTrees):
    """Mixed into a worker of vLLM."""

    def init_device(self) -> None:
        if not self.use_v2_model_runner:
            raise ConfigError(
                "vLLM fell back to its V1 model runner, which serves no trees on CUDA: remove the feature that V2 does "
                "not support (the warning above names it)"
            )
        install_v2()
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        plainly = getattr(self.model_runner, "serves_plainly", False)  # the proof failed: no step has trees
        if self.vllm_config.speculative_config.specplug.budget == "measured" and not plainly:
            measure_if_unknown(self)
        self.model_runner.speculator.start_serving()
        return times

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        chosen = self.vllm_config.attention_config.backend
        with device_tree_backends(chosen):
            super().load_model(*args, **kwargs)
        with_states, layers = by_state(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase))
        check_layers(layers)
        self.model_runner.use_states(with_states)
        log_backends(layers, chosen)
        with set_current_vllm_config(self.vllm_config):  # names the version of FlashAttention
            use_tree_attention(layers, self.vllm_config.speculative_config.specplug.tree_attention)


class TreeGPUWorker(TreeWorkerV2, Worker):
    """Selected through ``worker_cls`` on CUDA."""

    def _make_model_runner(self) -> TreeGPUModelRunner:
        return TreeGPUModelRunner(self.vllm_config, self.device)
