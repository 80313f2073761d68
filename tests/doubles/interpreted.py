"""The paged attention and the runner for devices on a CPU, under Triton's interpreter.

vLLM's own part is plain torch here: its kernels require a CUDA device, or take seconds in the interpreter.  Importing
this module makes ``device_tree_backends`` and the V2 runner select them on CPUs.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.doubles.cuda_graphs import kernel
from tests.doubles.oracle_kernels import scaled
from vllm_specplug.core.tree_rows import CpuTreeRows, KvPages
from vllm_specplug.cpu.kernels.tree_attention import tree_attention_reference
from vllm_specplug.gpu.attention import BACKENDS, TreeImpl, TreeTritonBackend, rows_in_pages
from vllm_specplug.gpu.mla import TreeTritonMLABackend, TreeTritonMLAImpl
from vllm_specplug.gpu.runner import TreeRunner
from vllm_specplug.gpu.worker import TreeWorkerV2
from vllm_specplug.vllm.speculative_config import WORKERS


class _PagedReference(TritonAttentionImpl):
    """vLLM's part; ``traits`` and what 8 bits mean come from ``TreeImpl``."""

    @kernel
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if kv_cache.dtype != key.dtype:
            key, value = self.as_stored(layer, key, value)
        written = (slot_mapping >= 0).nonzero().squeeze(1)  # a slot below 0 is padding
        slots, page = slot_mapping[written], kv_cache.shape[2]
        kv_cache[slots // page, :, slots % page] = torch.cat([key[written], value[written]], dim=-1)

    @kernel
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **_) -> torch.Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        if self.kv_sharing_target_layer_name is not None or kv_cache.dtype != key.dtype:
            key, value = rows_in_pages(kv_cache, attn_metadata.slot_mapping)
        if self.is_fp8:
            stored = self.numbers(kv_cache), self.numbers(key), self.numbers(value)
            kv_cache, key, value = scaled(*stored, self.scales(layer, query))
        start = attn_metadata.query_start_loc[:-1]
        lens = attn_metadata.query_start_loc[1:] - start
        longest = int(lens.max())
        rows = CpuTreeRows(
            context_lens=(attn_metadata.seq_lens - lens).clamp(min=0),  # shorter than its rows in a capture
            query_start=start,
            query_lens=lens,
            tree_start=start,
            tree_lens=lens,
            mask=torch.ones(len(lens), longest, longest, dtype=torch.bool).tril(),
        )
        pages = KvPages(kv_cache, attn_metadata.block_table)
        tree_attention_reference(query, output, pages, rows, key, value, self.scale, traits=self.traits)
        return output


class InterpretedImpl(TreeImpl, _PagedReference):
    pass


class InterpretedBackend(TreeTritonBackend):
    @staticmethod
    def get_impl_cls() -> type[InterpretedImpl]:
        return InterpretedImpl


class InterpretedMLAImpl(TreeTritonMLAImpl):
    """vLLM's Triton kernel in the interpreter; prompts are vLLM's code for CPUs."""

    do_kv_cache_update = kernel(CPUMLAImpl.do_kv_cache_update)


class InterpretedMLABackend(TreeTritonMLABackend):
    @staticmethod
    def get_impl_cls() -> type[InterpretedMLAImpl]:
        return InterpretedMLAImpl


BACKENDS[AttentionBackendEnum.CPU_ATTN] = f"{__name__}.InterpretedBackend"
#: vLLM chooses the second where it has AMX.
BACKENDS[AttentionBackendEnum.CPU_MLA] = f"{__name__}.InterpretedMLABackend"
BACKENDS[AttentionBackendEnum.AMX_MLA] = f"{__name__}.InterpretedMLABackend"


class InterpretedModelRunnerV2(TreeRunner, CPUModelRunnerV2):
    pass


class _CapturingWorker(CPUWorker):
    """As vLLM's worker on CUDA, which captures graphs if it is configured to, and profiles the memory before that."""

    def compile_or_warm_up_model(self):
        times = super().compile_or_warm_up_model()
        if self.model_runner.cudagraph_manager.needs_capture():
            self.model_runner.profile_run()
            self.model_runner.capture_model(profile_only=True)  # all graphs; locks no workspace, which CUDA has only
        return times


class InterpretedWorkerV2(TreeWorkerV2, _CapturingWorker):
    def init_device(self) -> None:
        super().init_device()
        # vLLM builds its own runner inside init_device; its buffers are freed here.
        self.model_runner = InterpretedModelRunnerV2(self.vllm_config, self.device)


WORKERS[True, True] = f"{__name__}.InterpretedWorkerV2"
