"""vLLM's CUDA worker with our V1 model runner."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.config import ConfigError
from vllm_specplug.hosts.attention.paged import check_layers, device_tree_backends
from vllm_specplug.hosts.proof.worker import ProvesTrees
from vllm_specplug.hosts.v1.gpu_runner import TreeGPUModelRunnerV1


class DeviceWorkerV1(ProvesTrees):
    """Mixed into a worker of vLLM."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            raise ConfigError("vLLM chose its V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with device_tree_backends():
            super().load_model(*args, **kwargs)
        check_layers(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase))


class TreeGPUWorkerV1(DeviceWorkerV1, Worker):
    """Selected through ``worker_cls`` on CUDA with the V1 runner."""

    def _make_model_runner(self) -> TreeGPUModelRunnerV1:
        return TreeGPUModelRunnerV1(self.vllm_config, self.device)
