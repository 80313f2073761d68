"""SmolLM2-135M-Instruct in engine processes of their own, as users run it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PRELOADED = os.environ.get("LD_PRELOAD")  # at collection: engines in this process add libgomp to it later

TOPICS = (
    "the water cycle", "binary search", "photosynthesis", "prime numbers", "a good night's sleep", "volcanoes",
    "the stock market", "vaccines", "recursion in Python", "the French Revolution", "sourdough bread", "black holes",
)  # fmt: skip
TEMPLATES = (
    "Explain {} to a ten-year-old in a few sentences.",
    "List four facts about {}.",
    "Write a short paragraph on {} and end it with a question.",
)


@pytest.fixture(scope="package", autouse=True)
def users_environment() -> Iterator[None]:
    """Servers run as users run them: the tests of hosts, in the same process, and their engines change these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ENABLE_V1_MULTIPROCESSING", "CPU_CI_ENV", "LOGGING_LEVEL", "CONFIGURE_LOGGING"):
            patch.delenv(f"VLLM_{name}", raising=False)
        if PRELOADED is None:
            patch.delenv("LD_PRELOAD", raising=False)
        else:
            patch.setenv("LD_PRELOAD", PRELOADED)
        yield


@pytest.fixture(scope="session")
def smollm2() -> str:
    from vllm_specplug.utils.smollm2 import prepare

    return str(prepare())


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    """Thirty-six chat prompts."""
    return [[{"role": "user", "content": t.format(topic)}] for t, topic in product(TEMPLATES, TOPICS)]
