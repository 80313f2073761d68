"""``v2_flash_attention`` for the V1 runner."""

from __future__ import annotations

from vllm_specplug.hosts.v1_gpu_attention import NoFullGraphs
from vllm_specplug.hosts.v2_flash_attention import TreeFlashBackend, TreeFlashMetadataBuilder


class FlashBuilderV1(NoFullGraphs, TreeFlashMetadataBuilder):
    pass


class FlashBackendV1(TreeFlashBackend):
    @staticmethod
    def get_builder_cls() -> type[FlashBuilderV1]:
        return FlashBuilderV1
