"""Offline generation through the host: the target answers prompts, to make training data."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tqdm import tqdm


def answer_prompts(
    target: str | os.PathLike,
    prompts: list[dict],
    out_path: str | os.PathLike,
    max_tokens: int = 320,
    max_prompt_tokens: int = 1600,
    max_num_seqs: int = 96,
    rows_per_batch: int = 384,
    dtype: str = "bfloat16",
    progress: bool = True,
) -> int:
    """Append the target's greedy answers to `prompts` ({"source", "prompt"}) to `out_path`; return tokens written.

    Resumable: the file has one line {"source", "prompt_ids", "answer_ids"} per prompt, in order, so as many prompts
    as there are lines are skipped. The prompt has the chat template applied (its head is kept where it is longer
    than `max_prompt_tokens`); the answer keeps its end token.
    """
    out_path = Path(out_path)
    done = _complete_lines(out_path)
    if done >= len(prompts):
        return 0
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    # In one process the engine's threads have all cores; a worker process leaves one to a scheduler that spins.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(target),
        dtype=dtype,
        max_model_len=max_prompt_tokens + max_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with open(out_path, "a") as out, tqdm(total=len(prompts), initial=done, unit="prompt", disable=not progress) as bar:
        for start in range(done, len(prompts), rows_per_batch):
            rows = prompts[start : start + rows_per_batch]
            prompt_ids = [_encode(tokenizer, row["prompt"])[:max_prompt_tokens] for row in rows]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], sampling, use_tqdm=False)
            for row, ids, output in zip(rows, prompt_ids, outputs, strict=True):
                answer = list(output.outputs[0].token_ids)
                written += len(answer)
                out.write(json.dumps({"source": row["source"], "prompt_ids": ids, "answer_ids": answer}) + "\n")
            out.flush()
            bar.update(len(rows))
    return written


def _encode(tokenizer, prompt: str) -> list[int]:
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def _complete_lines(path: Path) -> int:
    """Lines already there; a half-written last line (a killed run) is cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return complete.count(b"\n")
