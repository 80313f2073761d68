"""Time, CUDA graphs, kernel counts and the check for synchronisations; on a CPU what can be done without a GPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.doubles.no_syncs import NoLookAtTheDevice


class Skip(Exception):
    """A step cannot run here; the message says why."""


def device() -> torch.device:
    """Return the device of all inputs."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error: for figures beside a row's main one."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


@functools.lru_cache(maxsize=1)
def _flush_buffer() -> torch.Tensor:
    return torch.empty(1 << 28, dtype=torch.uint8, device=device())


def device_ms(call: Callable[[], Any], rounds: int = 25) -> float:
    """Measure the median milliseconds of a call on the device; on a CPU, one wall time.

    Each round first writes 256 MiB, so that no data of the round before is in the GPU's cache.
    """
    if device().type == "cpu":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        _flush_buffer().zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[rounds // 2]


def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record a call as a CUDA graph; return what replays it and the result that each replay overwrites."""
    if device().type == "cpu":
        result = call()
        return lambda: None, result
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels, and lets libraries allocate
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    """Time a call in a CUDA graph, as it is served: ``ms``; where no graph can be recorded, as it is, with the reason.

    ``launched_ms`` is the time of the call as it is.
    """
    launched = device_ms(call)
    if device().type == "cpu":
        return {"ms": launched}
    try:
        replay, _ = record(call)
    except Exception as error:
        torch.cuda.synchronize()
        return {"ms": launched, "no_graph": f"{type(error).__name__}: {error}"[:300]}
    return {"ms": device_ms(replay), "launched_ms": launched}


@functools.lru_cache(maxsize=1)
def bandwidth_gb_s() -> float:
    """Measure the bytes that the device's memory reads and writes per second."""
    half = 1 << (29 if device().type == "cuda" else 20)
    buffer = torch.empty(2 * half, dtype=torch.uint8, device=device())
    return 2 * half / device_ms(lambda: buffer[:half].copy_(buffer[half:])) / 1e6


def kernel_spans(call: Callable[[], Any]) -> list[tuple[float, float]]:
    """Return begin and end, in microseconds, of all that ran on the GPU during a call, from a profile of it."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def launches(call: Callable[[], Any]) -> int | None:
    """Count the kernels and copies of a call; None on a CPU."""
    return len(kernel_spans(call)) if device().type == "cuda" else None


def idle_share(call: Callable[[], Any]) -> float | None:
    """Return the share of the second half of a call's time in which no kernel ran; None on a CPU.

    Steps of prompts are longer than all others, so that the second half has steps of decoding only.
    """
    if device().type == "cpu":
        return None
    spans = kernel_spans(call)
    middle = (spans[0][0] + spans[-1][1]) / 2
    spans = [span for span in spans if span[0] > middle]
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1 - busy / (spans[-1][1] - spans[0][0]), 4)


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """Raise an error where the CPU would wait for the device."""
    if device().type == "cpu":
        with NoLookAtTheDevice():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
