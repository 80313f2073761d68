"""Convolutions and recurrences of layers with states, in C++ or in torch: one arithmetic for all rows.

Rows are in sequences: each continues the state of the row before it.  A state is rounded to its type in memory after
each row, so that a row's result does not depend on where a sequence is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize, silu, softplus

from vllm_specplug.cpu.kernels.cpu_ops import operators

#: The most inputs of a convolution that the operator takes.
MOST_TAPS = 16


@dataclass(frozen=True)
class Sequences:
    """Sequences of rows, and where their states are.

    Attributes:
        starts: int64 ``[num_sequences + 1]``; their first rows, and the number of rows.
        sources: int64 ``[num_sequences]``; place of the state that the first row continues; -1: it is zeros.
        places: int64 ``[num_sequences]``; where the last row's state goes.
    """

    starts: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor

    @classmethod
    def single(cls, sources: torch.Tensor, places: torch.Tensor) -> Sequences:
        """Return sequences of one row each."""
        return cls(torch.arange(len(places) + 1), sources, places)

    def __iter__(self) -> Iterator[tuple[range, int, int]]:
        """Yield rows, source and place of each."""
        starts = self.starts.tolist()
        rows = map(range, starts[:-1], starts[1:])
        return zip(rows, self.sources.tolist(), self.places.tolist(), strict=True)


def _state(before: torch.Tensor, source: int) -> torch.Tensor:
    return before[source].float() if source >= 0 else torch.zeros(before.shape[1:])


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
    activates: bool,
) -> torch.Tensor:
    output = torch.empty_like(x)
    for rows, source, place in sequences:
        window = torch.cat([_state(before, source), x[rows.start : rows.stop].to(after.dtype).float()])
        for i, row in enumerate(rows):
            output[row] = (window[i : i + len(weight)] * weight).sum(0) + (0 if bias is None else bias)
        after[place] = window[len(rows) :].to(after.dtype)
    return silu(output) if activates else output


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
    activates: bool,
) -> torch.Tensor:
    """Convolve each channel over the last rows of its sequence.

    Args:
        x: float32 ``[num_rows, channels]``, contiguous.
        weight: float32 ``[taps, channels]``, contiguous.
        bias: float32 ``[channels]``.
        before: states that sequences begin with: their last inputs, ``[num_places, taps - 1, channels]``, any strides.
        after: states that they end with.  It may be ``before``.
        sequences: of ``x``.
        activates: whether SiLU follows.

    Returns:
        Like ``x``.
    """
    if (ops := operators()) is None:
        return causal_conv_reference(x, weight, bias, before, after, sequences, activates)
    spans = sequences.starts, sequences.sources, sequences.places
    return ops.causal_conv.default(x, weight, bias, before, after, *spans, activates)


def gated_delta_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    repeats, output = value.shape[1] // key.shape[1], torch.empty_like(value)
    query, key = (normalize(one, dim=-1, eps=1e-6).repeat_interleave(repeats, 1) for one in (query, key))
    decay, rate = (-a_log.exp() * softplus(a + dt_bias)).exp(), b.sigmoid()
    for rows, source, place in sequences:
        state = _state(before, source)
        for row in rows:
            state = state * decay[row][:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[row])
            change = (value[row] - read) * rate[row][:, None]
            state = (state + key[row][:, :, None] * change[:, None]).to(after.dtype).float()
            output[row] = torch.einsum("hkv,hk->hv", state, query[row]) * query.shape[-1] ** -0.5
        after[place] = state.to(after.dtype)
    return output


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Run the gated delta rule.  All rows are contiguous float32.

    Args:
        query, key: ``[num_rows, num_key_heads, key_size]``; they are scaled to unit length.
        value: ``[num_rows, num_heads, value_size]``.
        a, b: ``[num_rows, num_heads]``; of the decay, and of the learning rate.
        a_log, dt_bias: ``[num_heads]``; of the decay.
        before: states that sequences begin with, ``[num_places, num_heads, key_size, value_size]``; a head is
            contiguous.
        after: states that they end with.  It may be ``before``.
        sequences: of the rows.

    Returns:
        Like ``value``.
    """
    if (ops := operators()) is None:
        return gated_delta_reference(query, key, value, a, b, a_log, dt_bias, before, after, sequences)
    spans = sequences.starts, sequences.sources, sequences.places
    return ops.gated_delta.default(query, key, value, a, b, a_log, dt_bias, before, after, *spans)


def mamba2_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    repeats, output, dt = x.shape[1] // b.shape[1], torch.empty_like(x), softplus(dt + dt_bias)
    b, c = (one.repeat_interleave(repeats, 1) for one in (b, c))
    for rows, source, place in sequences:
        state = _state(before, source)
        for row in rows:
            state = state * (dt[row] * a).exp()[:, None, None]
            state = state + torch.einsum("hp,hn->hpn", dt[row][:, None] * x[row], b[row])
            state = state.to(after.dtype).float()
            output[row] = torch.einsum("hpn,hn->hp", state, c[row]) + d[:, None] * x[row]
        after[place] = state.to(after.dtype)
    return output


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Run the recurrence of Mamba-2.  All rows are contiguous float32.

    Args:
        x: ``[num_rows, num_heads, head_size]``.
        dt: ``[num_rows, num_heads]``; time steps, before bias and softplus.
        a, d, dt_bias: ``[num_heads]``; decay, direct path, bias of the time steps.
        b, c: ``[num_rows, num_groups, state_size]``; what goes into a state, and what is read from it.
        before: states that sequences begin with, ``[num_places, num_heads, head_size, state_size]``; a head is
            contiguous.
        after: states that they end with.  It may be ``before``.
        sequences: of the rows.

    Returns:
        Like ``x``.
    """
    if (ops := operators()) is None:
        return mamba2_scan_reference(x, dt, a, b, c, d, dt_bias, before, after, sequences)
    spans = sequences.starts, sequences.sources, sequences.places
    return ops.mamba2_scan.default(x, dt, a, b, c, d, dt_bias, before, after, *spans)
