"""Numbers of requests that CUDA graphs are recorded for."""

from __future__ import annotations

#: Up to here each number of requests has its own graph; above, each power of two and three numbers between two.
_EACH = 8


def request_counts(most: int) -> list[int]:
    """Return the numbers of requests to record for: a graph that fits has less than a quarter of unused requests.

    Args:
        most: the largest number of requests; it is recorded too.
    """
    counts, step = list(range(1, _EACH + 1)), _EACH // 4
    while counts[-1] < most:
        counts += [counts[-1] + step * i for i in range(1, 5)]
        step *= 2
    return [count for count in counts if count < most] + [most]
