"""Building the C++ operators: once, completely, and with all cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from vllm_specplug.cpu.kernels import cpu_ops


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Folders in which a library was built; nothing is compiled or loaded."""
    found = []

    def build(name, *args, build_directory, **kwargs):
        found.append(Path(build_directory))
        (found[-1] / f"{name}.so").write_bytes(b"all of it")

    monkeypatch.setattr(cpu_ops.torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return found


def test_they_are_built_once(builds, monkeypatch):
    """Also for another checkout of the same sources: two environments may share a home folder."""
    loaded = []
    monkeypatch.setattr(cpu_ops.torch.ops, "load_library", loaded.append)
    for _ in range(3):
        assert cpu_ops._load().__name__.endswith(cpu_ops.library_file().stem)
    assert len(builds) == 1 and not builds[0].exists()
    assert loaded == [str(cpu_ops.library_file())] * 3


def test_a_build_that_ends_early_leaves_no_library(builds, monkeypatch):
    def killed(name, *args, build_directory, **kwargs):
        (Path(build_directory) / f"{name}.so").write_bytes(b"half of it")
        raise KeyboardInterrupt

    honest = cpp_extension.load
    monkeypatch.setattr(cpp_extension, "load", killed)
    with pytest.raises(KeyboardInterrupt):
        cpu_ops._load()
    assert not cpu_ops.library_file().exists()
    monkeypatch.setattr(cpp_extension, "load", honest)
    cpu_ops._load()
    assert cpu_ops.library_file().read_bytes() == b"all of it"


@pytest.mark.slow
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="one core")
def test_the_compiler_gets_the_cores_of_the_parent():
    """A worker is bound to one core on a machine of two."""
    program = """
import os
from vllm_specplug.cpu.kernels.cpu_ops import _cores_of_parent
own = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, own)
with _cores_of_parent():
    print(len(os.sched_getaffinity(0)))
assert os.sched_getaffinity(0) == own
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == str(len(os.sched_getaffinity(0))), found


def test_a_server_starts_one_build_beside_its_imports(builds, monkeypatch):
    started = []
    monkeypatch.setattr(cpu_ops.subprocess, "Popen", lambda command, **kwargs: started.append(command))
    cpu_ops.build_beside()
    assert [command[0] for command in started] == [sys.executable] and cpu_ops.__name__ in started[0][-1]
    cpu_ops._load()
    cpu_ops.build_beside()
    assert len(started) == 1
