"""What to draft and what to verify, so that the batch emits the most tokens per second.

A step over ``num_reqs`` requests emits one token each; verifying ``n`` nodes adds the sum of their probabilities of
acceptance and costs what ``costs`` has measured.  Everything follows from comparing such ratios: which proposers run at
all (an *arm*; the plain one runs none), whether one more level is drafted, and which of the drafted nodes are verified.
An arm that does not run is tried now and then, as often as its expected loss allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT, OnlineLogistic, Reliability, log_ratio
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.core.pruning import prune
from vllm_specplug.types import Draft
from vllm_specplug.utils.compiled import compiled

#: Share of the time that may be lost to trying what seems not to pay, and how much more of it in the first steps of a
#: regime, which know least.
TRIALS, EARLY_TRIALS, EARLY_STEPS = 0.004, 0.01, 150.0
#: One in so many steps is plain where all others draft: only these tell what a plain step costs now.
PLAIN_EVERY = 100
#: So many rounds are drafted, whatever they promise, before the plain arm may take over: what the parts of a round take
#: is first known from these.
FIRST_ROUNDS = 16
#: Another arm must promise this much more before it takes over.
MARGIN = 1.02
#: An arm that takes over lasts so many steps or more, it is supposed: what the drafter first has to catch up with
#: is spread over them.
LASTS = 100
#: Steps after which an arm's fresh observations count 1/e, and requests that its long-run average is worth beside them.
MEMORY, LONG_RUN_WEIGHT, LONG_RUN_MEMORY = 48.0, 4.0, 2000.0
#: Requests that an arm's worth before anything is known counts for.
FIRST_WORTH = 8.0
#: Chance that a chain's next node is accepted, before anything is known.
FIRST_GUESS = 0.6
#: What the other drafters promise a request, in tokens: edges of the classes by which is known what the host's drafter
#: adds.
CLASSES = np.array([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
#: For so many requests, whether the host's drafter runs beside others is asked at every round, by what these promise.
#: In larger batches that is much the same from round to round, and after each pause the drafter would have prompts to
#: catch up with: there an arm without it is compared.
ASKING = 1
#: Gain of the host's drafter before anything is known, requests that this is worth, and those after which an old one
#: counts 1/e.
FIRST_GAIN, FIRST_REQUESTS, GAIN_MEMORY = 0.6, 8.0, 1000.0
#: The first times of the host's drafter, of which the least counts: what disturbs, or compiles, only adds.  Rounds
#: after which an old one counts 1/e, and how often it can be exceeded at once.
FIRST_TIMES, TIME_MEMORY, MOST_AT_ONCE = 4, 20.0, 2.0
#: Steps over which the speed is averaged that decides what a token is worth: those ahead cost what the last ones did.
SPEED_MEMORY = 12.0
#: Steps over which the rows of prompts are averaged.
PROMPT_MEMORY = 128.0
#: A batch of so many requests is learned from at every step, larger ones at every second, third, fourth.
LEARN_REQUESTS, LEARN_SELDOM = 8, 4
#: What an arm is worth is taken down once in so many rounds, after so many requests.
ACCOUNT_EVERY, KNOWN = 4, 150.0
MAX_RECORDS = 4096


@dataclass(frozen=True)
class Arm:
    """Which drafters run in a round: the host's (EAGLE, Medusa), those without a model of the host's."""

    name: str
    model: bool
    model_free: bool


PLAIN = Arm("plain", model=False, model_free=False)


class _Worth:
    """What an arm's drafts have been worth per request: by levels allowed and nodes verified.

    Attributes:
        fresh, long_run: float64 ``[max_levels, num_nodes + 2]``; tokens for 0 to ``num_nodes`` nodes, and the levels
            really drafted in the last column.
    """

    def __init__(self, max_levels: int, num_nodes: int):
        levels, nodes = np.arange(1, max_levels + 1)[:, None], np.arange(num_nodes + 1)[None]
        depth = np.minimum(nodes, levels if max_levels > 1 else num_nodes)
        tokens = FIRST_GUESS * (1 - FIRST_GUESS**depth) / (1 - FIRST_GUESS)
        self.long_run = np.concatenate([tokens, levels], axis=1)
        self.fresh = np.zeros_like(self.long_run)
        self.weight, self.requests = 0.0, FIRST_WORTH

    def age(self) -> None:
        """A step has passed."""
        self.weight *= np.exp(-1 / MEMORY)

    def add(self, mean: np.ndarray, num_reqs: int) -> None:
        """Take in the mean over ``num_reqs`` requests."""
        self.weight += num_reqs
        self.fresh += (mean - self.fresh) * (num_reqs / self.weight)
        self.requests = min(self.requests + num_reqs, LONG_RUN_MEMORY)
        self.long_run += (mean - self.long_run) * (num_reqs / self.requests)

    def mean(self) -> np.ndarray:
        total = self.weight + LONG_RUN_WEIGHT
        return (self.weight * self.fresh + LONG_RUN_WEIGHT * self.long_run) / total


@dataclass
class _Regime:
    """What is known of batches of about one size: they draft in another way, so they are worth something else.

    Attributes:
        arm: runs, unless another is on trial.
        credit: seconds that trials may lose.
        drafting: steps since the last plain one.
        worth: of each arm but the plain one.
        steps: so many were planned.
        by_model: seconds of the host's drafter in a round beside other drafters; None before the first.
        by_model_times: how often that was measured.
        by_model_at: the step of the last time.
        with_model: share of those rounds in which it runs.
        recent: float64 ``[2]``; tokens and seconds of the last steps.
    """

    arm: Arm
    worth: dict[Arm, _Worth]
    credit: float = 0.0
    drafting: int = 0
    steps: int = 0
    by_model: float | None = None
    by_model_times: int = 0
    by_model_at: int = 0
    with_model: float = 1.0
    recent: np.ndarray = field(default_factory=lambda: np.zeros(2))


@dataclass(frozen=True)
class Outlook:
    """What an arm promises for a batch, at its best number of levels and nodes.

    Attributes:
        tokens: expected tokens of a step.
        seconds: of a step.
        levels, nodes: the choice; nodes are per request.
    """

    tokens: float
    seconds: float
    levels: int = 0
    nodes: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class _Open:
    """The last draft, until it is known what the target chose."""

    request_ids: tuple[str, ...]
    num_tokens: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    features: np.ndarray
    model: int


class Budget:
    """Chooses for every step; told what was drafted and what became of it.

    Args:
        costs: the cost model, refined by the caller.
        arms: what can run beside plain decoding, richest last.
        num_nodes: most nodes of a request.
        max_levels: levels that the host's drafter grows one by one; 1 where it drafts all at once.
        level_width: nodes of a request that each further level runs over.
        max_rows: most rows of a step.
        reseeds: whether the host's drafter first runs over all tokens that were emitted, or over the last ones only.
    """

    def __init__(
        self,
        costs: CostModel,
        arms: Sequence[Arm],
        *,
        num_nodes: int,
        max_levels: int,
        level_width: int,
        max_rows: int,
        reseeds: bool = True,
    ):
        self.costs = costs
        self.arms = (PLAIN, *arms)
        self.num_nodes, self.level_width, self.max_rows = num_nodes, level_width, max_rows
        # Where other sources draft beside the host's drafter, a node's depth does not tell its level.
        own_levels = max_levels if not any(arm.model_free for arm in arms) else 1
        self._own_levels = own_levels
        #: By the bit length of the number of requests.
        self._regimes: dict[int, _Regime] = {}
        self._regime = self._regime_of(1)
        self.calibration = OnlineLogistic(np.tile([0.0, 1.0, 0.0, 0.5], (len(self.arms), 1)), memory=3000.0)
        self.reliability = Reliability()
        #: By request: accepted and expected nodes, with decay.
        self._records: dict[str, tuple[float, float]] = {}
        #: By level: value that it added to the trees, and of the nodes that it grew from, with decay.
        self._yields = np.tile([4.0, 8.0], (max(max_levels, 1) + 1, 1))
        self._reseeds, self._emitted = reseeds, 1.5
        self._prompt_rows = 0.0
        self._rate = 0.0
        #: Seconds in which the host's drafter catches up with what it has missed; those of late, and their rows.
        self._catch_up = 0.0
        self._caught_up = np.zeros(2)
        self._missed_rows = 0
        self._rounds = self._drafted = 0
        #: By class of what the others promise: tokens that the host's drafter added, and requests; with decay.
        self._gains = np.tile([FIRST_GAIN * FIRST_REQUESTS, FIRST_REQUESTS], (len(CLASSES) + 1, 1))
        self._classes: np.ndarray | None = None
        self._asks_for_once = False
        #: The arm of the current round: ``arm``, or another one on trial.
        self.running = self.arm
        self._round_levels = 0
        self._beams: list[float] = []
        self._num_reqs = 0
        self._open: _Open | None = None
        self._outlooks: tuple[int, int, dict[Arm, Outlook]] = (0, 0, {})

    def _regime_of(self, num_reqs: int) -> _Regime:
        size = num_reqs.bit_length()
        if size not in self._regimes:
            worth = {arm: _Worth(self._own_levels, self.num_nodes) for arm in self.arms[1:]}
            # A smaller batch drafts more, so that it knows what fewer nodes and levels are worth too.
            if smaller := [known for known in self._regimes if known < size]:
                for arm, known in self._regimes[max(smaller)].worth.items():
                    worth[arm].long_run = known.mean()
            self._regimes[size] = _Regime(self.arms[-1], worth)
        return self._regimes[size]

    @property
    def arm(self) -> Arm:
        """The arm of batches like the last one."""
        return self._regime.arm

    @property
    def worth(self) -> dict[Arm, _Worth]:
        return self._regime.worth

    def to_json(self) -> dict[str, dict[str, list[list[float]]]]:
        """What the arms have been worth in the long run, by batch size, to be remembered by a later budget."""
        return {
            str(size): {
                arm.name: worth.long_run.round(5).tolist()
                for arm, worth in regime.worth.items()
                if worth.requests > FIRST_WORTH
            }
            for size, regime in self._regimes.items()
        }

    def remember(self, saved: Mapping[str, Mapping[str, list[list[float]]]]) -> None:
        """Start from what ``to_json`` told; arms of another shape start anew."""
        for size, arms in sorted(saved.items()):
            for arm, worth in self._regime_of(2 ** (int(size) - 1)).worth.items():
                known = np.asarray(arms.get(arm.name, ()), dtype=np.float64)
                if known.shape == worth.long_run.shape:
                    worth.long_run, worth.requests = known, 100.0

    # ---- before drafting

    def plan(self, num_reqs: int, missed_rows: int = 0) -> Arm:
        """Which drafters to run behind this step.

        Args:
            num_reqs: requests that decode in the next step.
            missed_rows: what the host's drafter would have to catch up with.
        """
        self._num_reqs = num_reqs
        if num_reqs == 0:
            self.running = PLAIN
            return PLAIN
        regime = self._regime = self._regime_of(num_reqs)
        for worth in regime.worth.values():
            worth.age()
        outlooks = self.outlooks(num_reqs)
        now = outlooks[regime.arm]
        behind = 0.0 if regime.arm.model else self._behind(missed_rows)
        rates = {arm: seen.tokens / (seen.seconds + behind * arm.model / LASTS) for arm, seen in outlooks.items()}
        best = max(rates, key=lambda arm: rates[arm])
        too_early = best is PLAIN and self._drafted < FIRST_ROUNDS
        if rates[best] > now.rate * (1.0 if best is PLAIN else MARGIN) and not too_early:
            # Credit saved up in good times is not for trying what has just been given up.
            regime.arm, now, regime.credit = best, outlooks[best], 0.0
        tokens, seconds = regime.recent
        self._rate = max(tokens / seconds if seconds else now.rate, outlooks[PLAIN].rate)
        self._missed_rows = missed_rows
        self.running = regime.arm
        regime.steps += 1
        share = TRIALS + EARLY_TRIALS * exp(-regime.steps / EARLY_STEPS)
        regime.credit = min(regime.credit + share * now.seconds, 16 * now.seconds)
        regime.drafting += 1
        others = [arm for arm in outlooks if arm not in (PLAIN, regime.arm)]
        if regime.drafting >= PLAIN_EVERY:
            self.running = PLAIN
        elif others:
            tried = max(others, key=lambda arm: outlooks[arm].rate)
            loss = outlooks[tried].seconds + behind * tried.model - outlooks[tried].tokens / self._rate
            if regime.credit > max(loss, 0.0):
                self.running = tried
        if self.running is PLAIN:
            regime.drafting = 0
            self._stepped(num_reqs, outlooks[PLAIN].seconds)
        self._round_levels, self._beams, self._classes, self._asks_for_once = 0, [], None, False
        return self.running

    @property
    def tries(self) -> bool:
        """Whether something runs in this round that does not at present."""
        return self.running is not self.arm or self._asks_for_once

    def outlooks(self, num_reqs: int) -> dict[Arm, Outlook]:
        """What every arm promises for ``num_reqs`` requests; looked at anew every few calls."""
        known, age, found = self._outlooks
        if known != num_reqs or age >= 4:
            age, found = 0, {arm: self._outlook(arm, num_reqs) for arm in self._arms_for(num_reqs)}
        self._outlooks = (num_reqs, age + 1, found)
        return found

    def _arms_for(self, num_reqs: int) -> list[Arm]:
        asks = num_reqs <= ASKING and any(arm.model and arm.model_free for arm in self.arms)
        return [arm for arm in self.arms if not (asks and arm.model_free and not arm.model)]

    def _outlook(self, arm: Arm, num_reqs: int) -> Outlook:
        costs = self.costs
        fixed = costs["between"].at(num_reqs)
        verify = costs.verification(num_reqs)
        plain = fixed + float(verify[0]) + costs["sample"].at(num_reqs)
        if arm is PLAIN:
            return Outlook(num_reqs, plain)
        most = min(self.num_nodes, self.max_rows // num_reqs - 1)
        if most < 1:
            return Outlook(num_reqs, 10 * plain)
        worth = self._regime_of(num_reqs).worth[arm].mean()
        tokens = num_reqs * (1 + worth[:, 1 : most + 1])
        seconds = fixed + verify[num_reqs * np.arange(1, most + 1)][None]
        seconds = seconds + costs["tree"].at(num_reqs) + costs["round"].at(num_reqs)
        if arm.model_free:
            seconds = seconds + costs["free"].at(num_reqs)
        if arm.model:
            levels = np.maximum(worth[:, -1:] - 1, 0)
            level = costs["level"].at(num_reqs * self.level_width)
            first = num_reqs * (self._emitted if self._reseeds else 1)
            share = self._regime_of(num_reqs).with_model if arm.model_free else 1.0
            seconds = seconds + share * (costs["host"].at(first) + levels * level) + self._prompt_seconds()
        best = int((tokens / seconds).argmax())
        levels, nodes = divmod(best, most)
        tokens, seconds = (float(np.broadcast_to(x, tokens.shape).flat[best]) for x in (tokens, seconds))
        return Outlook(tokens, seconds, levels + 1, nodes + 1)

    def saw_prompt(self, num_rows: int) -> None:
        """A step has computed so many rows of prompts (0 is an answer too): a drafter that runs must see them."""
        self._prompt_rows += (num_rows - self._prompt_rows) / PROMPT_MEMORY

    def _prompt_seconds(self) -> float:
        """What prompts cost the host's drafter per step, by the price of a row among many."""
        if not self._reseeds:
            return 0.0
        host = self.costs["host"]
        few, many = host.knots[(len(host.knots) - 1) // 2], host.knots[-1]
        return self._prompt_rows * (host.at(many) - host.at(few)) / max(many - few, 1)

    def choice(self, num_reqs: int) -> dict[str, Any]:
        """What is best for so many requests, for people: batch, arm, nodes of a request, levels, expected speedup."""
        outlooks = {arm: self._outlook(arm, num_reqs) for arm in self._arms_for(num_reqs)}
        best = max(outlooks, key=lambda arm: outlooks[arm].rate)
        levels = 0 if best is PLAIN else self._regime_of(num_reqs).worth[best].mean()[outlooks[best].levels - 1, -1]
        return {
            "batch": num_reqs,
            "arm": best.name,
            "nodes": outlooks[best].nodes,
            "levels": round(float(levels), 2),
            "speedup": outlooks[best].rate / outlooks[PLAIN].rate,
        }

    # ---- while drafting

    def wants_model_drafter(self, expected: np.ndarray, wanted: np.ndarray) -> bool:
        """Whether the host's drafter is worth its time beside the others.

        Args:
            expected: float ``[num_reqs]``; tokens that the others' drafts promise.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
        """
        regime = self._regime
        if self._num_reqs > ASKING:
            return True
        self._classes = np.searchsorted(CLASSES, expected)
        if regime.by_model is None or regime.by_model_times < FIRST_TIMES:
            return True
        gains = self._gains[self._classes[wanted]]
        loss = regime.by_model - float((gains[:, 0] / gains[:, 1]).sum()) / max(self._rate, 1e-9)
        if not self._missed_rows:  # a drafter that pauses has to catch up later
            loss -= self._catch_up
        wants = loss < 0
        if not wants and regime.credit > loss:
            regime.credit -= loss
            wants = self._asks_for_once = True
        regime.with_model += 0.02 * (wants - regime.with_model)
        return wants

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        """Whether the next level is worth its cost.

        Args:
            beam_values: float ``[num_reqs, beam_width]``; values of the nodes that it would run over.
        """
        level = self._round_levels + 1  # the first has been drafted
        fed = float(beam_values.sum())
        gained, grown_from = self._yields[min(level, len(self._yields) - 1)]
        if fed * gained / grown_from <= self._rate * self.costs["level"].at(beam_values.numel()):
            return False
        self._round_levels = level
        self._beams.append(fed)
        return True

    def caught_up(self, seconds: float, num_rows: int) -> None:
        """The host's drafter has read ``num_rows`` that it had missed, in so many seconds."""
        self._catch_up += (0.1 if self._catch_up else 1.0) * (seconds - self._catch_up)
        self._caught_up = 0.9 * self._caught_up + np.array([seconds, num_rows])

    def _behind(self, missed_rows: int) -> float:
        """What reading so many rows takes, by those read before: the drafter's own costs are known for fewer."""
        seconds, rows = self._caught_up
        return max(self.costs["host"].at(missed_rows), missed_rows * seconds / max(rows, 1.0))

    # ---- after drafting

    def select(
        self,
        draft: Draft,
        request_ids: Sequence[str],
        num_tokens: np.ndarray,
        wanted: np.ndarray,
        draft_seconds: float,
        by_model: float = 0.0,
        by_model_only: np.ndarray | None = None,
    ) -> Draft:
        """Keep the nodes that are worth verifying, over the whole batch.

        Args:
            draft: of all requests.
            request_ids: of each.
            num_tokens: int ``[num_reqs]``; tokens that each has, its root included.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
            draft_seconds: what the draft has cost.
            by_model: what the host's drafter took of it; 0 where it did not run.
            by_model_only: bool ``[num_reqs, num_rows]``; nodes that no other drafter has.
        """
        self._drafted += 1
        tree, arm, num_reqs = draft.tree, self.running, max(int(wanted.sum()), 1)
        drafted, parents, depths, num_rows, log_values = (
            np.ascontiguousarray(values.numpy())
            for values in (tree.token_ids, tree.parents, tree.depths, tree.num_rows, draft.log_values)
        )
        model = self.arms.index(arm)
        records = np.array([log_ratio(*self._records.get(request_id, (0.0, 0.0))) for request_id in request_ids])
        features, nodes, values = node_values(
            log_values,
            parents,
            depths,
            num_rows,
            np.ascontiguousarray(wanted),
            records,
            self.calibration.weights[model],
            LOGIT_LIMIT,
        )
        self._open = _Open(tuple(request_ids), num_tokens.copy(), drafted, parents, features, model)
        verify = self.costs.verification(num_reqs)
        for_trees = max(self.costs["tree"].at(num_reqs) - self.costs["sample"].at(num_reqs), 0.0)
        keep, count, gain, price = keep_best(
            values, nodes, verify, for_trees, self._rate, min(self.max_rows - num_reqs, len(verify) - 1)
        )
        worth = self.worth.get(arm)
        if worth is not None and (worth.requests < KNOWN or arm is not self.arm or self._rounds % ACCOUNT_EVERY == 0):
            self._keep_account(worth, values, keep, depths, num_reqs)
        if by_model and by_model_only is not None and self._classes is not None:
            marginal = self._rate * (verify[count] - verify[0]) / max(count, 1)
            self._learn_gains(by_model, np.where(keep & by_model_only, values - marginal, 0.0).sum(axis=1), wanted)
        plain = float(verify[0]) + self.costs["between"].at(num_reqs) + self.costs["sample"].at(num_reqs)
        tokens, seconds = num_reqs + gain, plain + draft_seconds + price
        if arm is not self.arm:
            self._regime.credit -= seconds - tokens / self._rate
        self._stepped(tokens, seconds)
        return draft if count == nodes.sum() else prune(draft, torch.from_numpy(keep))

    def _stepped(self, tokens: float, seconds: float) -> None:
        recent = self._regime.recent
        recent += np.array([tokens, seconds]) - recent / SPEED_MEMORY

    def _learn_gains(self, by_model: float, gained: np.ndarray, wanted: np.ndarray) -> None:
        """Beside others the host's drafter has added ``gained`` (``[num_reqs]``) tokens, what rows cost taken off."""
        regime = self._regime
        known = by_model if regime.by_model is None else regime.by_model
        if regime.by_model_times < FIRST_TIMES:
            regime.by_model = min(known, by_model)
        else:
            weight = 1 - exp(-(regime.steps - regime.by_model_at) / TIME_MEMORY)
            regime.by_model = known + weight * (min(by_model, MOST_AT_ONCE * known) - known)
        regime.by_model_times, regime.by_model_at = regime.by_model_times + 1, regime.steps
        count = int(wanted.sum())
        self._gains += (np.array([FIRST_GAIN * FIRST_REQUESTS, FIRST_REQUESTS]) - self._gains) * (count / GAIN_MEMORY)
        np.add.at(self._gains, self._classes[wanted], np.stack([gained[wanted], np.ones(count)], axis=1))

    def _keep_account(
        self, worth: _Worth, values: np.ndarray, keep: np.ndarray, depths: np.ndarray, num_reqs: int
    ) -> None:
        max_levels = len(worth.long_run)
        levels = np.arange(1, max_levels + 1)
        mean = np.empty_like(worth.long_run)
        # Where levels are not told apart, the one row is of all nodes.
        until = levels if max_levels > 1 else np.array([values.shape[1]])
        mean[:, :-1] = best_sums(values, depths, until, num_reqs, mean.shape[1] - 2)
        drafted = self._round_levels + 1
        mean[:, -1] = np.minimum(drafted, levels) if max_levels > 1 else drafted
        worth.add(mean, num_reqs)
        if self._beams:
            first_nodes = self.costs.verification(num_reqs)[1:3]  # fewer where a step has no room for them
            price = self._rate * max(float(first_nodes[-1] - first_nodes[0]), 0.0) if len(first_nodes) else 0.0
            gained = np.where(keep, np.maximum(values - price, 0.0), 0.0)
            self._yields += (np.array([4.0, 8.0]) - self._yields) / 200
            for level, fed in enumerate(self._beams, start=1):
                self._yields[min(level, len(self._yields) - 1)] += (gained[depths == level + 1].sum(), fed)

    # ---- what became of it

    def learn(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Compare the last draft, verified or not, with the tokens that the target has chosen since.

        Args:
            request_ids: of the requests now.
            token_ids: int ``[num_reqs, max_len]``; their tokens.
            num_tokens: int ``[num_reqs]``; how many.
        """
        last, self._open = self._open, None
        self._rounds += 1
        if last is None or self._rounds % min(-(-len(request_ids) // LEARN_REQUESTS), LEARN_SELDOM):
            return
        now = {request_id: place for place, request_id in enumerate(request_ids)}
        weights = self.calibration.weights[last.model]
        features, predicted, accepted, sums, emitted = outcomes_of(
            last.token_ids,
            last.parents,
            last.features,
            weights,
            LOGIT_LIMIT,
            np.array([now.get(request_id, -1) for request_id in last.request_ids], dtype=np.int64),
            np.ascontiguousarray(last.num_tokens, dtype=np.int64),
            np.ascontiguousarray(token_ids, dtype=np.int32),
            np.ascontiguousarray(num_tokens, dtype=np.int64),
        )
        if emitted:
            self._emitted += 0.05 * (emitted - self._emitted)
        if len(accepted) == 0:
            return
        self.reliability.add(predicted, accepted)
        self.calibration.learn(np.full(len(accepted), last.model), features, accepted)
        for request_id, (num_accepted, num_expected, count) in zip(last.request_ids, sums.tolist(), strict=True):
            if count:
                old = self._records.get(request_id, (0.0, 0.0))
                self._records[request_id] = (0.9 * old[0] + num_accepted, 0.9 * old[1] + num_expected)
        while len(self._records) > MAX_RECORDS:  # a host that never says what has ended
            del self._records[next(iter(self._records))]

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended; what they were worth says little of those that take their place."""
        for request_id in request_ids:
            self._records.pop(request_id, None)
        for worth in self.worth.values():
            worth.weight *= max(1 - len(request_ids) / max(self._num_reqs, 1), 0.25)


@compiled
def node_values(
    log_values: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_rows: np.ndarray,
    wanted: np.ndarray,
    records: np.ndarray,
    weights: np.ndarray,
    limit: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of acceptance of the nodes of trees, parent-first.

    Args:
        log_values: float32 ``[num_reqs, num_rows]``; as the drafter believes.
        parents, depths: int64 ``[num_reqs, num_rows]``.
        num_rows: int64 ``[num_reqs]``.
        wanted: bool ``[num_reqs]``; requests whose nodes count.
        records: float64 ``[num_reqs]``, see ``calibration.log_ratio``.
        weights: float64 ``[4]``; of the features.
        limit: of log odds.

    Returns:
        Features ``[num_reqs, num_rows, 4]``: one, the believed log odds behind the parent, the depth's logarithm, the
        request's record; bool ``[num_reqs, num_rows]``, true for the nodes; their values, 0 elsewhere.
    """
    num_reqs, width = parents.shape
    features = np.zeros((num_reqs, width, 4))
    nodes = np.zeros((num_reqs, width), dtype=np.bool_)
    values = np.zeros((num_reqs, width))
    for request in range(num_reqs):
        for row in range(1, num_rows[request]):
            parent = parents[request, row]
            edge = np.float64(log_values[request, row]) - np.float64(log_values[request, parent])
            if not edge < 0.0:  # NaN too
                edge = 0.0
            odds = edge - np.log(-np.expm1(edge)) if edge < 0.0 else limit
            one = features[request, row]
            one[0] = 1.0
            one[1] = min(max(odds, -limit), limit)
            one[2] = np.log2(max(np.float64(depths[request, row]), 1.0))
            one[3] = records[request]
            logit = one[0] * weights[0] + one[1] * weights[1] + one[2] * weights[2] + one[3] * weights[3]
            chance = 1.0 / (1.0 + np.exp(min(max(-logit, -limit), limit)))
            above = values[request, parent] if parent > 0 else 1.0
            values[request, row] = above * chance
            nodes[request, row] = wanted[request]
        if not wanted[request]:
            values[request] = 0.0
    return features, nodes, values


@compiled
def keep_best(
    values: np.ndarray, nodes: np.ndarray, verify: np.ndarray, for_trees: float, rate: float, most: int
) -> tuple[np.ndarray, int, float, float]:
    """The nodes that together gain most beyond their price: the best ones, ties to the first.

    Args:
        values: float64 ``[num_reqs, num_rows]``; a parent's is at least its child's.
        nodes: bool ``[num_reqs, num_rows]``; those to choose from.
        verify: float64 ``[n]``; seconds of the target's forward by nodes.
        for_trees: further seconds, where there is any node.
        rate: tokens that a second is worth.
        most: nodes.

    Returns:
        Bool ``[num_reqs, num_rows]``; how many, their values' sum and their seconds.
    """
    flat, among = values.ravel(), nodes.ravel()
    places, keys, count = np.empty(len(flat), np.int64), np.empty(len(flat)), 0
    for place in range(len(flat)):
        if among[place]:
            places[count], keys[count] = place, -flat[place]
            count += 1
    order = np.argsort(keys[:count], kind="mergesort")
    chosen, most_profit, chosen_gain, chosen_price, gain = 0, 0.0, 0.0, 0.0, 0.0
    for number in range(1, min(count, most) + 1):
        gain -= keys[order[number - 1]]
        price = verify[number] - verify[0] + for_trees
        if gain - rate * price > most_profit:
            chosen, most_profit, chosen_gain, chosen_price = number, gain - rate * price, gain, price
    keep = np.zeros(len(flat), np.bool_)
    for number in range(chosen):
        keep[places[order[number]]] = True
    return keep.reshape(values.shape), chosen, chosen_gain, chosen_price


@compiled
def best_sums(values: np.ndarray, depths: np.ndarray, levels: np.ndarray, num_reqs: int, most: int) -> np.ndarray:
    """What the best nodes of a request are worth on average, by the levels they may be of and their number.

    Args:
        values: float64 ``[n, num_rows]``; 0 where there is no node, or it does not count.
        depths: int64 ``[n, num_rows]``.
        levels: int64 ``[num_levels]``; depths up to it count.
        num_reqs: requests to average over.
        most: nodes.

    Returns:
        Float64 ``[num_levels, most + 1]``.
    """
    sums, ordered = np.zeros((len(levels), most + 1)), np.empty(values.shape[1])
    for level in range(len(levels)):
        for request in range(len(values)):
            count = 0
            for row in range(values.shape[1]):
                if values[request, row] > 0.0 and depths[request, row] <= levels[level]:
                    ordered[count] = -values[request, row]
                    count += 1
            best = np.sort(ordered[:count])
            for number in range(min(count, most)):
                sums[level, number + 1] -= best[number] / num_reqs
        for number in range(1, most + 1):
            sums[level, number] += sums[level, number - 1]
    return sums


@compiled
def outcomes_of(
    drafted: np.ndarray,
    parents: np.ndarray,
    features: np.ndarray,
    weights: np.ndarray,
    limit: float,
    places: np.ndarray,
    starts: np.ndarray,
    token_ids: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """What the target's tokens say of drafted nodes: of those whose parents were right, as far as its tokens go.

    Args:
        drafted, parents: int64 ``[n, num_rows]``; parent-first.
        features: float64 ``[n, num_rows, 4]``; the last one is the request's record.
        weights: float64 ``[4]``.
        limit: of log odds.
        places: int64 ``[n]``; of the requests among those now, -1 for those that are gone.
        starts: int64 ``[n]``; tokens that each had.
        token_ids: int32 ``[num_reqs, max_len]``; of the requests now.
        ends: int64 ``[num_reqs]``; how many.

    Returns:
        Of each outcome the features, what was predicted, whether it was right; of each request how many were right, how
        many of any request would have been, and how many there were; mean number of tokens emitted, 0 where none were.
    """
    num_reqs, width = parents.shape
    found = np.empty((num_reqs * width, features.shape[2]))
    predicted, accepted = np.empty(len(found)), np.empty(len(found), np.bool_)
    sums, depth_of = np.zeros((num_reqs, 3)), np.empty(width, np.int64)
    count = emitted = requests = 0
    for request in range(num_reqs):
        place, start = places[request], starts[request]
        length = ends[place] - start if place >= 0 else 0
        if length <= 0:
            continue
        emitted += length
        requests += 1
        depth_of[:] = -1
        depth_of[0] = 0  # of the rows that were right
        for row in range(1, width):
            parent = parents[request, row]
            depth = depth_of[parent] if parent >= 0 else -1
            if depth < 0 or depth == length:
                continue
            right = drafted[request, row] == token_ids[place, start + depth]
            if right:
                depth_of[row] = depth + 1
            one = features[request, row]
            others = one[0] * weights[0] + one[1] * weights[1] + one[2] * weights[2]
            logit = others + one[3] * weights[3]
            found[count] = one
            predicted[count] = 1.0 / (1.0 + np.exp(min(max(-logit, -limit), limit)))
            accepted[count] = right
            sums[request, 0] += right
            sums[request, 1] += 1.0 / (1.0 + np.exp(min(max(-others, -limit), limit)))
            sums[request, 2] += 1.0
            count += 1
    return found[:count], predicted[:count], accepted[:count], sums, emitted / max(requests, 1)


def compile_loops() -> None:
    """Compile the loops, or load what was compiled: the first requests would wait for it."""
    rows, one = np.zeros((1, 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    features, nodes, values = node_values(
        rows.astype(np.float32), rows - 1, rows, one, one > 0, np.zeros(1), np.zeros(4), LOGIT_LIMIT
    )
    keep_best(values, nodes, np.zeros(2), 0.0, 1.0, 1)
    best_sums(values, rows, one, 1, 1)
    outcomes_of(rows, rows - 1, features, np.zeros(4), LOGIT_LIMIT, one - 1, one, rows.astype(np.int32), one)
