"""Drafts above temperature 0 on the V2 runner: the sampler's noise in advance, and what rejection needs to know.

vLLM's sampler keys its noise by seed, position and token, so that the noise of a drafted token is known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_specplug.core.draft_sampling import CANDIDATES, Children, DraftSampling
from vllm_specplug.core.noise import derived_seeds, gumbel_noise
from vllm_specplug.gpu.kernels.growth import likeliest
from vllm_specplug.gpu.slot_params import SlotParams
from vllm_specplug.types import Proposal

#: Keys of the random numbers that rejection uses beside those of vLLM's sampler.
DRAFTED, TRIED = 1, 2


@triton.jit
def _sampler_noise_kernel(
    token_ids_ptr,
    seeds_ptr,
    positions_ptr,
    noise_ptr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    # vLLM's function takes the maximum over axis 0: of one row here, so that it returns all of its noise.
    columns = tl.arange(0, PADDED)[None, :]
    inside = columns < COUNT
    token_ids = tl.load(token_ids_ptr + node * COUNT + columns, mask=inside, other=0)
    noise, _ = gumbel_noised_argmax(
        tl.zeros([1, PADDED], tl.float32),
        token_ids,
        inside,
        tl.load(seeds_ptr + node),
        tl.load(positions_ptr + node),
        1.0,
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    columns = tl.arange(0, PADDED)
    tl.store(noise_ptr + node * COUNT + columns, noise, mask=columns < COUNT)


def sampler_noise(
    token_ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, use_fp64: bool = False
) -> torch.Tensor:
    """Compute the Gumbel noise that vLLM's V2 sampler adds, by vLLM's own function.

    Args:
        token_ids: int64 ``[num_nodes, num_candidates]``.
        seeds: int64 ``[num_nodes]``; of the request.
        positions: int64 ``[num_nodes]``; of the row that the token is sampled from.
        use_fp64: as the sampler does.

    Returns:
        float32 (float64 with ``use_fp64``), like ``token_ids``.
    """
    num_nodes, count = token_ids.shape
    noise = torch.empty(num_nodes, count, dtype=torch.float64 if use_fp64 else torch.float32, device=token_ids.device)
    _sampler_noise_kernel[(num_nodes,)](
        token_ids.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        noise,
        COUNT=count,
        PADDED=triton.next_power_of_2(count),
        USE_FP64=use_fp64,
        num_warps=1,
    )
    return noise


@triton.jit(do_not_specialize=("level", "width", "temperature_step", "top_k_step", "top_p_step", "seed_step"))
def _coupled_children_kernel(
    candidates_ptr, log_probs_ptr, token_ids_ptr, estimates_ptr,
    temperature_ptr, temperature_step, top_k_ptr, top_k_step, top_p_ptr, top_p_step, seeds_ptr, seed_step,
    positions_ptr, level, width, COUNT: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, USE_FP64: tl.constexpr,
):  # fmt: skip
    """Choose the children of one node among its candidates, likeliest first."""
    node = tl.program_id(0).to(tl.int64)
    request = node // width
    rank = tl.arange(0, PADDED)[None, :]
    inside = rank < COUNT
    token_ids = tl.load(candidates_ptr + node * COUNT + rank, mask=inside, other=0)
    log_probs = tl.load(log_probs_ptr + node * COUNT + rank, mask=inside, other=float("-inf"))
    temperature = tl.load(temperature_ptr + request * temperature_step)
    sampled = temperature > 0
    # Truncate as the sampler does: top_k, then the smallest set of the likeliest whose mass reaches top_p.
    within = inside & (rank < tl.load(top_k_ptr + request * top_k_step))
    scaled = tl.where(within, log_probs / tl.where(sampled, temperature, 1.0), float("-inf"))
    mass = tl.exp(scaled - tl.max(scaled, axis=1)[:, None])
    mass = mass / tl.sum(mass, axis=1)[:, None]
    before = tl.cumsum(mass, axis=1) - mass
    mass = tl.where(before < tl.load(top_p_ptr + request * top_p_step), mass, 0.0)
    noise, _ = gumbel_noised_argmax(
        tl.zeros([1, PADDED], tl.float32),
        token_ids,
        inside,
        tl.load(seeds_ptr + request * seed_step),
        tl.load(positions_ptr + request) + level,
        1.0,
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    drawn = tl.log(mass / tl.sum(mass, axis=1)[:, None]) + noise.to(tl.float32)[None, :]
    drawn = tl.where(mass > 0.0, drawn, float("-inf"))
    top = tl.max(drawn, axis=1)[:, None]
    estimates = drawn - top - tl.log(tl.sum(tl.exp(drawn - top), axis=1))[:, None]
    scores = tl.where(sampled, drawn, log_probs)
    estimates = tl.where(sampled, estimates, log_probs)
    left = inside
    for child in range(TOP_K):
        best = tl.max(tl.where(left, scores, float("-inf")), axis=1)[:, None]
        place = tl.min(tl.where(left & (scores == best), rank, PADDED), axis=1)[:, None]
        is_child = rank == place
        tl.store(token_ids_ptr + node * TOP_K + child, tl.sum(tl.where(is_child, token_ids, 0)))
        tl.store(estimates_ptr + node * TOP_K + child, tl.sum(tl.where(is_child, estimates, 0.0)))
        left = left & (rank != place)


@dataclass(frozen=True)
class DeviceDraftSampling(DraftSampling):
    """As ``DraftSampling``, with ``seeds`` int64 ``[num_reqs]``: those of the requests.

    Attributes:
        positions: int64 ``[num_reqs]``; of the roots.
        rejects: whether any request needs noise that the sampler does not use.
        use_fp64: see ``sampler_noise``.
    """

    positions: torch.Tensor
    rejects: bool
    use_fp64: bool

    def children(
        self, logits: torch.Tensor, level: int, draft_top_k: int, draft_ids: torch.Tensor | None = None
    ) -> Children:
        """Choose children in three launches; with rejection as ``DraftSampling``.

        The children's candidates are not returned: the exact walk needs none.
        """
        if self.rejects:
            return super().children(logits, level, draft_top_k, draft_ids)
        found = likeliest(logits, min(max(CANDIDATES, draft_top_k), logits.shape[1]), draft_ids)
        num_nodes, count = found.token_ids.shape
        token_ids = found.token_ids.new_empty(num_nodes, draft_top_k)
        estimates = found.log_probs.new_empty(num_nodes, draft_top_k)
        _coupled_children_kernel[(num_nodes,)](
            found.token_ids, found.log_probs, token_ids, estimates,
            self.temperature, self.temperature.stride(0), self.top_k, self.top_k.stride(0),
            self.top_p, self.top_p.stride(0), self.seeds, self.seeds.stride(0), self.positions,
            level, num_nodes // len(self.temperature),
            COUNT=count, PADDED=triton.next_power_of_2(count), TOP_K=draft_top_k, USE_FP64=self.use_fp64, num_warps=1,
        )  # fmt: skip
        return Children(token_ids, estimates)

    def noise(self, level: int, width: int, token_ids: torch.Tensor) -> torch.Tensor:
        seeds, positions = (values.repeat_interleave(width) for values in (self.seeds, self.positions))
        noise = sampler_noise(token_ids, seeds, positions + level, self.use_fp64).float()
        if not self.rejects:
            return noise
        node = torch.arange(len(seeds), device=seeds.device) % width
        own = derived_seeds(seeds, DRAFTED, positions, level, node).unsqueeze(1)
        return torch.where(self.coupled.repeat_interleave(width).unsqueeze(1), noise, gumbel_noise(own, token_ids))


def draft_sampling(params: SlotParams, slots: torch.Tensor, total_len: torch.Tensor) -> DeviceDraftSampling:
    """Return how to sample the drafts of a batch.

    Args:
        params: of all requests.
        slots: int ``[num_reqs]``.
        total_len: int ``[max_num_reqs]``; tokens of each request, the root included.
    """
    return DeviceDraftSampling(
        *params.draft_shape(slots),
        seeds=params.seeds(slots),
        coupled=params.coupled(slots),
        positions=total_len[slots].long() - 1,
        rejects=params.rejects,
        use_fp64=params.use_fp64,
    )


class Proposals:
    """The distributions that the trees of all request slots were drawn from.  They are large: allocated when used.

    Args:
        max_num_reqs: request slots.
    """

    def __init__(self, max_num_reqs: int):
        self._max_num_reqs, self._kept = max_num_reqs, None

    def keep(self, proposal: Proposal, slots: torch.Tensor) -> None:
        """Keep the proposals of a batch; those of slot -1 are not used."""
        given = (proposal.index, proposal.token_ids, proposal.probs)
        if self._kept is None:  # one slot more: the last one takes what is not used
            self._kept = [values.new_zeros(self._max_num_reqs + 1, *values.shape[1:]) for values in given]
        for kept, values in zip(self._kept, given, strict=True):
            kept[slots.long()] = values

    def of(self, slots: torch.Tensor) -> Proposal | None:
        """Return the proposals of int ``[num_reqs]`` slots; None before the first draft."""
        return None if self._kept is None else Proposal(*(kept[slots.long()] for kept in self._kept))


def most_children(options: Any) -> int:
    """Return how many children a node of a sampled tree may have."""
    if paths := getattr(options, "tree", None):
        return max(path[-1] for path in paths) + 1
    return getattr(options, "draft_top_k", None) or options.num_speculative_tokens
