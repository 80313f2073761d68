"""The packages: ``proposers/`` is imported as ``vllm_specplug.proposers``; the rest is in pyproject.toml."""

from setuptools import find_packages, setup

METHODS = "vllm_specplug.proposers"

setup(
    packages=[
        *find_packages(include=["vllm_specplug*"]),
        METHODS,
        *(f"{METHODS}.{p}" for p in find_packages("proposers")),
    ]
)
