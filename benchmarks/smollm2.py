"""SmolLM2-135M-Instruct in an engine of this process."""

from __future__ import annotations

import os
from typing import Any

from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.vllm.probes.in_process import start_in_process


def start_smollm2(speculative_config: dict[str, Any], dtype: str = "bfloat16", **changes: Any) -> Any:
    """Start SmolLM2-135M-Instruct as benchmarks in one process serve it; ``changes``: other arguments of ``LLM``."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    arguments = {
        "model": str(prepare()),
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "speculative_config": speculative_config,
        **changes,
    }
    return start_in_process(arguments)
