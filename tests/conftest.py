"""A marker per tier, so that ``pytest -m hosts`` runs one of them (the tiers: see the Makefile)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TIERS = ("unit", "hosts", "v2", "e2e")
HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tiers that ``-m`` excludes: tests/v2 cannot be collected in one process with the others."""
    if collection_path.parent != HERE or collection_path.name not in TIERS:
        return None
    named = re.findall(rf"(not )?\b({'|'.join(TIERS)})\b", config.option.markexpr)
    wanted = {tier for without, tier in named if not without} or set(TIERS)
    wanted -= {tier for without, tier in named if without}
    return None if collection_path.name in wanted else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder of ``tests/`` that it lies in."""
    for item in items:
        for tier in TIERS:
            if item.path.is_relative_to(HERE / tier):
                item.add_marker(tier)
