"""``v2_flash_attention`` for the V1 runner."""

from __future__ import annotations

from vllm_specplug.hosts.attention.flash import TreeFlashBackend, TreeFlashMetadataBuilder
from vllm_specplug.hosts.attention.paged_v1 import NoFullGraphs


class FlashBuilderV1(NoFullGraphs, TreeFlashMetadataBuilder):
    pass


class FlashBackendV1(TreeFlashBackend):
    @staticmethod
    def get_builder_cls() -> type[FlashBuilderV1]:
        return FlashBuilderV1
