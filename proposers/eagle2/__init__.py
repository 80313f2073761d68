"""EAGLE-2: a feature-level drafter whose draft tree follows its own confidence (EAGLE-2, section 4)."""

from vllm_specplug.config import Eagle2Options
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo


def configure(options: Eagle2Options, target: TargetInfo) -> DrafterConfig:
    """Check a drafter's checkpoint against the target; vLLM loads it as one of its own EAGLE models."""
    from vllm_specplug.config import resolve_drafter
    from vllm_specplug.proposers.eagle2.checkpoint import validate_checkpoint

    path = resolve_drafter(options.model, options.method)
    info = validate_checkpoint(path, target_hidden_size=target.hidden_size, target_vocab_size=target.vocab_size)
    return DrafterConfig(options, vllm_method=info.kind, model=str(path), supports_int8=info.kind != "eagle3")


EAGLE = ModelDrafter(
    configure,
    v1="vllm_specplug.cpu.drafters.eagle:TreeEagleProposer",
    v2="vllm_specplug.gpu.drafters.eagle:TreeEagleSpeculator",
    is_vllm_model=True,
)
METHOD = Method("eagle2", Eagle2Options, model=EAGLE)
