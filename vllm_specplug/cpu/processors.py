"""Logits processors and the thinking budget as in plain decoding, since the walk samples one row per request."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, build_logitsprocs
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

_VLLM_LOGGER = logging.getLogger("vllm.v1.sample.logits_processor")


def _is_true_here(record: logging.LogRecord) -> bool:
    """Drop vLLM's warning that min_p and logit_bias will not work: ``restore_processors`` makes them work."""
    return "won't work with speculative decoding" not in record.getMessage()


@contextlib.contextmanager
def custom_processors_hidden(model_config: Any) -> Iterator[None]:
    """Hide custom processors: vLLM's runner refuses them with a speculative config."""
    hidden, model_config.logits_processors = model_config.logits_processors, None
    _VLLM_LOGGER.addFilter(_is_true_here)
    try:
        yield
    finally:
        model_config.logits_processors = hidden
        _VLLM_LOGGER.removeFilter(_is_true_here)


def restore_processors(runner: Any) -> bool:
    """Restore min_p, logit_bias and custom processors, which vLLM drops with a speculative config.

    Returns:
        Whether there are custom ones, from ``--logits-processors`` or from plugins of vLLM.
    """
    config = copy.copy(runner.vllm_config)
    config.speculative_config = None
    custom = tuple(runner.model_config.logits_processors or ())
    batch = runner.input_batch
    batch.logitsprocs = build_logitsprocs(config, runner.device, PIN_MEMORY, runner.is_pooling_model, custom)
    batch.logitsprocs_need_output_token_ids = bool(custom)
    return len(list(batch.logitsprocs.all)) > len(BUILTIN_LOGITS_PROCESSORS)


def restore_thinking_budget(runner: Any) -> None:
    """Make a thinking budget without drafts: with a speculative config, vLLM's expects its rows after draft rows."""
    runner.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
        runner.vllm_config.reasoning_config, runner.max_num_reqs, 0, runner.device, PIN_MEMORY
    )
