"""The list of planted faults fits the sources."""

from __future__ import annotations

import ast

import pytest

from tests.faults.__main__ import ROOT, planted
from tests.faults.catalogue import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_occurs_once_and_the_test_exists(fault):
    assert planted(fault) != (ROOT / fault.path).read_text()
    path, _, name = fault.test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name.partition("[")[0] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_names_are_unique():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 40
