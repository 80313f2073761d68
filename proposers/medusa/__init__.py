"""Medusa: extra heads on the target's last hidden state, drafted as a calibrated sparse tree (Medusa, section 2)."""

from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo

from .options import MedusaOptions, resolve


def configure(options: MedusaOptions, target: TargetInfo) -> DrafterConfig:
    """Check the heads against the target and read the tree's shape from the checkpoint."""
    return DrafterConfig(resolve(options, target.hidden_size, target.vocab_size), supports_int8=True)


HEADS = ModelDrafter(configure, heads="vllm_specplug.vllm.drafters.medusa:MedusaHeadsDrafter")
METHOD = Method("medusa", MedusaOptions, model=HEADS)
