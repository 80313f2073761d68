"""MTP: the layers that a target has for its next tokens draft trees, level by level."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_specplug.config import GrownOptions, require_string
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo


@dataclass(frozen=True, kw_only=True)
class MtpOptions(GrownOptions):
    """Options of ``{"method": "mtp_tree"}``.

    Attributes:
        model: the checkpoint of the layers, if they are not in the target's own (Gemma 4).
    """

    method: ClassVar[str] = "mtp_tree"

    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            require_string("model", self.model)


def configure(options: MtpOptions, target: TargetInfo) -> DrafterConfig:
    """Let vLLM load the target's MTP layers; it knows which models have some."""
    return DrafterConfig(options, "mtp", options.model)


METHOD = Method(
    "mtp_tree",
    MtpOptions,
    model=ModelDrafter(
        configure,
        v1="vllm_specplug.cpu.drafters.mtp:make_drafter",
        v2="vllm_specplug.gpu.drafters.eagle:TreeEagleSpeculator",
        is_vllm_model=True,
    ),
)
