"""LoRA adapters in forwards of the target that are not vLLM's own."""

from __future__ import annotations

from typing import Any

import torch


def map_adapters(runner: Any, requests: torch.Tensor, rows_each: int) -> None:
    """Give each row of the target's next forward, and its logits, the adapter of its request.

    vLLM maps the rows of each step anew, so that nothing is restored.

    Args:
        runner: the V1 model runner.
        requests: int64 ``[n]``; batch indices.
        rows_each: rows of each request, side by side.
    """
    if runner.lora_config is None:
        return
    batch = runner.input_batch
    adapter_ids = batch.request_lora_mapping[requests.numpy()].repeat(rows_each).tolist()
    used = {batch.lora_id_to_lora_request[adapter_id] for adapter_id in adapter_ids if adapter_id}
    runner._set_active_loras(tuple(adapter_ids), tuple(adapter_ids), used)
