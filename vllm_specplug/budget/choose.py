"""Chooses what to draft and what to verify, so that the batch emits the most tokens per second.

Three calls decide: ``plan`` before the draft phase (which drafters run, and the floors of their levels), ``select``
after it (which nodes are verified), and between them, for a union, ``wants_model``.  ``learn`` takes one record per
step.  Time is counted in *plain steps*: the seconds that a step without drafts takes for the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specplug.budget.acceptance import NodeAcceptance, ScoredDraft, ShapeAcceptance
from vllm_specplug.budget.cost import RoundCost, StepCost
from vllm_specplug.budget.planner import PLAIN, Arm, Outlook, Planner
from vllm_specplug.budget.shapes import Shape
from vllm_specplug.budget.worth import FIRST_TIMES, LevelYields, Worth
from vllm_specplug.types import Draft

#: Probability that the target accepts the next node of a chain, before any draft was seen: the EAGLE heads of
#: docs/measurements.md (*Drafters and their training*) reach 0.60 to 0.66 by level.
FIRST_ACCEPTANCE = 0.6
#: Plain steps that a draft phase is assumed to take beside its forwards, before one was seen; not measured.
OVERHEAD = 0.05
#: A draft phase that took so many times as long as usual was interrupted, and counts as so many.
DISTURBED = 2.0
#: Share of the plain steps that drafts may lose, and plain steps that they may lose at first (docs/options.md).
SHARE, FIRST_LOSS = 0.01, 3.0
#: Most plain steps that are saved up; an arm that was seen with 40 requests may owe as many.
MOST_STEPS, KNOWN_REQUESTS = 16.0, 40.0
#: Edges of the classes of steps in which the model drafter of a union pays or not: tokens that the others expect.
CLASS_EDGES = np.array([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
#: Tokens that the model drafter of a union added in a class, and steps: the start, which is forgotten in 1000 steps.
CLASS_START = np.array([0.6 * 8, 8.0])


@dataclass(frozen=True)
class Plan:
    """Limits of a draft phase.

    Attributes:
        arm: drafters that run.
        floors: of each level after the first, the sum that the values of its nodes must reach; empty: draft all.
        seconds: that the model drafter may take.
    """

    arm: Arm
    floors: tuple[float, ...] = ()
    seconds: float = math.inf


#: A fixed budget: every drafter of the method drafts all that the options allow.
EVERYTHING = Plan(Arm("everything", model=True, model_free=True))


@dataclass
class StepRecord:
    """Record of a step and of the draft phase after it.

    Attributes:
        num_reqs, num_nodes: requests, and nodes verified of all.
        num_prompt_rows: rows of the step if any is of a prompt, else 0.
        num_accepted: nodes accepted of all requests.
        drafting, by_model, catching_up: seconds of the draft phase; of the model drafter; for the rows that it missed.
        searching: seconds after the draft phase in which the model drafter looked for better drafts (SWIFT).
        num_read, read_seconds: rows of the model drafter's first forward, and its seconds.
        level_rows, level_seconds: rows of each further level, and the seconds of each.
        beams: of each further level, the sum that its floor was compared with.
    """

    num_reqs: int = 0
    num_nodes: int = 0
    num_prompt_rows: int = 0
    num_accepted: int = 0
    drafting: float = 0.0
    by_model: float = 0.0
    catching_up: float = 0.0
    searching: float = 0.0
    num_read: int = 0
    read_seconds: float = 0.0
    level_rows: int = 0
    level_seconds: list[float] = field(default_factory=list)
    beams: list[float] = field(default_factory=list)


class Budget:
    """Decides in each step of a runner whose trees may have any size, and learns from the outcome.

    Args:
        cost: seconds of steps; updated here.
        arms: sets of drafters that can run, the one with most drafters last.
        num_nodes: largest number of nodes of a request.
        max_levels: levels that the model drafter drafts one by one; 1 if it drafts all at once.
        level_width: nodes of a request that each level but the first runs over.
        max_rows: most rows of a step.
        shortest_draft: plain steps of the model drafter's shortest draft; None: that of its first forward.
    """

    def __init__(
        self,
        cost: StepCost,
        arms: Sequence[Arm],
        *,
        num_nodes: int,
        max_levels: int,
        level_width: int,
        max_rows: int,
        shortest_draft: float | None = None,
    ):
        self.cost, self.arms = cost, (PLAIN, *arms)
        self._num_nodes, self._level_width, self._max_rows = num_nodes, level_width, max_rows
        self._max_levels, self._shortest_draft = max_levels, shortest_draft
        self.planner = Planner(arms[-1])
        self.acceptance = NodeAcceptance(len(self.arms))
        #: Plain steps that drafts may still lose.
        self.left = FIRST_LOSS
        self.running, self._num_reqs, self._missed_rows = PLAIN, 0, 0
        #: By bit length of the number of requests and name of the arm.
        self.worth: dict[tuple[int, str], Worth] = {}
        self._yields = LevelYields(max(max_levels - 1, 1))
        self._allowed_levels = 1
        #: Of a union's model drafter for one request: its time, and the tokens that it added by class.
        self._by_model = Worth(np.zeros(1), 0.0)
        self._gains, self._class = np.tile(CLASS_START, (len(CLASS_EDGES) + 1, 1)), -1
        self._steps, self._last_step = 0, {True: 0, False: 0}

    # ---- expectations

    def worth_of(self, arm: Arm, num_reqs: int) -> Worth:
        """Return the record of an arm; in batches of a new size, an estimate from the next smaller ones."""
        key = num_reqs.bit_length(), arm.name
        if key not in self.worth:
            found = self._first_worth(arm, num_reqs)
            known = [size for size, name in self.worth if name == arm.name and size < key[0]]
            if known:
                found.gains[:] = self.worth[max(known), arm.name].gains
            self.worth[key] = found
        return self.worth[key]

    def _first_worth(self, arm: Arm, num_reqs: int) -> Worth:
        """Return the expected gain of chains of the best length at ``FIRST_ACCEPTANCE``."""
        steps, plain, levels = self.cost.verification(num_reqs), self.cost.plain(num_reqs), self._levels(arm)
        by_level = arm.model and self._max_levels > 1
        most = min(self._max_levels if by_level else self._num_nodes, max(self._max_rows // num_reqs - 1, 1))
        depths = np.arange(1, most + 1)
        gains = np.cumsum(FIRST_ACCEPTANCE**depths)
        verifying = steps[np.minimum(num_reqs * depths, len(steps) - 1)] / plain - 1
        drafting = by_level * (self._read(num_reqs) + self._level(num_reqs) * (depths - 1)) / plain
        best = int(((1 + gains) / (1 + verifying + drafting)).argmax())
        if levels == 1:
            return Worth(gains[best : best + 1].copy(), OVERHEAD + float(verifying[best] + drafting[best]))
        depths = np.arange(1, levels + 1)
        by_depth = np.where(depths <= best + 1, FIRST_ACCEPTANCE**depths, 0.0)
        return Worth(by_depth, OVERHEAD + float(verifying[best] + drafting[0]))

    def _levels(self, arm: Arm) -> int:
        """Return the levels whose worth is told apart; beside model-free drafts a node's depth does not tell its."""
        return self._max_levels if arm.model and not arm.model_free else 1

    def _read(self, num_reqs: int) -> float:
        """Return the seconds of the first forward of a drafter that grows by levels."""
        return self.cost.part("read", num_reqs * self.acceptance.emitted)

    def _level(self, num_reqs: int) -> float:
        """Return the seconds of a level after the first."""
        return self.cost.part("level", num_reqs * self._level_width)

    def _rate(self) -> float:
        """Return the tokens that a second is worth."""
        return self.planner.speed * self._num_reqs / self.cost.plain(self._num_reqs)

    # ---- before drafting

    def plan(self, num_reqs: int, missed_rows: int = 0) -> Plan:
        """Choose the drafters that run after this step.

        Args:
            num_reqs: requests that decode in the next step.
            missed_rows: rows that the model drafter would have to read first.
        """
        self._num_reqs, self._missed_rows, self._class, self.running = num_reqs, missed_rows, -1, PLAIN
        if num_reqs == 0:
            return Plan(PLAIN)
        plain = self.cost.plain(num_reqs)
        read, level = self._read(num_reqs), self._level(num_reqs)
        catch_up = self.cost.part("read", missed_rows)
        self._earn(SHARE)
        # For a single request a union decides on its model drafter at each step, see ``wants_model``.
        arms = self.arms[1:] if num_reqs > 1 else self.arms[-1:]
        if self._max_rows < 2 * num_reqs:
            arms = ()
        outlooks = {arm: self.worth_of(arm, num_reqs).outlook(level / plain) for arm in arms}
        gains = {PLAIN: Outlook(0.0, 0.0)} | {arm: gain for arm, (gain, _) in outlooks.items()}
        arm = self.planner.choose(num_reqs, gains, catch_up / plain)
        if arm is PLAIN or self._allowed(arm) < self._shortest(arm, (catch_up + read) / plain):
            return Plan(PLAIN)
        self.running, seconds = arm, plain * self._allowed(arm)
        if not arm.model or self._max_levels == 1:
            return Plan(arm, (), seconds)
        # The budget drafts one level more than pays, to learn what it adds, but none that takes too much time.
        most = outlooks[arm][1] + 1 if self._levels(arm) > 1 else self._max_levels
        room = seconds - catch_up - read
        floors = self._yields.floors(self._rate() * level)
        self._allowed_levels = 1 + sum(level * (n + 1) <= room and n + 2 <= most for n in range(len(floors)))
        floors[self._allowed_levels - 1 :] = [math.inf] * (len(floors) + 1 - self._allowed_levels)
        return Plan(arm, tuple(floors), seconds)

    def _earn(self, steps: float) -> None:
        self.left = max(min(self.left + steps, MOST_STEPS), self.left)

    def _allowed(self, arm: Arm) -> float:
        """Return the plain steps that a draft of the arm may lose; one that is known may owe some."""
        return self.left + MOST_STEPS * (self.worth_of(arm, self._num_reqs).requests >= KNOWN_REQUESTS)

    def _shortest(self, arm: Arm, reading: float) -> float:
        """Return the plain steps of the arm's shortest draft; ``reading``: of its first forward."""
        if not arm.model or (arm.model_free and self._num_reqs == 1):
            return OVERHEAD
        if self._shortest_draft is not None:
            return self._shortest_draft
        return self.worth_of(arm, self._num_reqs).cost if self._max_levels == 1 else OVERHEAD + reading

    def wants_model(self, expected: float) -> bool:
        """Decide whether a union's model drafter runs; the others' drafts are ``expected`` to add so many tokens."""
        if self._num_reqs != 1:
            return True
        catch_up = self.cost.part("read", self._missed_rows) / self.cost.plain(1)
        if self._allowed(self.running) < self._by_model.cost + catch_up:
            return False
        self._class = int(np.searchsorted(CLASS_EDGES, expected))
        gain, steps = self._gains[self._class]
        loss = self._by_model.cost * self.planner.speed - gain / steps
        return self._by_model.times < FIRST_TIMES or loss < 0 or self.planner.may_lose(loss)

    # ---- after drafting

    def select(
        self,
        draft: Draft,
        request_ids: Sequence[str],
        num_tokens: np.ndarray,
        wanted: np.ndarray,
        record: StepRecord,
        by_model_only: np.ndarray | None = None,
    ) -> np.ndarray:
        """Choose the nodes to verify, over the whole batch, and learn the draft's worth.

        Args:
            draft: of all requests.
            request_ids: of the batch.
            num_tokens: int ``[num_reqs]``; tokens that each request has, its root included.
            wanted: bool ``[num_reqs]``; requests that decode in the next step; nodes of others have the value 0.
            record: of the step, with the seconds of the draft phase.
            by_model_only: bool ``[num_reqs, num_rows]``; nodes that no other drafter has.

        Returns:
            bool ``[num_reqs, num_rows]``.
        """
        num_reqs, plain = max(self._num_reqs, 1), self.cost.plain(max(self._num_reqs, 1))
        scored = self.acceptance.score(draft, request_ids, num_tokens, wanted, self.arms.index(self.running))
        verify = self.cost.verification(num_reqs)[: max(self._max_rows - num_reqs, 0) + 1]
        keep, num_nodes = best_nodes(scored.values, (verify - verify[0]) * self._rate())
        added = float(verify[num_nodes] - verify[0])
        self._learn_worth(scored, keep, record, added)
        per_node = self._rate() * added / max(num_nodes, 1)
        gained = np.where(keep, np.maximum(scored.values - per_node, 0.0), 0.0)
        self._yields.learn(gained, scored.depths, record.beams)
        if by_model_only is not None and self._class >= 0 and record.by_model:
            most, one = DISTURBED * self._by_model.cost, np.ones(1)
            self._by_model.learn(one, one, record.by_model / plain, most, 1)
            self._gains += (CLASS_START - self._gains) / 1000
            self._gains[self._class] += float(gained[by_model_only].sum()), 1.0
        return keep

    def _learn_worth(self, scored: ScoredDraft, keep: np.ndarray, record: StepRecord, verifying: float) -> None:
        """Learn a draft's gain and cost, and charge its time; ``verifying``: seconds for its nodes."""
        num_reqs, plain = max(self._num_reqs, 1), self.cost.plain(max(self._num_reqs, 1))
        worth, in_levels = self.worth_of(self.running, num_reqs), 0.0
        gains, reach = scored.values[keep].sum(keepdims=True), np.ones(1)
        if self._levels(self.running) > 1:
            levels, in_levels = min(self._allowed_levels, self._max_levels), sum(record.level_seconds) / plain
            gains = np.bincount(scored.depths[keep], scored.values[keep], minlength=levels + 1)[1 : levels + 1]
            reach = (np.arange(levels) <= len(record.level_seconds)).astype(float)
        most = math.inf
        if worth.times >= FIRST_TIMES or self.cost.part("read", 1) > 0:  # measured at start, or seen
            usual = worth.outlook(self._level(num_reqs) / plain)[0].cost
            reading = self.cost.part("read", record.num_prompt_rows + self._missed_rows) / plain
            most = (DISTURBED if worth.times >= FIRST_TIMES else 1.0) * usual + reading
        took = (record.drafting + verifying) / plain
        cost = took - record.catching_up / plain - in_levels
        worth.learn(gains / num_reqs, reach, cost, max(most - in_levels, DISTURBED * worth.cost), num_reqs)
        self.left -= min(took, max(most, DISTURBED * in_levels))

    def may_lose(self, seconds: float) -> bool:
        """Return whether so many seconds may be lost to something whose worth is not known."""
        return self._num_reqs > 0 and seconds <= self.left * self.cost.plain(self._num_reqs)

    def lose(self, seconds: float) -> None:
        """Charge seconds that gave no draft."""
        self.left -= seconds / self.cost.plain(max(self._num_reqs, 1))

    # ---- learning

    def learn(self, record: StepRecord, seconds: float | None) -> None:
        """Add a step; ``seconds`` that it took without its draft phase; None: they say nothing of later steps."""
        self._steps += 1
        if record.num_reqs:
            self._earn(record.num_accepted / record.num_reqs)
        if seconds is not None and record.num_reqs and not record.num_prompt_rows:
            kind = record.num_nodes > 0
            elapsed, self._last_step[kind] = self._steps - self._last_step[kind], self._steps
            self.cost.observe_step(record.num_reqs, record.num_nodes, seconds, elapsed)
        self.cost.observe_part("read", record.num_read, record.read_seconds)
        if record.level_seconds:
            mean = sum(record.level_seconds) / len(record.level_seconds)
            self.cost.observe_part("level", record.level_rows, mean)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        self.acceptance.finish(request_ids)


