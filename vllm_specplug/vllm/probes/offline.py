"""Offline generation with vLLM: the target answers prompts, to make training data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_specplug.proposers.training.answers import Conversation
from vllm_specplug.proposers.training.generate import Generate, answer_conversations, load_tokenizer, resume_at
from vllm_specplug.proposers.training.precision import compute_dtype


def start_engine(
    target: str | os.PathLike,
    max_tokens: int,
    max_prompt_tokens: int,
    temperature: float = 0.0,
) -> Generate:
    """Load the target into vLLM; the returned function answers prompts of up to `max_prompt_tokens` ids."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    # In one process the engine's threads use all cores; a worker process leaves one to a scheduler that waits busily.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind

    # vLLM samples at each part of a prompt too, discards that token and resets the request's generator.  On a CPU it
    # cannot reset generators.
    whole_prompts = {"enable_chunked_prefill": False} if temperature and current_platform.is_cpu() else {}
    llm = LLM(
        str(target),
        dtype=str(compute_dtype(current_platform.device_type)).removeprefix("torch."),
        max_model_len=max_prompt_tokens + max_tokens,
        max_num_seqs=96 if current_platform.is_cpu() else 1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **whole_prompts,
    )

    def generate(prompts: list[list[int]], seeds: list[int]) -> Iterator[tuple[int, list[int]]]:
        engine = llm.llm_engine
        for index, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed if temperature else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield int(output.request_id), list(output.outputs[0].token_ids)

    return generate


def answer_prompts(
    target: str | os.PathLike,
    prompts: list[dict] | list[Conversation],
    out_path: str | os.PathLike,
    max_tokens: int = 320,
    max_prompt_tokens: int = 1600,
    temperature: float = 0.0,
    chat_template: str | None = None,
    switches: dict[str, Any] | None = None,
) -> int:
    """Append the target's answers to `prompts` ({"source", "prompt"} or conversations) to the file `out_path`.

    Returns the tokens written. Resumable: see proposers/training/generate.py. The prompt has the chat template applied
    with its `switches` (a prompt longer than `max_prompt_tokens` keeps its first tokens); the answer keeps its end
    token.

    Raises:
        ValueError: the target has no chat template.
        OSError: the file could not be written.
    """
    rows = [row if isinstance(row, Conversation) else Conversation(row["source"], [row["prompt"]]) for row in prompts]
    if resume_at(Path(out_path)) >= len(rows):
        return 0
    from vllm.platforms import current_platform

    tokenizer = load_tokenizer(target, chat_template)
    generate = start_engine(target, max_tokens, max_prompt_tokens, temperature)
    rows_per_batch = 384 if current_platform.is_cpu() else 8192  # each batch ends with few requests
    return answer_conversations(
        rows, tokenizer, generate, out_path, max_prompt_tokens, rows_per_batch, switches=switches
    )
