"""Where n-grams occurred before: hash chains over stored tokens, as LZ77 compressors keep them.

A chain links the places whose last ``n`` tokens fall into the same bucket, newest first.  An entry is a hint: what it
points to is compared with the tokens themselves, so collisions, overwritten places and reused rows cost a candidate and
nothing else.  Each stored token takes 4 bytes, and 4 in each chain.
"""

from __future__ import annotations

import numpy as np

#: Stands between token sequences; equal to no token.
BREAK = -1

_MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], dtype=np.uint32)


class Chain:
    """Places by the hash of their last ``n`` tokens.

    Places are positions in the token store, from 1; 0 is no place.
    """

    def __init__(self, n: int, num_places: int, num_heads: int, num_rows: int = 1):
        self.n = n
        self._shift = np.uint32(32 - (num_heads - 1).bit_length())
        self.heads_per_row = 1 << (num_heads - 1).bit_length()
        self.heads = np.zeros(num_rows * self.heads_per_row, dtype=np.int32)
        self.previous = np.zeros(num_places + 1, dtype=np.int32)

    def buckets(self, grams: np.ndarray, rows: np.ndarray | int) -> np.ndarray:
        """Index into ``heads`` for int32 ``[..., n]`` tokens of the store's ``rows`` ``[...]``."""
        mixed = (grams.astype(np.uint32) * _MULTIPLIERS[: self.n]).sum(axis=-1, dtype=np.uint32)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * _MULTIPLIERS[3]
        return (mixed >> self._shift).astype(np.int64) + np.asarray(rows, dtype=np.int64) * self.heads_per_row

    def link(self, tokens: np.ndarray, places: np.ndarray, rows: np.ndarray | int) -> None:
        """Add places (int64 ``[count]``, oldest first within a row; their ``n`` tokens must be stored)."""
        if len(places) == 0:
            return
        buckets = self.buckets(tokens[places[:, None] - np.arange(self.n)], rows)
        if len(places) == 1:
            self.previous[places[0]] = self.heads[buckets[0]]
            self.heads[buckets[0]] = places[0]
            return
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], places[order]
        first = np.empty(len(places), dtype=bool)
        first[0] = True
        np.not_equal(buckets[1:], buckets[:-1], out=first[1:])
        older = np.empty(len(places), dtype=np.int64)
        older[1:] = places[:-1]
        older[first] = self.heads[buckets[first]]
        self.previous[places] = older
        last = np.append(first[1:], True)
        self.heads[buckets[last]] = places[last]

    def follow(self, grams: np.ndarray, rows: np.ndarray | int, count: int) -> np.ndarray:
        """The ``count`` newest places of each gram (int32 ``[num_reqs, n]``): int64 ``[num_reqs, count]``, 0: none."""
        found = np.empty((count, len(grams)), dtype=np.int64)
        place = self.heads[self.buckets(grams, rows)].astype(np.int64)
        for k in range(count):
            found[k] = place
            place = self.previous[place]
        return found.T

    def clear_row(self, row: int) -> None:
        """Forget a row's places."""
        self.heads[row * self.heads_per_row : (row + 1) * self.heads_per_row] = 0

    def grow(self, num_places: int, num_rows: int, used: list[slice]) -> None:
        """Room for more rows of places; of the old places, those ``used`` are kept."""
        self.previous = _grown(self.previous, num_places + 1, used)
        self.heads = _grown(self.heads, num_rows * self.heads_per_row, [slice(len(self.heads))])


def match_lengths(tokens: np.ndarray, places: np.ndarray, suffixes: np.ndarray) -> np.ndarray:
    """How many tokens before and at each place equal the end of a suffix.

    Args:
        tokens: int32; the store.
        places: int64 ``[num_reqs, count]``.
        suffixes: int32 ``[num_reqs, max_match]``, newest token first; ``BREAK`` where there is none.

    Returns:
        int64 ``[num_reqs, count]``; 0 to ``max_match``.
    """
    back = np.maximum(places[:, :, None] - np.arange(suffixes.shape[1]), 0)
    wanted = suffixes[:, None, :]
    return np.logical_and.accumulate((tokens[back] == wanted) & (wanted != BREAK), axis=2).sum(axis=2)