def best_nodes(values: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, int]:
    """Choose the number of best nodes with the largest value beyond their cost; of equal nodes the first are taken.

    Args:
        values: float64 ``[num_reqs, num_rows]``; 0 where there is no node; a parent's is at least its child's.
        costs: float64 ``[n]``; cost of 0 to ``n - 1`` nodes, in the unit of the values.

    Returns:
        bool ``[num_reqs, num_rows]``, and how many are true.
    """
    flat = values.ravel()
    order = np.argsort(-flat, kind="stable")[: min(len(costs) - 1, np.count_nonzero(flat))]
    profits = np.cumsum(flat[order]) - costs[1 : len(order) + 1]
    number = int(profits.argmax()) + 1 if len(order) and profits.max() > 0 else 0
    keep = np.zeros(len(flat), dtype=bool)
    keep[order[:number]] = True
    return keep.reshape(values.shape), number


class ShapeBudget:
    """Chooses one shape for each round of a batch; the outcome of a round arrives one or two rounds later.

    Args:
        cost: seconds of rounds, which the caller updates.
        shapes: with drafts, smallest first.
        max_rows: most rows of a step.
    """

    def __init__(self, cost: RoundCost, shapes: Sequence[Shape], max_rows: int):
        self.cost, self.shapes, self._max_rows = cost, tuple(shapes), max_rows
        self.acceptance = ShapeAcceptance(shapes)
        self._arms = {Arm(f"{shape.nodes} nodes", model=False, model_free=False): shape.nodes for shape in shapes}
        self.planner = Planner([*self._arms][-1])
        self._step = self._last_draft = 0

    def plan(self, num_reqs: int) -> int:
        """Return the nodes to draft after this step; ``num_reqs`` requests decode in the next one."""
        self._step += 1
        outlooks, plain = {PLAIN: Outlook(0.0, 0.0)}, self.cost.at(0, num_reqs)
        for arm, nodes in self._arms.items():
            if num_reqs * (nodes + 1) <= self._max_rows:
                outlooks[arm] = Outlook(self.acceptance.at(nodes), self.cost.at(nodes, num_reqs) / plain - 1)
        return self._arms.get(self.planner.choose(num_reqs, outlooks), 0)

    def learn(self, nodes: int, num_accepted: float, num_reqs: int) -> None:
        """Add the nodes that the target accepted in a step, of all ``num_reqs`` requests that had ``nodes`` each."""
        if nodes:
            self.acceptance.learn(nodes, num_accepted, num_reqs, self._step - self._last_draft)
            self._last_draft = self._step
