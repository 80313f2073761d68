"""Chooses one shape for each round of a batch on the V2 runner.

Decisions are those of ``planner``: the arm with the most expected tokens per second, and bounded trials of others.
Seconds come from ``StepTimes`` and tokens from ``AcceptanceTable``.  What came of a round arrives one or two rounds
after the next ones were planned: each outcome names the shape that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplug.budget.acceptance import AcceptanceTable
from vllm_specplug.budget.arms import PLAIN, Arm
from vllm_specplug.budget.forecast import NO_ROOM, Outlook
from vllm_specplug.budget.planner import Planner
from vllm_specplug.budget.regimes import Regime, Regimes
from vllm_specplug.budget.shapes import Shape, nodes_of
from vllm_specplug.budget.step_times import StepTimes

#: Steps of a regime that are plain whatever pays: the machine may be faster or slower than when it was measured, and
#: only a plain step shows that of plain steps.  Chosen by hand; not swept.
EARLY_PLAIN = (8, 32)


class ShapeRegimes(Regimes):
    """The regimes of batch sizes; what a shape is worth does not depend on them and is kept in ``AcceptanceTable``."""

    def __init__(self, shapes: Sequence[Shape]):
        super().__init__(shapes, 1, shapes[-1].nodes)

    def of(self, num_reqs: int) -> Regime:
        """Return the regime of a batch size."""
        return self._by_size.setdefault(num_reqs.bit_length(), Regime(self._arms[-1], {}))


class ShapeForecast:
    """Computes what to expect of each shape.

    Args:
        times: seconds of a round.
        accepted: accepted nodes.
        shapes: with drafts.
        max_rows: most rows of a step.
    """

    def __init__(self, times: StepTimes, accepted: AcceptanceTable, shapes: Sequence[Shape], max_rows: int):
        self._times, self._accepted, self._shapes, self._max_rows = times, accepted, shapes, max_rows

    def outlooks(self, num_reqs: int) -> dict[Arm, Outlook]:
        """Return the outlooks of all shapes for ``num_reqs`` requests."""
        found = {PLAIN: Outlook(num_reqs, self._times.at(0, num_reqs))}
        for shape in self._shapes:
            if num_reqs * (shape.nodes + 1) > self._max_rows:
                found[shape] = Outlook(num_reqs, NO_ROOM * found[PLAIN].seconds)
                continue
            tokens = num_reqs * (1 + self._accepted.at(shape.nodes))
            found[shape] = Outlook(tokens, self._times.at(shape.nodes, num_reqs), shape.depth, shape.nodes)
        return found


class ShapePlanner(Planner):
    """The planner of shapes.  A second is worth what the regime's shape gives, not what the last steps gave: these may
    have been trials.  A plain step on this runner already pays for the drafter's key/value, so trials may lose less."""

    trial_share, early_trial_share = 0.003, 0.004  # chosen by the simulation, benchmarks/gpu/budget_simulation.py

    def _rate(self, now: Outlook) -> float:
        return now.rate

    def _may_draft(self, missed_rows: int) -> bool:
        return True  # step times were measured at start, and trials are limited

    def _on_trial(self, outlooks: Mapping[Arm, Outlook], catch_up: float) -> Arm | None:
        if self.regime.steps in EARLY_PLAIN:
            return PLAIN
        return super()._on_trial(outlooks, catch_up)


class ShapeBudget:
    """Chooses shapes, and learns what came of them.

    Args:
        times: seconds of a round, which the caller updates by ``took``.
        shapes: with drafts, smallest first.
        max_rows: most rows of a step.

    Attributes:
        times, shapes: as given.
        accepted: accepted nodes by shape.
    """

    def __init__(self, times: StepTimes, shapes: Sequence[Shape], max_rows: int):
        self.times, self.shapes = times, tuple(shapes)
        self.accepted = AcceptanceTable(shapes)
        self._forecast = ShapeForecast(times, self.accepted, self.shapes, max_rows)
        # Costs were measured with everything warm: the first drafts tell as much as later ones.
        self._planner = ShapePlanner(self._forecast, ShapeRegimes(shapes), first_drafts=0)
        self._step = 0

    @property
    def arm(self) -> Arm:
        """The shape of batches like the last one."""
        return self._planner.regime.arm

    def plan(self, num_reqs: int) -> int:
        """Choose the nodes to draft behind this step and to verify in the next one.

        Args:
            num_reqs: requests that decode in the next step.
        """
        self._step += 1
        arm = self._planner.plan(num_reqs)
        if arm is not PLAIN:
            expected = self._forecast.outlooks(num_reqs)[arm]
            self._planner.add_draft(expected.tokens, expected.seconds)
        return nodes_of(arm)

    def learn(self, nodes: int, num_accepted: float, num_reqs: int) -> None:
        """Add what the target accepted in a step: nodes of all ``num_reqs`` requests that had ``nodes`` each."""
        if nodes in self.times.tables and nodes > 0 and num_reqs > 0:
            self.accepted.learn(nodes, num_accepted, num_reqs, self._step)

    def took(self, nodes: int, num_reqs: int, seconds: float) -> None:
        """Add the seconds of a step in which ``num_reqs`` requests had ``nodes`` each and nothing else ran."""
        if nodes in self.times.tables and num_reqs > 0:
            self.times.observe(nodes, num_reqs, seconds, self._step)

    def choice(self, num_reqs: int) -> dict[str, Any]:
        """Describe the best choice for people: batch, nodes of a request, levels, expected speedup."""
        outlooks = self._forecast.outlooks(num_reqs)
        best = max(outlooks.values(), key=lambda outlook: outlook.rate)
        speedup = best.rate / outlooks[PLAIN].rate
        return {"batch": num_reqs, "nodes": best.nodes, "levels": best.levels, "speedup": speedup}