class RequestIndex:
    """The tokens of live requests and their n-grams; one row of the store each, kept across steps by request id.

    A row costs what the request has used of it: the operating system hands out the pages on first use.

    Attributes:
        tokens: int32; the store.  The tokens of row ``r`` are at ``start(r)`` and behind; ``BREAK`` is before them.
        lens: int64 ``[num_rows]``; stored tokens of each row.
    """

    #: Requests kept at the most; beyond them the one not seen for the longest makes room.
    MAX_ROWS = 1024

    def __init__(self, max_len: int, anchors: tuple[int, ...]):
        self.max_len = max_len
        num_rows = 8
        self.tokens = np.full(1, BREAK, dtype=np.int32)
        num_heads = min(max(max_len // 2, 256), 1 << 14)
        self.chains = [Chain(n, 0, num_heads, num_rows) for n in anchors]
        self.lens = np.zeros(0, dtype=np.int64)
        self._linked = np.zeros(0, dtype=np.int64)
        self._rows: dict[str, int] = {}  # least recently seen first
        self._free: list[int] = []
        self._grow(num_rows)

    def start(self, row: np.ndarray | int) -> np.ndarray | int:
        """Place of the first token of a row."""
        return row * (self.max_len + 1) + 2

    def rows_of(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """The rows of requests, int64 ``[num_reqs]``; new ones are given empty rows."""
        found = []
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is None:
                row = self._new_row()
            self._rows[request_id] = row
            found.append(row)
        return np.array(found, dtype=np.int64)

    def extend(self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Store what is new of each request.

        Args:
            rows: int64 ``[num_reqs]``.
            token_ids: int32 ``[num_reqs, max_len]``.
            num_tokens: int64 ``[num_reqs]``.
        """
        for request, (row, count) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
            start, stored = row * (self.max_len + 1) + 2, int(self.lens[row])
            known = self.tokens[start + max(stored - 4, 0) : start + stored]
            if count < stored or not np.array_equal(known, token_ids[request, max(stored - 4, 0) : stored]):
                self._empty(row)  # other tokens than before under this id: the client changed its request
                stored = 0
            self.tokens[start + stored : start + count] = token_ids[request, stored:count]
        self.lens[rows] = num_tokens
        # The newest token is not linked before its successor is known: it is what is looked for.
        for chain in self.chains:
            begin = np.maximum(self._linked[rows], chain.n - 1)
            counts = np.maximum(num_tokens - 1 - begin, 0)
            offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(self.start(rows) + begin, counts) + offsets
            chain.link(self.tokens, places, np.repeat(rows, counts))
        self._linked[rows] = np.maximum(num_tokens - 1, 0)

    def suffixes(self, rows: np.ndarray, length: int) -> np.ndarray:
        """The last tokens of each row, newest first: int32 ``[num_reqs, length]``, ``BREAK`` before the first."""
        back = np.arange(length)
        places = (self.start(rows) + self.lens[rows] - 1)[:, None] - back
        return np.where(back < self.lens[rows][:, None], self.tokens[np.maximum(places, 0)], BREAK)

    def stored(self, request_id: str) -> np.ndarray | None:
        """All tokens of a request, or None where there are none."""
        row = self._rows.get(request_id)
        if row is None:
            return None
        start = row * (self.max_len + 1) + 2
        return self.tokens[start : start + int(self.lens[row])]

    def drop(self, request_id: str) -> int | None:
        """Forget a request; its row, which the next new one may get."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def used_bytes(self) -> int:
        """Memory in use: 4 bytes per stored token and chain, and the chains' heads."""
        num_tokens = int(self.lens[list(self._rows.values())].sum()) if self._rows else 0
        return 4 * num_tokens * (1 + len(self.chains)) + sum(chain.heads.nbytes for chain in self.chains)

    def row_bytes(self) -> int:
        """Memory of one request that fills its row."""
        return 4 * self.max_len * (1 + len(self.chains)) + sum(4 * chain.heads_per_row for chain in self.chains)

    def _new_row(self) -> int:
        if not self._free and len(self.lens) >= self.MAX_ROWS:
            self.drop(next(iter(self._rows)))
        if not self._free:
            self._grow(2 * len(self.lens))
        row = self._free.pop()
        self._empty(row)
        return row

    def _empty(self, row: int) -> None:
        self.lens[row] = self._linked[row] = 0
        for chain in self.chains:
            chain.clear_row(row)

    def _grow(self, num_rows: int) -> None:
        num_places = num_rows * (self.max_len + 1) + 1
        starts = self.start(np.arange(len(self.lens)))
        used = [slice(start, start + count) for start, count in zip(starts.tolist(), self.lens.tolist(), strict=True)]
        self.tokens = _grown(self.tokens, num_places + 1, used)
        self.tokens[0] = BREAK
        self.tokens[np.arange(num_rows) * (self.max_len + 1) + 1] = BREAK
        for chain in self.chains:
            chain.grow(num_places, num_rows, used)
        self._free += range(num_rows - 1, len(self.lens) - 1, -1)
        everything = [slice(len(self.lens))]
        self.lens, self._linked = (_grown(old, num_rows, everything) for old in (self.lens, self._linked))


class TrafficIndex:
    """The last tokens of many requests in a ring, and their n-grams.

    Attributes:
        tokens: int32 ``[capacity + 1]``; place 0 is unused.
        cursor: place written last.
    """

    def __init__(self, capacity: int, anchor: int):
        self.capacity = capacity
        self.tokens = np.full(capacity + 1, BREAK, dtype=np.int32)
        self.chain = Chain(anchor, capacity, max(capacity // 2, 256))
        self.cursor = 0

    def add(self, token_ids: np.ndarray) -> None:
        """Store a sequence; the oldest ones make room.  Of a long one only the end is kept."""
        token_ids = token_ids[-(self.capacity // 4) :]
        if len(token_ids) <= self.chain.n:
            return
        if self.cursor + len(token_ids) + 1 > self.capacity:  # sequences do not wrap around
            self.tokens[self.cursor + 1 :] = BREAK
            self.cursor = 0
        first = self.cursor + 1
        stop = first + len(token_ids)
        self.tokens[first:stop] = token_ids
        self.tokens[stop] = BREAK
        self.cursor = stop
        self.chain.link(self.tokens, np.arange(first + self.chain.n - 1, stop - 1), 0)

    def ages(self, places: np.ndarray) -> np.ndarray:
        """Tokens stored since each place."""
        return (self.cursor - places) % self.capacity

    def used_bytes(self) -> int:
        return self.tokens.nbytes + self.chain.heads.nbytes + self.chain.previous.nbytes


def _grown(values: np.ndarray, size: int, kept: list[slice]) -> np.ndarray:
    """A larger array, zero but for the slices kept: pages that nothing is written to take no memory."""
    larger = np.zeros(size, dtype=values.dtype)
    for part in kept:
        larger[part] = values[part]
    return larger
