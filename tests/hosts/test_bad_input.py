"""Every wrong command and configuration of the table is answered as it says."""

from __future__ import annotations

import psutil
import pytest

from tests import bad_input


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    bad_input.write_files(folder)
    return folder


@pytest.mark.parametrize("case", bad_input.COMMANDS, ids=lambda case: case.given)
def test_commands(folder, case):
    children = psutil.Process().children()
    message, code = bad_input.run_command(case.given, folder)
    assert case.says in message and code == 2
    assert psutil.Process().children() == children


@pytest.mark.parametrize("case", bad_input.CONFIGS, ids=lambda case: case.says)
def test_configurations(folder, case):
    assert case.says in bad_input.configure(case.given, folder)
