"""Numbers of requests that CUDA graphs are recorded for, and vLLM's capture sizes that follow from them."""

from __future__ import annotations

from collections.abc import Iterable

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


def capture_sizes(known: Iterable[int], widths: Iterable[int], max_num_reqs: int, max_num_tokens: int) -> list[int]:
    """Return vLLM's capture sizes (rows of a forward) with those of trees: rows of a tree times requests.

    vLLM records a full graph of uniform trees only for sizes that it captures, by default none above 512 rows: 8 trees
    of 61 rows.

    Args:
        known: the sizes that vLLM chose.
        widths: rows of a tree, the root included; one for each size of tree.
        max_num_reqs, max_num_tokens: of a forward.
    """
    sizes = {size for size in known if size <= max_num_tokens}
    for width in widths:
        most = min(max_num_reqs, max_num_tokens // width)
        if most > 0:
            sizes.update(count * width for count in request_counts(most))
    return sorted(sizes)
