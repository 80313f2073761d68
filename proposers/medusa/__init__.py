"""Medusa: extra heads on the target's last hidden state, drafted as a calibrated sparse tree (Medusa, section 2)."""

from vllm_specplug.proposer import Method

from .options import MedusaOptions

METHOD = Method("medusa", MedusaOptions)
