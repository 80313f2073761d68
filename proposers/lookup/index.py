"""Where n-grams occurred before: hash chains over stored tokens, as LZ77 compressors keep them.

A chain links the places whose last ``n`` tokens fall into the same bucket, newest first.  An entry is a hint: what it
points to is compared with the tokens themselves, so collisions, overwritten places and reused rows cost a candidate and
nothing else.  Each stored token takes 4 bytes, and 4 in each chain.
"""

from __future__ import annotations

import numpy as np

from vllm_specplug.utils.compiled import compiled

#: Stands between token sequences; equal to no token.
BREAK = -1

_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_WORD = 0xFFFFFFFF


class Chain:
    """Places by the hash of their last ``n`` tokens.

    Places are positions in the token store, from 1; 0 is no place.
    """

    def __init__(self, n: int, num_places: int, num_heads: int, num_rows: int = 1):
        self.n = n
        self._shift = 32 - (num_heads - 1).bit_length()
        self.heads_per_row = 1 << (num_heads - 1).bit_length()
        self.heads = np.zeros(num_rows * self.heads_per_row, dtype=np.int32)
        self.previous = np.zeros(num_places + 1, dtype=np.int32)

    def link(self, tokens: np.ndarray, spans: np.ndarray) -> None:
        """Add what is new of token sequences.

        Args:
            tokens: int32; the store.
            spans: int64 ``[num_sequences, 4]``; row, place of the first token, how many of its tokens are linked, and
                how many shall be.
        """
        _link(self.heads, self.previous, self._shift, self.heads_per_row, self.n, tokens, spans)

    def follow(self, grams: np.ndarray, rows: np.ndarray | int, count: int) -> np.ndarray:
        """The newest places of each gram.

        Args:
            grams: int32 ``[num_reqs, n or more]``; newest token first, those behind ``n`` do not count.
            rows: int64 ``[num_reqs]``; of the store, or one for all.
            count: places wanted.

        Returns:
            int64 ``[num_reqs, count]``, newest first; 0: none.
        """
        if isinstance(rows, int):
            rows = np.full(len(grams), rows, dtype=np.int64)
        return _follow(self.heads, self.previous, self._shift, self.heads_per_row, self.n, grams, rows, count)

    def clear_row(self, row: int) -> None:
        """Forget a row's places."""
        self.heads[row * self.heads_per_row : (row + 1) * self.heads_per_row] = 0

    def grow(self, num_places: int, num_rows: int, used: list[slice]) -> None:
        """Room for more rows of places; of the old places, those ``used`` are kept."""
        self.previous = _grown(self.previous, num_places + 1, used)
        self.heads = _grown(self.heads, num_rows * self.heads_per_row, [slice(len(self.heads))])


@compiled
def match_lengths(tokens: np.ndarray, places: np.ndarray, suffixes: np.ndarray) -> np.ndarray:
    """How many tokens before and at each place equal the end of a suffix.

    Args:
        tokens: int32; the store.
        places: int64 ``[num_reqs, count]``.
        suffixes: int32 ``[num_reqs, max_match]``, newest token first; ``BREAK`` where there is none.

    Returns:
        int64 ``[num_reqs, count]``; 0 to ``max_match``.
    """
    lengths = np.zeros(places.shape, dtype=np.int64)
    for request in range(places.shape[0]):
        for k in range(places.shape[1]):
            place, length = places[request, k], 0
            while length < min(place, suffixes.shape[1]):  # the first token of a store is a BREAK
                wanted = suffixes[request, length]
                if wanted == BREAK or tokens[place - length] != wanted:
                    break
                length += 1
            lengths[request, k] = length
    return lengths


@compiled
def _head(total: int, shift: int) -> int:
    """Mix the bits of a sum; computed as 32-bit words."""
    mixed = total & _WORD
    mixed ^= mixed >> 15
    return ((mixed * _MULTIPLIERS[3]) & _WORD) >> shift


@compiled
def _link(
    heads: np.ndarray,
    previous: np.ndarray,
    shift: int,
    heads_per_row: int,
    n: int,
    tokens: np.ndarray,
    spans: np.ndarray,
) -> None:
    for row, start, linked, stop in spans:
        for place in range(start + max(linked, n - 1), start + stop):
            total = 0
            for back in range(n):
                total += np.int64(tokens[place - back]) * _MULTIPLIERS[back]
            head = row * heads_per_row + _head(total, shift)
            previous[place] = heads[head]
            heads[head] = place


