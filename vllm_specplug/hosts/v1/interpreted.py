"""The V1 runner's device path on a CPU, for tests under Triton's interpreter."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.hosts.attention.interpreted import InterpretedBackend
from vllm_specplug.hosts.attention.paged_v1 import TritonBuilderV1
from vllm_specplug.hosts.v1.gpu_runner import TreeDeviceModelRunner
from vllm_specplug.hosts.v1.gpu_worker import DeviceWorkerV1
from vllm_specplug.hosts.v1.processors import custom_processors_hidden


class InterpretedBackendV1(InterpretedBackend):
    @staticmethod
    def get_builder_cls() -> type[TritonBuilderV1]:
        return TritonBuilderV1


class InterpretedModelRunnerV1(TreeDeviceModelRunner, CPUModelRunner):
    pass


class InterpretedWorkerV1(DeviceWorkerV1, CPUWorker):
    """To be asked for by ``worker_cls``."""

    def init_device(self) -> None:
        with custom_processors_hidden(self.model_config):
            super().init_device()
        self.model_runner = InterpretedModelRunnerV1(self.vllm_config, self.device)
