"""MTP: the layers that a target has for its next tokens draft trees, level by level."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_specplug.config import GrownOptions
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo


@dataclass(frozen=True, kw_only=True)
class MtpOptions(GrownOptions):
    """Options of ``{"method": "mtp_tree"}``."""

    method: ClassVar[str] = "mtp_tree"


def configure(options: MtpOptions, target: TargetInfo) -> DrafterConfig:
    """Let vLLM load the target's MTP layers; it knows which models have some."""
    return DrafterConfig(options, "mtp")


METHOD = Method(
    "mtp_tree",
    MtpOptions,
    model=ModelDrafter(
        configure,
        v1="vllm_specplug.cpu.drafters.eagle:TreeEagleProposer",
        v2="vllm_specplug.gpu.drafters.eagle:TreeEagleSpeculator",
        is_vllm_model=True,
    ),
)
