"""The measured budget of the V2 runner: the scheduler chooses the shape of the next round for the whole batch.

vLLM's scheduler says in each step how many tokens the worker drafts for the next one, and reserves their rows.  What
was accepted comes back with vLLM's own asynchronous copies of the sampled tokens, one step late: the budget reads
nothing from the device.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from typing import Any

from vllm.platforms import current_platform

from vllm_specplug.budget import saved
from vllm_specplug.budget.choose import ShapeBudget
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.gpu.rounds import facts, most_rows, shapes
from vllm_specplug.utils.environment import cpu_name
from vllm_specplug.utils.files import kept_path

logger = logging.getLogger("vllm_specplug")


def device_name() -> str:
    """Return the name of the device, without a look at it: the scheduler may run in a process without one."""
    return cpu_name() if current_platform.is_cpu() else current_platform.get_device_name()


class RoundBudget:
    """Feeds ``ShapeBudget`` from the scheduler.

    Args:
        vllm_config: vLLM's.

    Attributes:
        budget: makes the decisions; None without step times: every step is then plain.
        chosen: steps by nodes.
    """

    def __init__(self, vllm_config: Any):
        scheduler, options = vllm_config.scheduler_config, vllm_config.speculative_config.specplug
        self._facts = facts(vllm_config, device_name())
        self.budget: ShapeBudget | None = None
        self.chosen: Counter[int] = Counter()
        self._last_output = 0.0
        known = saved.load(RoundCost, self._facts, scheduler.max_num_seqs)
        if known is None:
            logger.error(
                "vllm-specplug: the step times %s are missing, and nothing is drafted: make its folder writable and "
                "start again, or use budget='fixed'",
                kept_path(saved.ROUNDS, self._facts),
            )
            return
        self.budget = ShapeBudget(known, shapes(options), most_rows(options, scheduler.max_num_batched_tokens))

    def plan(self, num_reqs: int) -> int:
        """Return the nodes to draft after this step; ``num_reqs`` requests decode in the next one."""
        nodes = 0 if self.budget is None or num_reqs == 0 else self.budget.plan(num_reqs)
        self.chosen[nodes] += 1
        return nodes

    def learn(self, scheduled_at: float, scheduler_output: Any, sampled: dict[str, int]) -> None:
        """Add a step whose output has arrived.

        Args:
            scheduled_at: time at which it was scheduled.
            scheduler_output: of the step.
            sampled: emitted tokens by request.
        """
        now, last = time.perf_counter(), self._last_output
        self._last_output = now
        if self.budget is None:
            return
        drafts = {name: len(tokens) for name, tokens in scheduler_output.scheduled_spec_decode_tokens.items() if tokens}
        by_nodes: dict[int, list[int]] = {}
        for name, nodes in drafts.items():
            if sampled.get(name):  # 0: a prompt is not read to its end yet
                by_nodes.setdefault(nodes, []).append(sampled[name] - 1)
        for nodes, accepted in by_nodes.items():
            self.budget.learn(nodes, sum(accepted), len(accepted))
        # The time of a step in which all requests did the same, from the output before it: nothing waited in between.
        rows = scheduler_output.num_scheduled_tokens
        nodes = next(iter(drafts.values()), 0)
        alike = all(count == nodes + 1 == drafts.get(name, 0) + 1 for name, count in rows.items())
        if rows and alike and last and not scheduler_output.scheduled_new_reqs:
            self.budget.cost.observe(nodes, len(rows), now - max(last, scheduled_at))


class BudgetedRounds:
    """Mixed into a scheduler of vLLM: a measured budget chooses how many tokens the worker drafts."""

    round_budget: RoundBudget | None = None
    #: The steps in flight, oldest first, and the times at which they were scheduled.
    _in_flight: deque[tuple[Any, float]]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._in_flight = deque()
        if self.vllm_config.speculative_config.specplug.budget == "measured":
            self.round_budget = RoundBudget(self.vllm_config)
            # With numbers of drafts by batch size vLLM pads no new request to the largest tree; no value counts.
            self.dynamic_sd_lookup = [0] * (self.vllm_config.scheduler_config.max_num_seqs + 1)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.round_budget is not None:
            rows = scheduler_output.num_scheduled_tokens
            decoding = sum(self._decodes_next(self.requests[name], count) for name, count in rows.items())
            scheduler_output.num_spec_tokens_to_schedule = self.round_budget.plan(decoding)
            self._in_flight.append((scheduler_output, time.perf_counter()))
        super()._update_after_schedule(scheduler_output)

    @staticmethod
    def _decodes_next(request: Any, count: int) -> bool:
        return request.num_computed_tokens + count >= request.num_tokens

    def _take(self, scheduler_output: Any) -> float:
        """Return when a step was scheduled, and forget it and older ones."""
        while self._in_flight:
            output, scheduled_at = self._in_flight.popleft()
            if output is scheduler_output:
                return scheduled_at
        return time.perf_counter()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.round_budget is not None:
            output, tokens = model_runner_output, model_runner_output.sampled_token_ids
            sampled = {name: len(tokens[place]) for name, place in output.req_id_to_index.items()} if tokens else {}
            self.round_budget.learn(self._take(scheduler_output), scheduler_output, sampled)
        return super().update_from_output(scheduler_output, model_runner_output)
