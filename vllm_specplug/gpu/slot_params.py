"""Parameters of requests by slot, on the device at fixed addresses, so that recorded graphs can read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.vllm.plain_sampling import is_plainly_sampled, limits_of

_TEMPERATURE, _TOP_P, _EPSILON, _DELTA = range(4)
_SEED, _TOP_K, _COUPLED = range(3)


class SlotParams:
    """Written when requests are added.

    Args:
        options: of the method.
        sampler: vLLM's; its ``add_request`` has run for each slot that is added here.
        device: of the copies.

    Attributes:
        speculates: bool ``[max_num_reqs]``, in CPU memory; false if the request turned speculation off.
        samples: bool ``[max_num_reqs]``, in CPU memory; whether the request's drafts are sampled.
        settles: bool ``[max_num_reqs]``, in CPU memory; whether tokens are chosen before the exact walk, by typical
            acceptance or rejection.
        namespaces: int64 ``[max_num_reqs]``; as of ``DeviceDraftContext``.
    """

    def __init__(self, options: TreeOptions, sampler: Any, device: torch.device):
        self._options, self._states = options, sampler.sampling_states
        custom = (LogitBiasState, PenaltiesState, BadWordsState)
        # Custom processors change what only the exact walk evaluates.
        has_custom = any(not isinstance(processor, custom) for processor in sampler.logits_processors)
        self._verification = "exact" if has_custom else options.verification
        self._couples = options.verification != "typical" and getattr(model_drafter(options), "coupled", False)
        #: FlashInfer draws from another stream for such requests.
        self._is_fused = sampler.use_flashinfer
        self.use_fp64 = sampler.use_fp64_gumbel
        size = self._states.max_num_reqs
        self.samples, self.settles, self.speculates = np.zeros((3, size), dtype=bool)
        self._namespaces = np.zeros(size, dtype=np.int64)
        self.namespaces = torch.zeros(size, dtype=torch.int64, device=device)
        self._floats, self._ints = np.zeros((size, 4), dtype=np.float32), np.zeros((size, 3), dtype=np.int64)
        self._device_floats = torch.zeros(size, 4, device=device)
        self._device_ints = torch.zeros(size, 3, dtype=torch.int64, device=device)

    @property
    def rejects(self) -> bool:
        """Return whether any request may be verified by rejection."""
        return self._verification == "rejection"

    @property
    def is_read(self) -> bool:
        """Return whether anything on the device reads the parameters."""
        return self.may_sample or self._verification != "exact"

    @property
    def may_sample(self) -> bool:
        """Return whether drafts of any request may be sampled."""
        return self._couples or self.rejects

    def add(self, slot: int, params: Any, namespace: int = 0) -> None:
        """Write the parameters of the request in a slot: vLLM's ``SamplingParams``, and its namespace."""
        self._namespaces[slot] = namespace
        self.speculates[slot] = wants_speculation(params.extra_args)
        if not self.is_read:
            return
        limits = limits_of(params, self._options) if self._verification == "typical" else None
        rejects = self.rejects and is_plainly_sampled(params)
        self.settles[slot] = rejects or limits is not None
        states = self._states
        top_k, top_p = int(states.top_k.np[slot]), float(states.top_p.np[slot])
        is_fused = self._is_fused and params.seed is None and (top_k < states.vocab_size or top_p < 1)
        couples = self._couples and not rejects and not is_fused
        temperature = float(states.temperature.np[slot]) if rejects or couples else 0.0
        self.samples[slot] = temperature > 0
        self._floats[slot] = (temperature, top_p, *(limits or (1.0, 1.0)))
        self._ints[slot] = (states.seeds.np[slot], top_k, couples)

    def upload(self) -> None:
        """Copy to the device what is read there, without waiting for it."""
        async_tensor_h2d(self._namespaces, out=self.namespaces)
        if not self.is_read:
            return
        async_tensor_h2d(self._floats, out=self._device_floats)
        async_tensor_h2d(self._ints, out=self._device_ints)

    # ---- on the device, by slots (int ``[any length]``)

    def draft_shape(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return temperature (0: take the likeliest tokens), top_k and top_p of drafts."""
        floats = self._device_floats[slots]
        return floats[:, _TEMPERATURE], self._device_ints[slots, _TOP_K], floats[:, _TOP_P]

    def limits(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return epsilon and delta of typical acceptance."""
        return self._device_floats[slots, _EPSILON], self._device_floats[slots, _DELTA]

    def seeds(self, slots: torch.Tensor) -> torch.Tensor:
        return self._device_ints[slots, _SEED]

    def coupled(self, slots: torch.Tensor) -> torch.Tensor:
        """Return bool: whether drafts use the sampler's noise; else noise of their own."""
        return self._device_ints[slots, _COUPLED].bool()
