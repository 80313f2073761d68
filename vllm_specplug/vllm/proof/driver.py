"""Runs steps of a model runner for requests of our own, as vLLM's scheduler would, and reads their logits.

All hooks are attributes of the runner's objects while the proof runs; they are removed after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.proof import ProofFailed, ProofTree
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.scheduler import TreeSchedulerOutput
from vllm_specplug.gpu.drafters.base import TreeSpeculator
from vllm_specplug.gpu.timing import StepTimer
from vllm_specplug.types import PADDING

#: Most nodes of a tree where its size may be chosen: four levels of two.
MOST_NODES = 8


@dataclass
class Part:
    """Work of one request in a step.

    Attributes:
        request_id: ours.
        text: its tokens up to the last one that is computed, drafts left out.
        start: tokens whose key/value is in the pages.
        block_ids: by KV cache group.
        emitted: tokens that the step is made to emit, one if there is no tree.
        tree: verified after the last token; None: nothing.
        upcoming: the tree of its next step; None: there is none.
        num_prompt: tokens that it came with, if the runner has it already; 0: it is new.
    """

    request_id: str
    text: list[int]
    start: int
    block_ids: tuple[list[int], ...]
    emitted: list[int]
    tree: ProofTree | None = None
    upcoming: ProofTree | None = None
    num_prompt: int = 0

    @property
    def forced(self) -> list[int]:
        """The token to sample at each row of the logits."""
        tokens = [0] * (self.tree.num_rows if self.tree is not None else 1)
        path = [0] if self.tree is None else self.tree.path_rows
        for row, token in zip(path, self.emitted, strict=True):
            tokens[row] = token
        return tokens

    @property
    def count(self) -> int:
        """Rows of the forward."""
        return len(self.text) - self.start + (0 if self.tree is None else len(self.tree.token_ids))


@contextmanager
def attributes(of: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes inside the context."""
    own = {name: vars(of)[name] for name in values if name in vars(of)}
    for name, value in values.items():
        setattr(of, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(of, name, own[name])
            else:
                delattr(of, name)


class Driver(ABC):
    """Drives a worker.

    Args:
        worker: with a KV cache, warmed up.

    Attributes:
        num_nodes: nodes of a tree at the most.
        width: nodes that every tree must have.
        max_depth: depth of a tree at the most.
        keeps_bits: whether a row has the same bits in every batch and in trees, as far as the plugin computes it.
    """

    keeps_bits = False
    num_nodes: int
    width = 0
    max_depth: int

    def __init__(self, worker: Any):
        self.worker, self.runner = worker, worker.model_runner
        self._parts: dict[str, Part] = {}
        self._logits: dict[str, torch.Tensor] = {}
        #: Requests that the runner has, and those of them that end with the next step.
        self._open: set[str] = set()
        self._ended: set[str] = set()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Read logits, force tokens and keep the steps out of drafter, budget and counters inside the context."""
        compute = self.runner.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            if logits is not None:
                self._read(logits)
            return logits

        with ExitStack() as stack:
            stack.enter_context(attributes(self.runner.model, compute_logits=compute_logits))
            stack.enter_context(attributes(kv_transfer_state, _KV_CONNECTOR_AGENT=None))
            self._enter(stack)
            try:
                yield
            except ProofFailed:
                self._close()
                raise
            self._close()

    @abstractmethod
    def _enter(self, stack: ExitStack) -> None:
        """Enter the contexts of this runner."""

    @abstractmethod
    def _order(self) -> Sequence[str]:
        """Return the requests of the current forward, in the order of its logits."""

    def _read(self, logits: torch.Tensor) -> None:
        """Keep each request's rows, and leave logits whose argmax is the forced token."""
        first = 0
        for request_id in self._order():
            forced = self._parts[request_id].forced
            rows = logits[first : first + len(forced)]
            self._logits[request_id] = rows.to("cpu", torch.float32, copy=True)
            rows.zero_()
            rows[torch.arange(len(forced)), torch.tensor(forced)] = 1
            first += len(forced)

    def run(self, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """Run one step and return the logits of each request, float32 ``[num_rows, vocab_size]``.

        Raises:
            ProofFailed: other tokens were emitted than the trees' known text.
        """
        output = self._schedule(parts)
        self._parts, self._logits = {part.request_id: part for part in parts}, {}
        self.worker.execute_model(output)
        result = self.worker.sample_tokens(None)
        result = result.get_output() if hasattr(result, "get_output") else result
        if getattr(result, "sampled_token_ids", None):
            sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
            for part in parts:
                if (found := [int(token) for token in sampled[part.request_id]]) != part.emitted:
                    raise ProofFailed(f"a step emitted tokens {found}, and its text goes on with {part.emitted}")
        return self._logits

    def finish(self, parts: Sequence[Part]) -> None:
        """Let the runner forget requests at the next step."""
        self._ended |= {part.request_id for part in parts}

    def _close(self) -> None:
        """Let the runner forget all requests."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self._open)
        self.worker.execute_model(output)
        for request_id in self._open:  # vLLM forgets where states are in steps with rows only
            getattr(self.runner, "mamba_state_idx", {}).pop(request_id, None)
        self._open, self._ended = set(), set()

    def _schedule(self, parts: Sequence[Part]) -> SchedulerOutput:
        output = self._empty()
        output.finished_req_ids, self._ended = self._ended, set()
        self._open = self._open - output.finished_req_ids | {part.request_id for part in parts}
        output.scheduled_new_reqs = [self._new(part) for part in parts if not part.num_prompt]
        cached = CachedRequestData.make_empty()
        for part in (part for part in parts if part.num_prompt):
            cached.req_ids.append(part.request_id)
            cached.new_token_ids.append(part.text[part.num_prompt :])  # read with pipeline parallelism only
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(part.start)
            cached.num_output_tokens.append(len(part.text) - part.num_prompt)
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = {part.request_id: part.count for part in parts}
        output.total_num_scheduled_tokens = sum(part.count for part in parts)
        for part in parts:
            if part.tree is not None:
                output.scheduled_spec_decode_tokens[part.request_id] = list(part.tree.token_ids)
        return output

    def _empty(self) -> SchedulerOutput:
        return SchedulerOutput.make_empty()

    @staticmethod
    def _new(part: Part) -> NewRequestData:
        return NewRequestData(
            req_id=part.request_id,
            prompt_token_ids=list(part.text),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=64),
            pooling_params=None,
            block_ids=tuple(list(ids) for ids in part.block_ids),
            num_computed_tokens=part.start,
            lora_request=None,
            prefill_token_ids=list(part.text),
        )


class DriverV1(Driver):
    """Drives the V1 runner: the step's trees come with the scheduler's output."""

    def __init__(self, worker: Any):
        super().__init__(worker)
        self.num_nodes = min(MOST_NODES, self.runner.speculative_config.num_speculative_tokens)
        self.max_depth = self.num_nodes
        self.keeps_bits = operators() is not None

    def _enter(self, stack: ExitStack) -> None:
        nothing = attributes(
            self.runner,
            observers=[],
            serving_budget=None,
            greedy_head=None,  # all logits are read
            propose_draft_token_ids=no_drafts_v1(self.runner),
        )
        stack.enter_context(nothing)

    def _order(self) -> Sequence[str]:
        return self.runner.input_batch.req_ids

    def _empty(self) -> SchedulerOutput:
        return TreeSchedulerOutput.make_empty()

    def _schedule(self, parts: Sequence[Part]) -> SchedulerOutput:
        output = super()._schedule(parts)
        output.parents = {part.request_id: part.tree.parents for part in parts if part.tree is not None}
        return output

    @contextmanager
    def mask_off(self) -> Iterator[None]:
        """Let every row of a tree see all rows before it, and its state continue that of the row before it."""
        honest = self.runner._stage

        def all_seen(*args):
            step = honest(*args)
            if step.rows is None:
                return step
            step = replace(step, rows=replace(step.rows, mask=torch.ones_like(step.rows.mask).tril()))
            rows = torch.arange(step.tree.parents.shape[1]).expand_as(step.tree.parents)
            return self.runner.with_states(step, rows - 1)

        with attributes(self.runner, _stage=all_seen):
            yield


def no_drafts_v1(runner: Any) -> Any:
    """Return a draft phase of the V1 runner that drafts nothing."""
    return lambda *_, **__: [[] for _ in runner.input_batch.req_ids]


class DriverV2(Driver):
    """Drives the V2 runner: trees are on the device since the draft phase of the step before, here the proof's."""

    def __init__(self, worker: Any):
        super().__init__(worker)
        self.speculator: TreeSpeculator = self.runner.speculator
        self.num_nodes = self.width = self.speculator.trees.width - 1
        self.max_depth = self.speculator.trees.max_depth
        self._batch: Any = None

    def _enter(self, stack: ExitStack) -> None:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed  # older vLLM, on CPUs only, has none

        sample = self.runner.sample

        def sample_batch(hidden_states, input_batch, *args):
            self._batch = input_batch
            return sample(hidden_states, input_batch, *args)

        stack.enter_context(attributes(self.runner, sample=sample_batch))
        timer = StepTimer(None, self.runner.device)
        stack.enter_context(attributes(self.speculator, propose=self._propose, timer=timer))
        self.runner.kv_connector.set_disabled(True)
        stack.callback(self.runner.kv_connector.set_disabled, False)
        stack.enter_context(gpu_sync_allowed())  # logits are read, also with VLLM_GPU_SYNC_CHECK

    def _order(self) -> Sequence[str]:
        return self._batch.req_ids

    def _schedule(self, parts: Sequence[Part]) -> SchedulerOutput:
        output = super()._schedule(parts)
        output.num_spec_tokens_to_schedule = self.width  # else vLLM makes placeholders of the drafts
        return output

    def _propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        trees = self.speculator.trees
        parents = torch.full((input_batch.num_reqs, trees.width), PADDING, dtype=torch.int64)
        token_ids = torch.zeros_like(parents)
        for place, request_id in enumerate(input_batch.req_ids):
            tree = self._parts[request_id].upcoming
            if tree is not None:
                parents[place, 1:] = torch.tensor(tree.parents)
                token_ids[place, 1:] = torch.tensor(tree.token_ids)
        device = trees.parents.device
        trees.keep(parents.to(device), input_batch.idx_mapping)
        return token_ids[:, 1:].to(device)

    @contextmanager
    def mask_off(self) -> Iterator[None]:
        """Let every row of a tree see all rows before it."""
        bits = self.speculator.trees.slot_bits
        kept = bits.clone()
        width = self.speculator.trees.width
        bits.copy_(ancestor_bits(torch.ones(1, width, width, dtype=torch.bool, device=bits.device).tril()))
        try:
            yield
        finally:
            bits.copy_(kept)
