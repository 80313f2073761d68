"""The V1 model runner with trees on a device: the Triton kernels of V2, the CPU values of V1."""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_specplug.config import ConfigError
from vllm_specplug.core.step import StepPlan
from vllm_specplug.hosts.attention.paged import committed_caches, level_metadata
from vllm_specplug.hosts.attention.rows import DeviceTreeRows, upload_rows
from vllm_specplug.hosts.v1.runner import TreeModelRunner
from vllm_specplug.kernels.triton_step import move_rows


class TreeDeviceModelRunner(TreeModelRunner):
    """Mixed into a V1 runner of vLLM with the attention of ``attention.paged``."""

    level_metadata = staticmethod(level_metadata)
    may_couple = False  # only the noise of vLLM's CPU sampler can be computed ahead

    def load_model(self, *args, **kwargs) -> None:
        parallel = self.parallel_config
        for used, what, fix in (
            (parallel.decode_context_parallel_size > 1, "context parallelism", "use context parallel sizes of 1"),
            (parallel.use_ubatching, "dual batch overlap", "leave --enable-dbo out"),
        ):
            if used:
                raise ConfigError(f"tree speculation does not support {what}: {fix}")
        super().load_model(*args, **kwargs)

    def initialize_kv_cache(self, *args, **kwargs) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        self._committed = committed_caches(self.alike_layers)

    def _tree_rows(self, context_lens, start, lens, mask, masked, flat_rows, all_rows) -> DeviceTreeRows:
        return upload_rows(context_lens, start, lens, mask, masked, all_rows, self.device)

    def commit(self, plan: StepPlan) -> None:
        """Move the accepted rows' key/value behind the context, in the pages."""
        if self._step.rows is None:
            return
        sources, targets = plan.source_rows.to(self.device), plan.target_rows.to(self.device)
        for group, cache, pointers in self._committed:
            move_rows(pointers, cache, self.input_batch.block_table[group].slot_mapping.gpu, sources, targets)


class TreeGPUModelRunnerV1(TreeDeviceModelRunner, GPUModelRunner):
    """vLLM's V1 runner on CUDA with draft trees."""
