"""Counts what draft phases and steps launch on a device, with torch operations and with kernels; nothing is timed.

``python -m benchmarks.micro.launches`` prints a table.  It runs on a CPU in Triton's interpreter.  An operator of torch
counts once, though a sort, for example, launches several kernels.  The drafter's model and attention are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

if not torch.cuda.is_available():
    from tests.doubles.interpreter import use_interpreter

    use_interpreter()

from tests.doubles import union_reference
from tests.doubles.contexts import make_match_inputs
from tests.doubles.device_work import DeviceWork
from tests.doubles.lookup_reference import draft_matches
from vllm_specplug.core import draft_sampling
from vllm_specplug.core.growth import TORCH_STATIC
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.step import plan_step
from vllm_specplug.gpu.draft_sampling import DeviceDraftSampling
from vllm_specplug.gpu.kernels import growth as triton_growth
from vllm_specplug.gpu.kernels import step as triton_step
from vllm_specplug.gpu.kernels.lookup import match_keys
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.union import device_proposer
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Draft, Walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_REQS, VOCAB, DEPTH, TOP_K, NUM_NODES = 2, 160, 6, 10, 60
LOOKUP = LookupOptions(num_speculative_tokens=NUM_NODES)


class Phases:
    """One draft phase of each kind, and the plan of a step; inputs are made before."""

    def __init__(self) -> None:
        self.roots = torch.zeros(NUM_REQS, dtype=torch.int64, device=DEVICE)
        self.slots = torch.arange(NUM_REQS, device=DEVICE)
        self.features = torch.zeros(NUM_REQS, 8, device=DEVICE)
        ones = torch.ones(NUM_REQS, device=DEVICE)
        limits = (0.7 * ones, 100 * self.slots + 100, 0.9 * ones)
        seeds = (self.slots, self.slots >= 0, self.slots)
        self.sampling = DeviceDraftSampling(*limits, *seeds, rejects=False, use_fp64=False)
        self.logits = {rows: torch.randn(rows, VOCAB, device=DEVICE) for rows in (NUM_REQS, NUM_REQS * TOP_K)}
        inputs = make_match_inputs([150] * NUM_REQS, 200)
        self.known = {name: values.to(DEVICE) for name, values in inputs.items()}
        self.namespaces = torch.zeros_like(self.known["slots"])
        path = torch.zeros(NUM_REQS, NUM_NODES + 1, dtype=torch.int64, device=DEVICE)
        self.walk = Walk(path, path, torch.ones(NUM_REQS, dtype=torch.int32, device=DEVICE))
        self.starts = torch.arange(NUM_REQS, dtype=torch.int32, device=DEVICE) * (NUM_NODES + 1)
        self.on_device = LookupOnDevice(LOOKUP)
        self.drafts = [self.lookup(True), self.lookup(True)]
        self.merging = device_proposer.Merging.make(start_weights(2), self.drafts, NUM_REQS)

    def eagle2(self, kernels: bool) -> Draft:
        """Grow trees with a drafter that computes nothing."""
        if kernels:
            triton_growth.start_levels(self.slots, self.roots, DEPTH - 1, TOP_K, 100)
        likeliest = triton_growth.likeliest if kernels else draft_sampling.likeliest

        def score(_level: int, hidden: torch.Tensor, top_k: int) -> draft_sampling.Children:
            return likeliest(self.logits[len(hidden)], top_k)

        def forward(level: int, token_ids: torch.Tensor, fed: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
            if not kernels:  # the inputs of a level, as the V1 runner computes them
                ancestor_bits(mask)
                (self.roots + level + 1).clamp(max=99).repeat_interleave(TOP_K)
                requests = torch.arange(NUM_REQS, dtype=torch.int32, device=DEVICE) * TOP_K
                torch.full_like(requests, TOP_K)
                torch.full_like(requests, TOP_K * (level + 1))
                (requests.long().unsqueeze(1) + torch.arange(TOP_K, device=DEVICE)).flatten()
            token_ids.flatten().to(torch.int32)
            return DraftFeatures(fed, fed)

        return grow_tree(
            self.roots,
            DraftFeatures(self.features, self.features),
            score,
            forward,
            num_nodes=NUM_NODES,
            draft_depth=DEPTH,
            draft_top_k=TOP_K,
            ops=triton_growth.KERNELS if kernels else TORCH_STATIC,
        )

    def sampled(self, kernels: bool) -> list[draft_sampling.Children]:
        """Choose the children of all levels above temperature 0."""
        sampling = replace(self.sampling, rejects=not kernels)
        rows = [NUM_REQS] + [NUM_REQS * TOP_K] * (DEPTH - 1)
        return [sampling.children(self.logits[count], level, TOP_K) for level, count in enumerate(rows)]

    def lookup(self, kernels: bool) -> Draft:
        if not kernels:
            return draft_matches(**self.known, root_token_ids=self.roots, options=LOOKUP, find=match_keys)
        known = self.known
        tokens = known["token_ids"], known["lens"]
        context = DeviceDraftContext(self.roots, known["slots"], *tokens, self.namespaces, lambda: None)
        return self.on_device.propose(context)

    def union(self, kernels: bool) -> Draft:
        """Merge two drafts; their sources are not counted."""
        if not kernels:
            return union_reference.merge_drafts(self.drafts, NUM_NODES)
        return device_proposer.merge_drafts(self.drafts, NUM_NODES, self.merging)

    def plan(self, kernels: bool) -> object:
        return (triton_step.plan_step if kernels else plan_step)(self.walk, self.starts, 200)


PHASES = ("eagle2", "sampled", "lookup", "union", "plan")


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    with torch.no_grad():  # inference mode would hide copies inside composite operators
        yield


def counts() -> dict[str, tuple[int, int]]:
    """Return the launches of each phase with torch operations and with kernels."""
    found = {}
    with _as_on_a_device():
        phases = Phases()
        for name in PHASES:
            found[name] = tuple(_counted(getattr(phases, name), kernels) for kernels in (False, True))
    return found


def _counted(phase: Callable[[bool], object], kernels: bool) -> int:
    phase(kernels)  # what is made once
    with DeviceWork() as work:
        phase(kernels)
    return sum(work.launches.values())


def main() -> None:
    print("| phase | torch operations | kernels |\n| --- | ---: | ---: |")
    for name, (before, after) in counts().items():
        print(f"| {name} | {before} | {after} |")


if __name__ == "__main__":
    main()
