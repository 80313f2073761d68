"""SWIFT: the target drafts for itself and skips some of its sub-layers, selected while serving (SWIFT, section 4)."""

from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo

from .options import SwiftOptions, check_target


def configure(options: SwiftOptions, target: TargetInfo) -> DrafterConfig:
    """Check that the target has sub-layers to skip."""
    check_target(options, target.num_layers)
    return DrafterConfig(options)


METHOD = Method(
    "swift",
    SwiftOptions,
    model=ModelDrafter(configure, v1="vllm_specplug.cpu.drafters.swift:SwiftProposer", v2=None),
)
