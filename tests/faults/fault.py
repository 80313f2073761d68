"""A planted fault."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A small change of one file, and the test that must fail because of it.

    Attributes:
        name: the wrong behaviour, in a few words.
        area: one word, by which the command chooses faults.
        path: the file, from the repository's root.
        old: text that occurs exactly once in the file.
        new: text that replaces it.
        test: pytest's node id of the fastest test that fails.
    """

    name: str
    area: str
    path: str
    old: str
    new: str
    test: str
