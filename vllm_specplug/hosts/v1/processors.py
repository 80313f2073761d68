"""Logits processors and the thinking budget as in plain decoding: the walk shows them one row per request."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, build_logitsprocs
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder


@contextlib.contextmanager
def custom_processors_hidden(model_config: Any) -> Iterator[None]:
    """The host's runner raises where it finds custom processors beside a speculative config."""
    hidden, model_config.logits_processors = model_config.logits_processors, None
    try:
        yield
    finally:
        model_config.logits_processors = hidden


def restore_processors(runner: Any) -> bool:
    """Give back min_p, logit_bias and custom processors, which the host drops beside a speculative config.

    Returns:
        Whether there are custom ones, named (``--logits-processors``) or installed as the host's plugins.
    """
    config = copy.copy(runner.vllm_config)
    config.speculative_config = None
    custom = tuple(runner.model_config.logits_processors or ())
    batch = runner.input_batch
    batch.logitsprocs = build_logitsprocs(config, runner.device, PIN_MEMORY, runner.is_pooling_model, custom)
    batch.logitsprocs_need_output_token_ids = bool(custom)
    return len(list(batch.logitsprocs.all)) > len(BUILTIN_LOGITS_PROCESSORS)


def restore_thinking_budget(runner: Any) -> None:
    """Beside a speculative config, the host's thinking budget looks for its rows behind those of the drafts."""
    runner.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
        runner.vllm_config.reasoning_config, runner.max_num_reqs, 0, runner.device, PIN_MEMORY
    )
