"""The expected tokens and seconds of a step, for each arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplug.budget.arms import PLAIN, Arm
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.budget.model_drafter import STEPWISE_REQUESTS
from vllm_specplug.budget.reading import Reading
from vllm_specplug.budget.regimes import Regimes

#: Calls for which an outlook is kept while the batch size stays the same: values and costs change little in 4 steps,
#: and the decision has to stay below 1% of a step at 32 requests (docs/measurements.md, *Time of the budget's
#: decision*).  The number is chosen by hand; not swept.
KEPT_CALLS = 4
#: A step without room for a node is expected to take so many times a plain one, so that its arm never runs.
NO_ROOM = 10


@dataclass(frozen=True)
class Outlook:
    """What to expect of an arm for a batch, with its best number of levels and nodes.

    Attributes:
        tokens: expected tokens of a step, over all requests.
        seconds: expected seconds of a step.
        levels, nodes: that number; nodes are per request.
    """

    tokens: float
    seconds: float
    levels: int = 0
    nodes: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Forecast:
    """Computes the outlooks of all arms from costs and values.

    Args:
        costs: of the parts of a step.
        arms: the plain one included.
        regimes: the values of the arms.
        reading: seconds that the model drafter spends on reading.
        num_nodes: largest number of nodes of a request.
        level_width: nodes of a request that each level but the first runs over.
        max_rows: most rows of a step.
        shortest_draft: see ``DraftHooks.shortest_draft``.
    """

    def __init__(
        self,
        costs: CostModel,
        arms: Sequence[Arm],
        regimes: Regimes,
        reading: Reading,
        *,
        num_nodes: int,
        level_width: int,
        max_rows: int,
        shortest_draft: float | None = None,
    ):
        self._shortest_draft = shortest_draft
        self._costs, self._arms, self._regimes, self._reading = costs, arms, regimes, reading
        self._num_nodes, self._level_width, self._max_rows = num_nodes, level_width, max_rows
        #: Number of requests, calls since, outlooks.
        self._kept: tuple[int, int, dict[Arm, Outlook]] = (0, 0, {})

    def outlooks(self, num_reqs: int) -> dict[Arm, Outlook]:
        """Return the outlooks of all arms for ``num_reqs`` requests; they are computed anew every few calls."""
        known, calls, found = self._kept
        if known != num_reqs or calls >= KEPT_CALLS:
            calls, found = 0, self._compute(num_reqs)
        self._kept = (num_reqs, calls + 1, found)
        return found

    def choice(self, num_reqs: int) -> dict[str, Any]:
        """Describe the best choice for people: batch, arm, nodes of a request, levels, expected speedup."""
        outlooks = self._compute(num_reqs)
        best = max(outlooks, key=lambda arm: outlooks[arm].rate)
        levels = 0 if best is PLAIN else self._regimes.of(num_reqs).values[best].mean()[outlooks[best].levels - 1, -1]
        return {
            "batch": num_reqs,
            "arm": best.name,
            "nodes": outlooks[best].nodes,
            "levels": round(float(levels), 2),
            "speedup": outlooks[best].rate / outlooks[PLAIN].rate,
        }

    def least_loss(self, arm: Arm, num_reqs: int) -> float:
        """Return the seconds that an arm's step takes above a plain one: one node, no model drafter."""
        costs, verify = self._costs, self._costs.verification(num_reqs)
        node = verify[min(1, len(verify) - 1)] - verify[0]
        tree = costs["tree"].at(num_reqs) - costs["sample"].at(num_reqs)
        return node + tree + costs["draft_overhead"].at(num_reqs) + arm.model_free * costs["model_free"].at(num_reqs)

    def least_by_model(self, num_reqs: int) -> float:
        """Return the seconds of the model drafter's shortest draft."""
        if self._shortest_draft is not None:
            return self._shortest_draft * float(self._costs.verification(num_reqs)[0])
        return self._costs["first_pass"].at(self._reading.first_pass_rows(num_reqs))

    def usual_draft(self, arm: Arm, num_reqs: int, levels: int, read_rows: int) -> float:
        """Return the usual seconds of a draft phase; infinity while those of the model drafter are not known.

        Args:
            arm: that drafts.
            num_reqs: requests that decode in the next step.
            levels: levels that the model drafter drafted, the first included; 0: it did not run.
            read_rows: prompt rows and missed rows that it read.
        """
        costs, reading = self._costs, self._reading
        seconds = costs["draft_overhead"].at(num_reqs) + arm.model_free * costs["model_free"].at(num_reqs)
        if levels and not costs["first_pass"].is_known:
            return math.inf
        if levels:
            seconds += reading.catch_up_seconds(reading.first_pass_rows(num_reqs) + read_rows)
            seconds += (levels - 1) * costs["level"].at(num_reqs * self._level_width)
        return seconds

    def _compute(self, num_reqs: int) -> dict[Arm, Outlook]:
        # In small batches a union's model drafter is decided on at each step, so there is no arm without it.
        stepwise = num_reqs <= STEPWISE_REQUESTS and any(arm.model and arm.model_free for arm in self._arms)
        arms = [arm for arm in self._arms if not (stepwise and arm.model_free and not arm.model)]
        return {arm: self._outlook(arm, num_reqs) for arm in arms}

    def _outlook(self, arm: Arm, num_reqs: int) -> Outlook:
        costs = self._costs
        plain = costs.plain_step(num_reqs)
        if arm is PLAIN:
            return Outlook(num_reqs, plain)
        most = min(self._num_nodes, self._max_rows // num_reqs - 1)
        if most < 1:
            return Outlook(num_reqs, NO_ROOM * plain)
        regime = self._regimes.of(num_reqs)
        values = regime.values[arm].mean()
        tokens = num_reqs * (1 + values[:, 1 : most + 1])
        seconds = costs["between_steps"].at(num_reqs) + costs.verification(num_reqs)[num_reqs * np.arange(1, most + 1)]
        seconds = seconds[None] + costs["tree"].at(num_reqs) + costs["draft_overhead"].at(num_reqs)
        if arm.model_free:
            seconds = seconds + costs["model_free"].at(num_reqs)
        if arm.model:
            levels = np.maximum(values[:, -1:] - 1, 0)
            level = costs["level"].at(num_reqs * self._level_width)
            first = costs["first_pass"].at(self._reading.first_pass_rows(num_reqs))
            share = regime.drafter.share if arm.model_free else 1.0
            seconds = seconds + share * (first + levels * level) + self._reading.prompt_seconds()
        best = int((tokens / seconds).argmax())
        levels, nodes = divmod(best, most)
        tokens, seconds = (float(np.broadcast_to(x, tokens.shape).flat[best]) for x in (tokens, seconds))
        return Outlook(tokens, seconds, levels + 1, nodes + 1)
