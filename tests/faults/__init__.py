"""Planted faults: small changes of the product, each with the test that must fail.  ``python -m tests.faults``."""
