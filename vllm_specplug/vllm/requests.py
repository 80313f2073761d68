"""Rules for single requests in the schedulers of both runners: ends of turns, and namespaces of shared texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from vllm.v1.core.sched.output import NewRequestData


@dataclass
class NamedRequestData(NewRequestData):
    """vLLM's data of a new request, and the namespace in which it shares texts."""

    namespace: int = 0


def namespace_of(request: Any) -> int:
    """Return an int64 that is equal for requests which vLLM lets share prefix caches.

    It is a hash of ``cache_salt`` and the LoRA adapter; 0 without both.
    """
    lora = request.lora_request
    adapter = None if lora is None else (lora.lora_name, lora.lora_path)
    if not request.cache_salt and adapter is None:
        return 0
    digest = blake2b(repr((request.cache_salt or None, adapter)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class TreeRequestRules:
    """Mixed into a scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.scheduler_config
        if not config.enable_chunked_prefill:
            # Where vLLM 0.32 turns chunks off (latents on a CPU without AMX), it raises the tokens of a batch after it
            # has copied them to this limit: a prompt between the two would wait forever.
            self.max_num_scheduled_tokens = max(self.max_num_scheduled_tokens, config.max_num_batched_tokens)

    def name_requests(self, new_requests: list[NewRequestData]) -> None:
        """Add their namespaces to the new requests of a scheduler's output, in place."""
        for place, new in enumerate(new_requests):
            given = {field.name: getattr(new, field.name) for field in fields(new)}
            namespace = namespace_of(self.requests[new.req_id])
            new_requests[place] = NamedRequestData(**given, namespace=namespace)

    def _handle_stopped_request(self, request: Any) -> bool:
        """End a request, or a turn of a session with streamed input.

        A turn may end inside an accepted path.  As in plain decoding, the next input follows the turn's last token but
        one: the tokens after it do not count as computed.
        """
        if request.resumable:
            most = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, most)
        return super()._handle_stopped_request(request)
