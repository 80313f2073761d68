"""Times a function by the number of rows or requests that it runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def knots_up_to(limit: int) -> list[int]:
    """Return the counts to measure: all small ones, then about three per doubling, then ``limit``.

    Products are computed in tiles of some rows, so a row that begins a tile costs more than the others.
    """
    knots = [*range(1, 10), 12, 13, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256]
    return [knot for knot in knots if knot < limit] + [max(limit, 1)]


def fastest(
    run: Callable[[int], object], counts: Iterable[int], clock: Callable[[], float], sweeps: int, most_seconds: float
) -> dict[int, float]:
    """Measure the seconds of the fastest run for each count: disturbances only add time.

    Args:
        run: does what is timed, for a count.
        counts: in increasing order; counts not reached within ``most_seconds`` are left out.
        clock: returns seconds.
        sweeps: passes over all counts, if time allows; a disturbance seldom hits a count in each of them.
        most_seconds: no run starts after so many.
    """
    best: dict[int, float] = {}
    begin = clock()
    for _ in range(sweeps):
        for count in counts:
            start = clock()
            if best and start - begin > most_seconds:
                return best
            run(count)
            best[count] = min(best.get(count, float("inf")), clock() - start)
    return best
