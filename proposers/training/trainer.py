"""The training loop of every drafter: steps, schedule, several devices, measuring, resuming.

What is particular to a method is behind `Task`: its head, its loss, how it starts, and how it is exported.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from .evaluate import Acceptance
from .features import FeatureSet, check_features
from .log import TrainingLog, plot_log
from .loop import SCHEDULES, Batch, learning_rate, load_state, make_batch, plan, save_state
from .team import Team

STATE_NAME = "training_state.pt"
LOG_EVERY = 20  # steps between two rows of losses


@dataclass(frozen=True)
class LoopOptions:
    """What every training run depends on, besides the target and the data."""

    epochs: int = 8
    batch_tokens: int = 4096  # of a micro-batch, padding included
    accumulate: int = 1  # micro-batches per step and device
    lr: float = 1e-3
    schedule: str = "cosine"  # or linear: to zero
    warmup: float = 0.03  # share of the steps
    weight_decay: float = 0.05
    clip: float = 1.0  # of the gradient's norm; 0: none
    clip_value: float = 0.0  # of each of the gradient's elements; 0: none
    draft_vocab_size: int = 8192
    seed: int = 0

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
        for name in ("epochs", "batch_tokens", "accumulate", "draft_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Task(Protocol):
    """A method's part of a training run; everything is on the team's device after `prepare`."""

    head: torch.nn.Module
    target_config: dict
    init_from: str | None  # checkpoint to start from

    # Optional: `parameter_groups()`, the optimizer's groups of the head's parameters; their learning rate is the
    # schedule's times the group's `lr_scale`.

    def prepare(self, data: FeatureSet, fresh: bool) -> None:
        """Set what is derived from the data; where `fresh`, the weights to begin with too."""

    def losses(self, batch: Batch, step: int, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Named scalars whose sum is to become small, at optimizer step `step` of `steps`."""

    def measure(self, dev: FeatureSet) -> Acceptance:
        """Acceptance on answers that are not trained on."""

    def export(self, out_dir: str, facts: dict) -> None:
        """Write the checkpoint."""


