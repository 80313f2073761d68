"""The platform and the model runner that vLLM selects, for ``specplug doctor``."""

from __future__ import annotations


def find_platform() -> tuple[str, str]:
    """Return the name of vLLM's platform, and its kind: ``cpu``, ``cuda`` or ``other``."""
    from vllm.platforms import current_platform

    kind = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "other"
    return type(current_platform).__name__, kind


def find_runner() -> tuple[str, str]:
    """Return the model runner of an ordinary model, ``V1`` or ``V2``, and the reason."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    if forced is not None:
        return ("V2" if forced else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={int(forced)}"
    return ("V2", "Triton is present") if HAS_TRITON else ("V1", "no Triton backend for this platform")
