"""Rounds of learning from recorded answers: choose shards, train, compare on held-out answers, publish.

A round takes the shards that are new since the round before, and as much again of older ones (replay), so that the
drafter keeps what it knows. The newest answers are held out: they are measured, not trained on. The trained head is
published if it drafts better there by more than noise (comparison.py), and not worse than `WORST_ON_OLD` times the
current head's on a few replayed answers, which this round does not train on either.

HEAD/learn.json    the last round, and the plan of an unfinished one: a killed learner goes on with it
HEAD/learn.jsonl   one line for each round: its data and its measurements
HEAD/learning/     the training state and the candidate of the unfinished round
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.published import Published, current_folder, is_published, publish, read_current

from ..eagle2.checkpoint import CONFIG_NAME, CheckpointInfo, validate_checkpoint
from .answers import adapted_vocabulary
from .comparison import MIN_ANSWERS, HeldOut, compare, is_better, measure
from .eagle import EagleOptions, EagleTask, load_trained
from .features import FeatureSet, end_ids_of, join, read_target_config, target_head
from .new_drafter import UNTRAINED_KEY
from .precision import compute_dtype
from .recorded import answers_of, read_facts, read_shard, shard_answer_tokens, shard_files
from .trainer import RunSettings, train

logger = logging.getLogger("vllm_specplug")

STATE_NAME, HISTORY_NAME, WORK_NAME = "learn.json", "learn.jsonl", "learning"
HISTORY_LINES = 2000
#: Share of a round's new answers that is held out, and the most.
HELD_OUT_SHARE, HELD_OUT_MOST = 0.15, 64
#: Replayed answers that are measured, and how much of its tau on them a head must keep.
OLD_ANSWERS, WORST_ON_OLD = 16, 0.95
#: How often a round in vain doubles the tokens that the next one waits for.
MOST_PATIENCE = 2
#: Bytes of shards that a round reads, which bounds its memory.
ROUND_BYTES = 1 << 30

#: Recipes: for a trained head, and for one from `specplug drafter new`.
FURTHER = EagleOptions(epochs=4, lr=3e-4, align_steps=2, distill_weight=1.0, batch_tokens=2048)
FROM_NOTHING = replace(FURTHER, epochs=12, lr=1e-3)


@dataclass(frozen=True)
class Plan:
    """The shards of one round, by name, and the version that it starts from."""

    number: int
    base: int
    new: list[str]
    replayed: list[str]


@dataclass(frozen=True)
class Material:
    """The answers of one round: for training, held out for measuring, and older ones for measuring."""

    train: FeatureSet
    held_out: FeatureSet
    old: FeatureSet | None


@dataclass(frozen=True)
class Outcome:
    """Result of a round; `published` is None if its head is not better."""

    plan: Plan
    facts: dict[str, Any]
    published: Published | None = None


@dataclass
class State:
    """State kept between rounds.

    Attributes:
        rounds: number of the last one.
        misses: how many of the last ones published nothing.
        newest: the newest shard that a round has read.
        plan: of an unfinished round.
    """

    rounds: int = 0
    misses: int = 0
    newest: str = ""
    plan: dict | None = None


@dataclass
class Learner:
    """Trains a head in rounds on a server's recorded answers.

    Args:
        target: Hugging Face folder of the target.
        recorded: folder of the recorded answers.
        head: folder to publish in; if it is empty, `drafter` becomes its first version.
        drafter: checkpoint to start from.
        device: that trains.
        further, from_nothing: options of the training; the seed and the bias are set by the learner.

    Raises:
        ValueError: target, drafter and recorded answers do not belong together, or the drafter is no EAGLE-1/2 head.
    """

    target: str
    recorded: str
    head: Path
    drafter: str | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    further: EagleOptions = FURTHER
    from_nothing: EagleOptions = FROM_NOTHING
    progress: bool = True

    def __post_init__(self):
        self.config = read_target_config(self.target)
        facts = read_facts(self.recorded)
        if facts.hidden_size != self.config["hidden_size"]:
            raise ValueError(
                f"{self.recorded} has hidden states of {facts.target} (size {facts.hidden_size}), the target "
                f"{self.target} has size {self.config['hidden_size']}: give the folder of the same target"
            )
        if not is_published(self.head):
            if self.drafter is None:
                raise ValueError(f"{self.head} has no drafter: give --model, or make one with `specplug drafter new`")
            self._validate(Path(self.drafter))
            publish(
                self.head,
                lambda folder: copy_checkpoint(Path(self.drafter), folder),
                {"start": Path(self.drafter).name},
            )
        self._validate(current_folder(self.head))
        self.work = self.head / WORK_NAME
        self.state = self._read_state()

    def _validate(self, folder: Path) -> CheckpointInfo:
        """Check that a checkpoint can be trained further.

        Raises:
            ValueError: it is not an EAGLE-1/2 or HASS head of the target with one layer of the target's shape.
        """
        info = validate_checkpoint(folder, self.config["hidden_size"], self.config["vocab_size"], "eagle")
        for key in ("intermediate_size", "num_attention_heads"):
            if info.config.get(key, self.config[key]) != self.config[key]:
                raise ValueError(
                    f"{folder} has {key} {info.config[key]}, the target {self.config[key]}: only heads of the target's "
                    "shape can learn (`specplug drafter new` makes one)"
                )
        return info

    # ---- choosing

    def waiting_tokens(self) -> int:
        """Return the answer tokens in shards that no round has read."""
        return sum(shard_answer_tokens(file) for file in self._new_shards())

    @property
    def patience(self) -> int:
        """Return by how much more than the first round the next one waits for: where a drafter does not get better,
        training would only take time from the server."""
        return 2 ** min(self.state.misses, MOST_PATIENCE)

    def _new_shards(self) -> list[Path]:
        return [file for file in shard_files(self.recorded) if file.name > self.state.newest]

    def plan(self) -> Plan | None:
        """Return the plan of the unfinished round, or of the next one; None if there is no new shard."""
        if self.state.plan is not None:
            plan = Plan(**self.state.plan)
            names = {file.name for file in shard_files(self.recorded)}
            if names.issuperset([*plan.new, *plan.replayed]) and plan.base == read_current(self.head).version:
                return plan
        self._forget_round()
        new = _within(reversed(self._new_shards()), ROUND_BYTES // 2)[::-1]
        if not new:
            return None
        number = self.state.rounds + 1
        older = [file for file in shard_files(self.recorded) if file.name < new[0].name]
        random.Random(number).shuffle(older)
        replayed = _within(older, sum(file.stat().st_size for file in new))
        plan = Plan(number, read_current(self.head).version, _names(new), _names(replayed))
        self.state.plan = asdict(plan)
        self._write_state()
        return plan

    def _forget_round(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.state.plan = None

    # ---- one round

    def run(self, plan: Plan) -> Outcome:
        """Run a round to its end; a round that was broken off goes on from its training state.

        Raises:
            KeyboardInterrupt: a signal asked to stop; the training state is kept.
            OSError: something could not be written; nothing is published.
        """
        material = self._material(plan)
        if material is None:
            outcome = Outcome(plan, {"skipped": f"fewer than {MIN_ANSWERS} answers to hold out"})
        else:
            outcome = self._train_and_compare(plan, material)
        self._forget_round()
        self.state.rounds = plan.number
        self.state.newest = plan.new[-1]
        self.state.misses = 0 if outcome.published else self.state.misses + 1
        self._write_state()
        self._log(outcome)
        return outcome

    def _material(self, plan: Plan) -> Material | None:
        new, replayed = (self._read(names) for names in (plan.new, plan.replayed))
        if new is None:
            return None
        held = min(max(int(len(new) * HELD_OUT_SHARE), MIN_ANSWERS), HELD_OUT_MOST)
        if len(new) < 2 * held:
            return None
        train_set, held_out, old = new.take(list(range(len(new) - held))), list(range(len(new) - held, len(new))), None
        if replayed is not None and len(replayed) >= 2 * OLD_ANSWERS:
            order = list(range(len(replayed)))
            random.Random(plan.number).shuffle(order)
            old = replayed.take(order[:OLD_ANSWERS])
            replayed = replayed.take(order[OLD_ANSWERS:])
        if replayed is not None:
            train_set = join([train_set, replayed])
        known = {tuple(answer.ids) for answer in answers_of(train_set)}
        rows = answers_of(new)
        held_out = [i for i in held_out if tuple(rows[i].ids) not in known]
        return Material(train_set, new.take(held_out), old) if len(held_out) >= MIN_ANSWERS else None

    def _read(self, names: list[str]) -> FeatureSet | None:
        by_name = {file.name: file for file in shard_files(self.recorded)}
        files = [by_name[name] for name in names if name in by_name]
        sets = [data for file in files if (data := read_shard(file, self.config["vocab_size"])) is not None]
        return join(sets) if sets else None

    def _train_and_compare(self, plan: Plan, material: Material) -> Outcome:
        base = current_folder(self.head)
        info = self._validate(base)
        untrained = bool(info.config.get("specplug", {}).get(UNTRAINED_KEY))
        recipe = self.from_nothing if untrained else self.further
        options = replace(recipe, seed=plan.number, bias=info.has_bias)
        head, ids = load_trained(str(base))
        new_ids = adapted_vocabulary(ids, answers_of(material.train), end_ids_of(self.config))
        task = EagleTask(self.target, new_ids, options, None if untrained else str(base), self.device)
        facts = {"round": plan.number, "base_version": plan.base, "answers": len(material.train)}
        # The provenance keeps its earlier training data.
        before = {"learned_from": info.config.get("specplug", {}).get("learned_from", base.name)}
        settings = RunSettings(facts=facts | before, progress=self.progress)
        train(task, material.train, str(self.work), settings)
        trained, trained_ids = load_trained(str(self.work))
        return self._decide(plan, material, facts, (head, ids), (trained, trained_ids))

    def _decide(self, plan: Plan, material: Material, facts: dict, current: tuple, trained: tuple) -> Outcome:
        """Measure both heads and publish the trained one if it is better."""
        _, embedding, lm_head = target_head(self.target)
        dtype = compute_dtype(lm_head.device)

        def taus(data: FeatureSet) -> tuple[HeldOut, HeldOut]:
            return tuple(
                measure(head, data, embedding, lm_head[ids].to(dtype), ids) for head, ids in (current, trained)
            )

        before, after = taus(material.held_out)
        differences = compare(before, after)
        facts = facts | {
            "held_out_answers": len(material.held_out),
            "chain_tau": round(after.chain_tau, 4),
            "tree_tau": round(after.tree_tau, 4),
            "baseline_chain_tau": round(before.chain_tau, 4),
            "baseline_tree_tau": round(before.tree_tau, 4),
            "chain_difference": str(differences["chain"]),
            "tree_difference": str(differences["tree"]),
        }
        keeps = True
        if material.old is not None:
            old_before, old_after = taus(material.old)
            keeps = old_after.tree_tau >= WORST_ON_OLD * old_before.tree_tau
            facts |= {
                "old_tree_tau": round(old_after.tree_tau, 4),
                "old_baseline_tree_tau": round(old_before.tree_tau, 4),
            }
        if not (is_better(differences) and keeps):
            return Outcome(plan, facts)
        return Outcome(plan, facts, publish(self.head, lambda folder: self._write_version(folder, facts), facts))

    def _write_version(self, folder: Path, facts: dict) -> None:
        """Write the candidate with its measurements."""
        copy_checkpoint(self.work, folder)
        config = json.loads((folder / CONFIG_NAME).read_text())
        config["specplug"] |= facts | {"dev_chain_tau": facts["chain_tau"]}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")

    # ---- state between rounds

    def _read_state(self) -> State:
        file = self.head / STATE_NAME
        try:
            return State(**json.loads(file.read_text()))
        except FileNotFoundError:
            return State()
        except (ValueError, TypeError) as error:
            logger.warning("%s is damaged and is started again: %s", file, error)
            return State()

    def _write_state(self) -> None:
        with replacing(self.head / STATE_NAME) as temporary:
            temporary.write_text(json.dumps(asdict(self.state)) + "\n")

    def _log(self, outcome: Outcome) -> None:
        file = self.head / HISTORY_NAME
        lines = file.read_text().splitlines()[1 - HISTORY_LINES :] if file.exists() else []
        version = outcome.published.version if outcome.published else None
        lines.append(json.dumps({"round": outcome.plan.number, "published_version": version, **outcome.facts}))
        with replacing(file) as temporary:
            temporary.write_text("\n".join(lines) + "\n")


def _within(files: Iterable[Path], limit: int) -> list[Path]:
    """The first files, at least one, that have no more than `limit` bytes together."""
    chosen, total = [], 0
    for file in files:
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # the ring has deleted it
            continue
        if chosen and total > limit:
            break
        chosen.append(file)
    return chosen


def _names(files: list[Path]) -> list[str]:
    return sorted(file.name for file in files)


def copy_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Copy the files of a checkpoint, without the training state beside it."""
    for pattern in ("config.json", "*.safetensors", "*.bin"):
        for file in checkpoint.glob(pattern):
            shutil.copy(file, folder / file.name)
