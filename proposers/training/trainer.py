"""The training loop of every drafter: steps, schedule, several devices, measuring, resuming.

A method's own part is a subclass of `Task`: its head, its loss, its initial weights and its export.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from .evaluate import Acceptance
from .features import FeatureSet, check_features, target_head
from .log import TrainingLog
from .loop import SCHEDULES, Batch, interruptible, learning_rate, load_state, make_batch, plan, save_state
from .options import check_ranges, option
from .precision import compute_dtype
from .team import Team

STATE_NAME = "training_state.pt"
LOG_EVERY = 20  # steps between two log rows of losses


@dataclass(frozen=True)
class LoopOptions:
    """Options of a training run that decide its weights, besides the target and the data."""

    epochs: int = option(8, "passes over the data", low=1)
    batch_tokens: int = option(4096, "largest number of tokens of a micro-batch, padding included", low=1)
    accumulate: int = option(1, "micro-batches per step and device", low=1)
    lr: float = option(1e-3, "highest learning rate", above=0)
    schedule: str = option("cosine", f"how the learning rate falls: {' or '.join(SCHEDULES)}")
    warmup: float = option(0.03, "share of the steps, at the start, in which the learning rate rises", low=0, high=1)
    weight_decay: float = option(0.05, "weight decay of AdamW", low=0)
    clip: float = option(1.0, "largest norm of the gradient (0: no limit)", low=0)
    clip_value: float = option(0.0, "largest absolute value of an element of the gradient (0: no limit)", low=0)
    draft_vocab_size: int = option(
        8192, "size of the draft vocabulary: the most frequent tokens of the data, then those of --init-from", low=1
    )
    seed: int = option(0, "seed of the initial weights, the order of the data and the noise", low=0)

    def __post_init__(self):
        check_ranges(self)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"--schedule {self.schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")


@dataclass(frozen=True)
class RunSettings:
    """Settings of a training run that do not change its weights."""

    dev: FeatureSet | None = None  # answers to measure acceptance on; never trained on
    facts: dict = field(default_factory=dict)  # about the data, for the checkpoint
    eval_every: int = 0  # steps between two measurements on `dev`; 0: only at the end
    save_every_s: float = 60.0
    max_steps: int | None = None  # stop after so many steps and leave the state to resume
    progress: bool = True
    team: Team = field(default_factory=Team)


class Task(ABC):
    """A method's part of a training run; the tensors that a step reads are on `device` after `prepare`.

    Args:
        draft_ids: int64 [draft_vocab], the target ids that the head can propose, ascending.
        init_from: a checkpoint of the same shape to start from.

    Raises:
        ValueError: the checkpoint belongs to another target or has another shape.
    """

    def __init__(
        self,
        target_dir: str,
        draft_ids: torch.Tensor,
        options: LoopOptions,
        init_from: str | None = None,
        device: torch.device | None = None,
    ):
        self.device = device or torch.device("cpu")
        self.target_dir, self.draft_ids, self.options, self.init_from = target_dir, draft_ids, options, init_from
        self.target_config, self.embedding, lm_head = target_head(target_dir)
        if init_from is not None:
            self.check_start(init_from, self.target_config, options)
        # [draft_vocab, h], the target's rows of `draft_ids`; float32 where products of bfloat16 are slow:
        self.draft_head = lm_head[draft_ids].to(
            self.device, torch.promote_types(lm_head.dtype, compute_dtype(self.device))
        )
        self.in_draft = torch.zeros(lm_head.shape[0], dtype=torch.bool, device=self.device)  # [vocab]
        self.in_draft[draft_ids.to(self.device)] = True
        self.head = self.new_head()

    @classmethod
    @abstractmethod
    def check_start(cls, init_from: str, target_config: dict, options: LoopOptions) -> None:
        """Check that training can start from a checkpoint.

        Raises:
            ValueError: it belongs to another target or has another shape.
        """

    @abstractmethod
    def new_head(self) -> torch.nn.Module:
        """The module to train; `prepare` sets its weights."""

    def parameter_groups(self) -> list[dict]:
        """The optimizer's parameter groups; a group's learning rate is the schedule's times its `lr_scale`."""
        return [{"params": self.head.parameters()}]

    @abstractmethod
    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        """Set the values that are derived from the data and, if `fresh`, the initial weights."""

    @abstractmethod
    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Named scalars whose sum is minimised, at optimizer step `step` of `steps`."""

    @abstractmethod
    def measure(self, dev: FeatureSet) -> Acceptance:
        """Acceptance on answers that are not trained on."""

    @abstractmethod
    def export(self, out_dir: str, facts: dict) -> None:
        """Write the checkpoint."""


def train(task: Task, data: FeatureSet, out_dir: str, settings: RunSettings | None = None) -> torch.nn.Module:
    """Train `task.head` on `data`, write log and state to `out_dir`, and export at the end; return the head.

    Raises:
        ValueError: features of another target; `out_dir` holds the state of a run with other settings or data.
        OSError: a file could not be written.
    """
    check_features(data, task.target_config)
    run = _Run(task, data, out_dir, settings or RunSettings())
    run.make_steps()
    run.finish()
    return task.head


class _Run:
    """One training run: its batches, its optimizer, its log and its saved state."""

    def __init__(self, task: Task, data: FeatureSet, out_dir: str, settings: RunSettings):
        options, team = task.options, settings.team
        self.task, self.data, self.out_dir, self.settings = task, data, out_dir, settings
        self.micro_batches = options.accumulate * team.size
        batches = list(plan(data.lengths.tolist(), options.batch_tokens, options.seed, options.epochs))
        if not batches:
            raise ValueError("there is nothing to train on: no sequence has 3 tokens or more")
        self.groups = [batches[i : i + self.micro_batches] for i in range(0, len(batches), self.micro_batches)]
        self.plan_id = _plan_id(options, data, task.draft_ids, self.micro_batches)
        self.state_file = Path(out_dir) / STATE_NAME
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        state = load_state(self.state_file, self.plan_id) or {"step": 0, "seconds": 0.0}
        task.prepare(data, fresh="head" not in state)
        if "head" in state:
            task.head.load_state_dict(state["head"])
        task.head.to(team.device)
        team.share_weights(task.head)
        self.optimizer = torch.optim.AdamW(
            task.parameter_groups(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.log = TrainingLog(out_dir, state["step"]) if team.is_leader else None
        self.meter = _Meter()
        self.first_step = state["step"]
        self.stop = len(self.groups) if settings.max_steps is None else min(settings.max_steps, len(self.groups))
        self.saved = time.monotonic()
        self.started = self.saved - state["seconds"]  # as if the run had never stopped

    def make_steps(self) -> None:
        """Make the steps up to `stop`, log and save; an interrupted run keeps all whole steps."""
        settings, total, is_leader = self.settings, len(self.groups), self.settings.team.is_leader
        hidden = not (settings.progress and is_leader)
        steps = range(self.first_step, self.stop)
        with (
            interruptible() as interrupt,
            tqdm(steps, initial=self.first_step, total=total, desc="train", disable=hidden) as bar,
        ):
            for step in bar:
                rate = self._step(step)
                bar.set_postfix_str(str(self.meter), refresh=False)
                done = step + 1
                if self.log and (done % LOG_EVERY == 0 or done == self.stop):
                    self.log.add(step=done, lr=rate, **self.meter.take())
                measures = settings.dev is not None and settings.eval_every and done % settings.eval_every == 0
                if self.log and measures and done < total:
                    self._measure(done)
                due = time.monotonic() - self.saved > settings.save_every_s or done == self.stop
                if is_leader and (due or interrupt.asked):
                    self._save(done)
                if interrupt.asked:
                    raise KeyboardInterrupt

    def finish(self) -> None:
        """Measure and export, if all steps are made; the other processes wait for the leader."""
        task, team, dev = self.task, self.settings.team, self.settings.dev
        task.head.eval()
        if self.stop == len(self.groups) and team.is_leader:
            seconds = round(time.monotonic() - self.started)
            facts = self.settings.facts | {
                "init_from": Path(task.init_from).name if task.init_from else None,
                "options": asdict(task.options),
                "devices": f"{team.size} x {team.device.type}",
                "steps": self.stop,
                "train_seconds": seconds,
            }
            if dev is not None:
                result = self._measure(self.stop)
                print(f"dev: {result}")
                facts |= {"dev_chain_tau": round(result.tau, 4), "dev_alpha": [round(a, 4) for a in result.alphas]}
            task.export(self.out_dir, facts)
        team.barrier()

    def _step(self, step: int) -> float:
        """Make one optimizer step; return its learning rate."""
        options, parameters = self.task.options, list(self.task.head.parameters())
        rate = learning_rate(step, len(self.groups), options.lr, options.warmup, schedule=options.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        self._add_gradients(step)
        if options.clip_value:
            torch.nn.utils.clip_grad_value_(parameters, options.clip_value)
        if options.clip:
            torch.nn.utils.clip_grad_norm_(parameters, options.clip)
        self.optimizer.step()
        return rate

    def _add_gradients(self, step: int) -> None:
        """Compute the gradient of the mean loss over a step's micro-batches, those of other processes included."""
        group, team, seed = self.groups[step], self.settings.team, self.task.options.seed
        for index in range(team.rank, len(group), team.size):
            # The seed belongs to the micro-batch, so that its noise is the same whichever process works on it.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step * self.micro_batches + index)
            batch = make_batch(self.data, group[index], compute_dtype(team.device))
            losses = self.task.losses(batch.to(team.device), step, len(self.groups), generator)
            (sum(losses.values()) / len(group)).backward()
            self.meter.add(losses, int((batch.label_ids >= 0).sum()))
        team.add_gradients(self.task.head)

    def _measure(self, step: int) -> Acceptance:
        result = self.task.measure(self.settings.dev)
        self.log.add(step=step, alpha=[round(alpha, 4) for alpha in result.alphas], tau=round(result.tau, 4))
        return result

    def _save(self, step: int) -> None:
        self.saved = time.monotonic()
        state = {"head": self.task.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": step, "seconds": self.saved - self.started, "plan": self.plan_id}
        save_state(self.state_file, state)


class _Meter:
    """Losses since the last log row, smoothed losses for the progress bar, and the speed."""

    def __init__(self):
        self.smooth: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = self.tokens = 0
        self.since = time.monotonic()

    def add(self, losses: dict[str, torch.Tensor], tokens: int) -> None:
        self.count += 1
        self.tokens += tokens
        for name, loss in losses.items():
            value = loss.item()
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.smooth[name] = 0.97 * self.smooth.get(name, value) + 0.03 * value

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.since, 1e-9)

    def take(self) -> dict:
        """Return the log row's values and start the next row; no losses if this process had no micro-batch."""
        row = {
            "loss": {name: round(total / max(self.count, 1), 6) for name, total in self.sums.items()},
            "tokens_per_s": round(self.tokens_per_s),
        }
        self.reset()
        return row

    def __str__(self) -> str:
        losses = " ".join(f"{name} {value:.3f}" for name, value in self.smooth.items())
        return f"{losses} {self.tokens_per_s:.0f} tok/s"


def _plan_id(options: LoopOptions, data: FeatureSet, draft_ids: torch.Tensor, micro_batches: int) -> dict:
    """Settings that a saved state must have; two processes can resume a run of one that had twice the `accumulate`."""
    settings = asdict(options)
    del settings["accumulate"]
    return settings | {
        "micro_batches": micro_batches,
        "data": hashlib.sha256(data.ids.numpy().tobytes()).hexdigest(),
        "draft_ids": hashlib.sha256(draft_ids.numpy().tobytes()).hexdigest(),
    }
