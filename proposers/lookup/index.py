"""Index of earlier n-gram occurrences: hash chains over stored tokens, as in LZ77 compressors.

A position is an index into the token store, from 1; 0 means none.  A slot is the segment of the store that holds one
request.  A chain links the positions whose last ``n`` tokens fall into the same bucket, newest first.  An entry is only
a hint: ``Chain.follow`` compares the tokens, so a hash collision, an overwritten position or a reused slot costs one
candidate and nothing else.  Each stored token takes 4 bytes, plus 4 bytes in each chain.
"""

from __future__ import annotations

import numpy as np

from vllm_specplug.cpu.kernels.cpu_ops import call

#: Separates token sequences in a store; no token has this id.
BREAK = -1


class Chain:
    """Links the positions whose last ``n`` tokens have the same hash."""

    def __init__(self, n: int, num_positions: int, num_heads: int, num_slots: int = 1):
        self.n = n
        self._shift = 32 - (num_heads - 1).bit_length()
        self.heads_per_slot = 1 << (num_heads - 1).bit_length()
        self.heads = np.zeros(num_slots * self.heads_per_slot, dtype=np.int32)
        self.previous = np.zeros(num_positions + 1, dtype=np.int32)

    def link(self, tokens: np.ndarray, spans: np.ndarray) -> None:
        """Link the new tokens of sequences.

        Args:
            tokens: int32; the store.
            spans: int64 ``[num_sequences, 4]``; slot, position of the first token, number of tokens already linked,
                number of tokens to be linked after this call.
        """
        call("lookup_link", self.heads, self.previous, self._shift, self.heads_per_slot, self.n, tokens, spans)

    def follow(
        self, tokens: np.ndarray, suffixes: np.ndarray, slots: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest positions in the bucket of each suffix.

        Args:
            tokens: int32; the store.
            suffixes: int32 ``[num_reqs, max_match]``, ``max_match >= n``; newest token first; ``BREAK`` where the
                request has no more tokens.
            slots: int64 ``[num_reqs]``.
            count: most positions to return for each suffix.

        Returns:
            int64 ``[num_reqs, count]``: positions, newest first, 0 where there are no more; and how many tokens up to
            and including each position equal the suffix, 0 to ``max_match``.
        """
        chain = (self.heads, self.previous, self._shift, self.heads_per_slot, self.n)
        positions, lengths = call("lookup_follow", *chain, tokens, suffixes, slots, count)
        return positions, lengths

    def clear_slot(self, slot: int) -> None:
        """Remove all positions of a slot."""
        self.heads[slot * self.heads_per_slot : (slot + 1) * self.heads_per_slot] = 0

    def grow(self, num_positions: int, num_slots: int, used: list[slice]) -> None:
        """Enlarge the chain to ``num_slots``; keep the links of the positions in ``used``."""
        self.previous = _enlarged(self.previous, num_positions + 1, used)
        self.heads = _enlarged(self.heads, num_slots * self.heads_per_slot, [slice(len(self.heads))])


class RequestIndex:
    """Stores the tokens of live requests and indexes their n-grams; each request keeps one slot, by request id.

    A slot uses memory only for the tokens stored in it: the operating system allocates pages at their first use.

    Attributes:
        tokens: int32; the store.  The tokens of slot ``r`` begin at position ``start(r)``; ``BREAK`` is before them.
        lens: int64 ``[num_slots]``; number of tokens stored in each slot.
    """

    #: Most requests kept; when all slots are in use, a new request replaces the least recently seen one.
    MAX_SLOTS = 1024

    def __init__(self, max_len: int, anchors: tuple[int, ...]):
        self.max_len = max_len
        num_slots = 8
        self.tokens = np.full(1, BREAK, dtype=np.int32)
        num_heads = min(max(max_len // 2, 256), 1 << 14)
        self.chains = [Chain(n, 0, num_heads, num_slots) for n in anchors]
        self.lens = np.zeros(0, dtype=np.int64)
        self._linked = np.zeros(0, dtype=np.int64)
        self._slots: dict[str, int] = {}  # least recently seen first
        self._free: list[int] = []
        self._grow(num_slots)

    def start(self, slot: np.ndarray | int) -> np.ndarray | int:
        """Return the position of a slot's first token."""
        return slot * (self.max_len + 1) + 2

    def slots_of(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """Return the slots of requests, int64 ``[num_reqs]``; a new request gets an empty slot."""
        found = []
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is None:
                slot = self._new_slot()
            self._slots[request_id] = slot
            found.append(slot)
        return np.array(found, dtype=np.int64)

    def extend(
        self, slots: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray, requests: np.ndarray | None = None
    ) -> None:
        """Store and link the new tokens of each request.

        Args:
            slots: int64 ``[num_reqs]``.
            token_ids: int32 ``[batch_size, max_len]``.
            num_tokens: int64 ``[num_reqs]``.
            requests: int64 ``[num_reqs]``; each request's index in ``token_ids``; by default 0, 1, 2 and so on.
        """
        if requests is None:
            requests = np.arange(len(slots))
        segments = (self.tokens, self.lens, self._linked, slots, self.max_len + 1)
        # The spans to link, and where the request's earlier tokens have changed.
        spans, changed = call("lookup_store", *segments, token_ids, requests, num_tokens)
        for slot in slots[changed].tolist():  # the client changed the request's tokens
            self._clear(slot)
        for chain in self.chains:
            chain.link(self.tokens, spans)

    def suffixes(self, slots: np.ndarray, length: int) -> np.ndarray:
        """Return the last tokens of each slot, newest first: int32 ``[num_reqs, length]``, padded with ``BREAK``."""
        back, lens = np.arange(length), self.lens[slots, None]
        positions = np.maximum(self.start(slots)[:, None] + lens - 1 - back, 0)
        return np.where(back < lens, self.tokens[positions], np.int32(BREAK))

    def stored(self, request_id: str) -> np.ndarray | None:
        """Return all stored tokens of a request, or None if it has no slot."""
        slot = self._slots.get(request_id)
        if slot is None:
            return None
        start = slot * (self.max_len + 1) + 2
        return self.tokens[start : start + int(self.lens[slot])]

    def drop(self, request_id: str) -> int | None:
        """Remove a request and return its slot, which a new request may reuse; None if it has no slot."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def used_bytes(self) -> int:
        """Return the memory in use, in bytes: 4 per stored token and per link, and the heads of the chains."""
        num_tokens = int(self.lens[list(self._slots.values())].sum()) if self._slots else 0
        return 4 * num_tokens * (1 + len(self.chains)) + sum(chain.heads.nbytes for chain in self.chains)

    def slot_bytes(self) -> int:
        """Return the memory of one full slot, in bytes."""
        return 4 * self.max_len * (1 + len(self.chains)) + sum(4 * chain.heads_per_slot for chain in self.chains)

    def _new_slot(self) -> int:
        if not self._free and len(self.lens) >= self.MAX_SLOTS:
            self.drop(next(iter(self._slots)))
        if not self._free:
            self._grow(2 * len(self.lens))
        slot = self._free.pop()
        self.lens[slot] = self._linked[slot] = 0
        self._clear(slot)
        return slot

    def _clear(self, slot: int) -> None:
        for chain in self.chains:
            chain.clear_slot(slot)

    def _grow(self, num_slots: int) -> None:
        num_positions = num_slots * (self.max_len + 1) + 1
        starts = self.start(np.arange(len(self.lens)))
        used = [slice(start, start + count) for start, count in zip(starts.tolist(), self.lens.tolist(), strict=True)]
        self.tokens = _enlarged(self.tokens, num_positions + 1, used)
        self.tokens[0] = BREAK
        self.tokens[np.arange(num_slots) * (self.max_len + 1) + 1] = BREAK
        for chain in self.chains:
            chain.grow(num_positions, num_slots, used)
        self._free += range(num_slots - 1, len(self.lens) - 1, -1)
        all_slots = [slice(len(self.lens))]
        self.lens, self._linked = (_enlarged(old, num_slots, all_slots) for old in (self.lens, self._linked))


class TrafficIndex:
    """Stores the newest tokens of ended requests in a ring buffer and indexes their n-grams.

    Attributes:
        tokens: int32 ``[capacity + 1]``; position 0 is unused.
        namespaces: int64 ``[capacity + 1]``; of the request that each token is from.
        cursor: last written position.
    """

    def __init__(self, capacity: int, anchor: int):
        self.capacity = capacity
        self.tokens = np.full(capacity + 1, BREAK, dtype=np.int32)
        self.namespaces = np.zeros(capacity + 1, dtype=np.int64)
        self.chain = Chain(anchor, capacity, max(capacity // 2, 256))
        self.cursor = 0

    def add(self, token_ids: np.ndarray, namespace: int = 0) -> None:
        """Store a sequence (at most its last ``capacity // 4`` tokens) in place of the oldest ones."""
        token_ids = token_ids[-(self.capacity // 4) :]
        if len(token_ids) <= self.chain.n:
            return
        if self.cursor + len(token_ids) + 1 > self.capacity:  # sequences do not wrap around
            self.tokens[self.cursor + 1 :] = BREAK
            self.cursor = 0
        first = self.cursor + 1
        stop = first + len(token_ids)
        self.tokens[first:stop] = token_ids
        self.namespaces[first:stop] = namespace
        self.tokens[stop] = BREAK
        self.cursor = stop
        self.chain.link(self.tokens, np.array([[0, first, 0, len(token_ids) - 1]]))

    def used_bytes(self) -> int:
        """Return the memory in use, in bytes."""
        return self.tokens.nbytes + self.namespaces.nbytes + self.chain.heads.nbytes + self.chain.previous.nbytes


def _enlarged(values: np.ndarray, size: int, kept: list[slice]) -> np.ndarray:
    """Copy the kept slices into a larger zero array; pages that are never written take no memory."""
    larger = np.zeros(size, dtype=values.dtype)
    for part in kept:
        larger[part] = values[part]
    return larger