def train(
    task: Task,
    data: FeatureSet,
    out_dir: str,
    options: LoopOptions,
    draft_ids: torch.Tensor,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    eval_every: int = 0,
    max_steps: int | None = None,
    progress: bool = True,
    team: Team | None = None,
) -> None:
    """Train `task.head` on `data`, write log and state to `out_dir`, and export at the end.

    draft_ids: int64 [draft_vocab], part of what identifies the run. max_steps stops early and leaves the state to
    resume. eval_every: steps between two measurements on `dev` (0: only at the end).

    Raises:
        ValueError: features of another target; `out_dir` holds the state of a run with other settings or data.
        OSError: a file could not be written.
    """
    check_features(data, task.target_config)
    team = team or Team()
    micro_batches = options.accumulate * team.size
    batches = list(plan(data.lengths.tolist(), options.batch_tokens, options.seed, options.epochs))
    if not batches:
        raise ValueError("there is nothing to train on: no sequence has 3 tokens or more")
    groups = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
    plan_id = _plan_id(options, data, draft_ids, micro_batches)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    state_file = Path(out_dir) / STATE_NAME
    state = load_state(state_file, plan_id, _defaults(type(options))) or {"step": 0, "seconds": 0.0}
    head = task.head
    task.prepare(data, fresh="head" not in state)
    if "head" in state:
        head.load_state_dict(state["head"])
    head.to(team.device)
    team.share_weights(head)
    groups_of = task.parameter_groups() if hasattr(task, "parameter_groups") else [{"params": head.parameters()}]
    optimizer = torch.optim.AdamW(groups_of, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    log = TrainingLog(out_dir, state["step"]) if team.leads else None
    meter = _Meter()
    started = saved = time.monotonic()
    stop = len(groups) if max_steps is None else min(max_steps, len(groups))
    steps = range(state["step"], stop)
    with tqdm(
        steps, initial=state["step"], total=len(groups), desc="train", disable=not (progress and team.leads)
    ) as bar:
        for step in bar:
            rate = learning_rate(step, len(groups), options.lr, options.warmup, schedule=options.schedule)
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            optimizer.zero_grad(set_to_none=True)
            _add_gradients(task, data, groups[step], step, len(groups), micro_batches, options.seed, team, meter)
            if options.clip_value:
                torch.nn.utils.clip_grad_value_(head.parameters(), options.clip_value)
            if options.clip:
                torch.nn.utils.clip_grad_norm_(head.parameters(), options.clip)
            optimizer.step()
            bar.set_postfix_str(str(meter), refresh=False)
            if log and ((step + 1) % LOG_EVERY == 0 or step + 1 == stop):
                log.add(step=step + 1, lr=rate, **meter.take())
            if log and dev is not None and eval_every and (step + 1) % eval_every == 0 and step + 1 < len(groups):
                _measure(task, dev, log, step + 1)
            if team.leads and (time.monotonic() - saved > save_every_s or step + 1 == stop):
                saved = time.monotonic()
                seconds = state["seconds"] + saved - started
                _save(state_file, plan_id, head, optimizer, step + 1, seconds)
    head.eval()
    if stop == len(groups) and team.leads:
        seconds = round(state["seconds"] + time.monotonic() - started)
        facts = (facts or {}) | {
            "init_from": Path(task.init_from).name if task.init_from else None,
            "options": asdict(options),
            "devices": f"{team.size} x {team.device.type}",
            "steps": stop,
            "train_seconds": seconds,
        }
        if dev is not None:
            result = _measure(task, dev, log, stop)
            print(f"dev: {result}")
            facts |= {"dev_chain_tau": round(result.tau, 4), "dev_alpha": [round(a, 4) for a in result.alphas]}
        task.export(out_dir, facts)
        plot_log(out_dir)
    team.barrier()


def _add_gradients(
    task: Task,
    data: FeatureSet,
    group: list[list[int]],
    step: int,
    steps: int,
    micro_batches: int,
    seed: int,
    team: Team,
    meter: _Meter,
) -> None:
    """The gradient of the mean loss of a step's micro-batches, those of the other processes included."""
    for place in range(team.rank, len(group), team.size):
        # noise and draws belong to the micro-batch, whichever process works on it
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * micro_batches + place)
        batch = make_batch(data, group[place])
        losses = task.losses(batch.to(team.device), step, steps, generator)
        (sum(losses.values()) / len(group)).backward()
        meter.add(losses, int((batch.label_ids >= 0).sum()))
    team.add_gradients(task.head)


class _Meter:
    """Losses since the last log row, smoothed ones for the progress bar, and the speed."""

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
        """The log row's values; starts the next row. Empty where this process had no micro-batch."""
        row = {
            "loss": {name: round(total / max(self.count, 1), 6) for name, total in self.sums.items()},
            "tokens_per_s": round(self.tokens_per_s),
        }
        self.reset()
        return row

    def __str__(self) -> str:
        return (
            " ".join(f"{name} {value:.3f}" for name, value in self.smooth.items()) + f" {self.tokens_per_s:.0f} tok/s"
        )


def _measure(task: Task, dev: FeatureSet, log: TrainingLog, step: int) -> Acceptance:
    result = task.measure(dev)
    log.add(step=step, alpha=[round(alpha, 4) for alpha in result.alphas], tau=round(result.tau, 4))
    return result


def _plan_id(options: LoopOptions, data: FeatureSet, draft_ids: torch.Tensor, micro_batches: int) -> dict:
    """What a saved state must agree with. Two processes continue what one with twice the `accumulate` began."""
    settings = asdict(options)
    del settings["accumulate"]
    return settings | {
        "micro_batches": micro_batches,
        "data": hashlib.sha256(data.ids.numpy().tobytes()).hexdigest(),
        "draft_ids": hashlib.sha256(draft_ids.numpy().tobytes()).hexdigest(),
    }


def _defaults(options: type[LoopOptions]) -> dict:
    return asdict(options()) | {"micro_batches": 1}


def _save(file: Path, plan_id: dict, head, optimizer, step: int, seconds: float) -> None:
    state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
    save_state(file, state | {"plan": plan_id})
