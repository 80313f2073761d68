"""Medusa: extra heads on the target's last hidden state, drafted as a calibrated sparse tree (PAPERS.md section 4)."""

from vllm_specplug.proposer import Method

from .options import MedusaOptions

METHOD = Method("medusa", MedusaOptions)
