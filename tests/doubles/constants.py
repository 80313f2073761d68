"""Options with other constants than the product's: tests need small windows, few matches, drafts without noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_specplug.config import TreeOptions


def with_constants(options: TreeOptions, **constants: Any) -> TreeOptions:
    """Return the options, with constants of their class replaced in this object."""
    for name, value in constants.items():
        assert hasattr(type(options), name), name
        object.__setattr__(options, name, value)
    return options


@contextmanager
def constants_of(options: type[TreeOptions], **constants: Any) -> Iterator[None]:
    """Replace constants of a class of options: for engines, which make their own options."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(options, name, value)
        yield
