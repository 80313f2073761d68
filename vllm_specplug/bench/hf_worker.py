"""Worker with Hugging Face transformers for comparison: plain and prompt-lookup decoding.

It answers the same requests as ``vllm.probes.bench_worker``; those of a batch run one after the other.  Assisted
generation with the drafters of this package is not possible: an EAGLE head reads the target's hidden states, while the
assistant of transformers is a separate language model.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_specplug.utils.chat_template import chat_ids
from vllm_specplug.utils.worker_pipe import Engine, Message, run_worker


class TokenTimes:
    """A streamer that records the time of each token; transformers passes it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Record the time of the next token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing at the end of the answer; transformers calls it."""


def answer(
    model: Any, tokenizer: Any, request: dict[str, Any], options: dict[str, Any], switches: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Answer chat messages; ``options`` are arguments of ``generate``, ``switches`` those of the chat template."""
    import torch

    prompts = []
    for text, max_tokens in zip(request["texts"], request["max_tokens"], strict=True):
        chat = [{"role": "user", "content": text}]
        ids = chat_ids(tokenizer, chat, switches)
        prompts.append(torch.tensor([ids[: options["max_length"] - max_tokens]]))
    sampling: dict[str, Any] = {"do_sample": False}
    if asked := request.get("sampling"):
        sampling = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0}
    lookup = {k: v for k, v in options.items() if k != "max_length"}
    token_ids, first, inter = [], [], []
    start = time.perf_counter()
    for prompt, max_tokens in zip(prompts, request["max_tokens"], strict=True):
        torch.manual_seed(0)
        streamer = TokenTimes()
        begin = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            streamer=streamer,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
            **lookup,
        )
        token_ids.append(output[0, prompt.shape[1] :].tolist())
        times = streamer.times[1:]  # the first is the prompt
        first.append(times[0] - begin)
        if len(token_ids[-1]) > 1:
            inter.append((times[-1] - times[0]) / (len(token_ids[-1]) - 1))
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "token_ids": token_ids, "drafts": 0, "accepted": 0}
    return figures | {"first_token_s": first, "inter_token_s": inter}


def start(arguments: Message) -> Engine:
    """Load the model, for ``run_worker``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {k: v for k, v in arguments["speculative_config"].items() if k != "method"}
    options["max_length"] = arguments["max_model_len"]
    tokenizer = AutoTokenizer.from_pretrained(arguments["model"])
    model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=getattr(torch, arguments["dtype"])).eval()

    @torch.inference_mode()
    def ask(request: Message) -> Message:
        return answer(model, tokenizer, request, options, arguments.get("chat_template_kwargs"))

    return {"ready": True}, ask


if __name__ == "__main__":
    run_worker(start)
