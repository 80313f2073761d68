"""SWIFT: the target drafts for itself with some of its layers left out, chosen while serving (PAPERS.md section 5)."""

from vllm_specplug.proposer import Method

from .options import SwiftOptions

METHOD = Method("swift", SwiftOptions)
