"""SWIFT: the target drafts for itself and skips some of its sub-layers, selected while serving (SWIFT, section 4)."""

from vllm_specplug.proposer import Method

from .options import SwiftOptions

METHOD = Method("swift", SwiftOptions)