@compiled
def _follow(
    heads: np.ndarray,
    previous: np.ndarray,
    shift: int,
    heads_per_row: int,
    n: int,
    grams: np.ndarray,
    rows: np.ndarray,
    count: int,
) -> np.ndarray:
    places = np.zeros((len(grams), count), dtype=np.int64)
    for request, row in enumerate(rows):
        total = 0
        for back in range(n):
            total += np.int64(grams[request, back]) * _MULTIPLIERS[back]
        place = np.int64(heads[row * heads_per_row + _head(total, shift)])
        for k in range(count):
            if place == 0:
                break
            places[request, k] = place
            place = np.int64(previous[place])
    return places


@compiled
def _store(
    store: np.ndarray,
    lens: np.ndarray,
    linked: np.ndarray,
    rows: np.ndarray,
    row_len: int,
    token_ids: np.ndarray,
    requests: np.ndarray,
    num_tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Store what is new, and count it as linked.

    Returns:
        The spans to link, see ``Chain.link``, and bool ``[num_rows]``: has other tokens than before under its id, so
        that nothing of the row is linked any more.
    """
    for count in num_tokens:
        if not 0 <= count <= min(row_len - 1, token_ids.shape[1]):
            raise ValueError("a request has more tokens than a row holds")
    changed = np.zeros(len(rows), dtype=np.bool_)
    spans = np.empty((len(rows), 4), dtype=np.int64)
    for k, row in enumerate(rows):
        request, count, stored, start = requests[k], num_tokens[k], lens[row], row * row_len + 2
        changed[k] = count < stored
        for place in range(max(stored - 4, 0), min(stored, count)):
            changed[k] |= store[start + place] != token_ids[request, place]
        if changed[k]:
            stored = linked[row] = 0
        for place in range(stored, count):
            store[start + place] = token_ids[request, place]
        lens[row] = count
        # The newest token is not linked before its successor is known: it is what is looked for.
        spans[k] = (row, start, linked[row], max(count - 1, 0))
        linked[row] = spans[k, 3]
    return spans, changed


@compiled
def _suffixes(store: np.ndarray, lens: np.ndarray, rows: np.ndarray, row_len: int, length: int) -> np.ndarray:
    suffixes = np.full((len(rows), length), BREAK, dtype=np.int32)
    for request, row in enumerate(rows):
        last = row * row_len + 1 + lens[row]
        for back in range(min(length, lens[row])):
            suffixes[request, back] = store[last - back]
    return suffixes


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

    def extend(
        self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray, requests: np.ndarray | None = None
    ) -> None:
        """Store what is new of each request.

        Args:
            rows: int64 ``[num_reqs]``.
            token_ids: int32 ``[batch_size, max_len]``.
            num_tokens: int64 ``[num_reqs]``.
            requests: int64 ``[num_reqs]``; the row of each in ``token_ids``; by default all of them, in order.
        """
        if requests is None:
            requests = np.arange(len(rows))
        spans, changed = _store(
            self.tokens, self.lens, self._linked, rows, self.max_len + 1, token_ids, requests, num_tokens
        )
        for row in rows[changed].tolist():  # the client changed its request
            self._clear(row)
        for chain in self.chains:
            chain.link(self.tokens, spans)

    def suffixes(self, rows: np.ndarray, length: int) -> np.ndarray:
        """The last tokens of each row, newest first: int32 ``[num_reqs, length]``, ``BREAK`` before the first."""
        return _suffixes(self.tokens, self.lens, rows, self.max_len + 1, length)

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
        self.lens[row] = self._linked[row] = 0
        self._clear(row)
        return row

    def _clear(self, row: int) -> None:
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
        self.chain.link(self.tokens, np.array([[0, first, 0, len(token_ids) - 1]]))

    def used_bytes(self) -> int:
        return self.tokens.nbytes + self.chain.heads.nbytes + self.chain.previous.nbytes


def _grown(values: np.ndarray, size: int, kept: list[slice]) -> np.ndarray:
    """A larger array, zero but for the slices kept: pages that nothing is written to take no memory."""
    larger = np.zeros(size, dtype=values.dtype)
    for part in kept:
        larger[part] = values[part]
    return larger
