"""A wheel of this checkout, installed into an environment of its own, serves with a method of ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from benchmarks.end_to_end.stress import write_models
from tests.doubles.servers import metrics_page, post_json, running, tree_server
from vllm_specplug.cli.server_process import read_counter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that has the wheel, and vLLM and its dependencies from this one."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=300, cwd=folder)
    return python


def test_it_has_every_file_that_is_read_at_run_time(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".cpp", ".h", ".json", ".safetensors")
    read = [p for root in ("vllm_specplug", "proposers") for p in (ROOT / root).rglob("*") if p.suffix in kinds]
    assert len(read) > 5
    for path in read:
        inside = path.relative_to(ROOT).as_posix().replace("proposers/", "vllm_specplug/proposers/", 1)
        assert inside in names, inside
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_it_serves(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Python finds this checkout in its own folder
    where = subprocess.run(
        [str(python), "-c", "import vllm_specplug.proposers as p; print(p.__file__)"], capture_output=True, text=True
    ).stdout
    assert where.startswith(str(python.parents[1]))
    speculative = write_models(tmp_path)["eagle2"]
    options = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20))
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    with running(tree_server("target", speculative, tmp_path / "log", *options, command=command)) as (server,):
        reply = post_json(server, "/v1/completions", prompt="count the lights", max_tokens=40, temperature=0)
        assert reply["usage"]["completion_tokens"] > 1
        page = metrics_page(server)
    assert read_counter(page, "vllm:spec_decode_num_accepted_tokens_total") > 0
    assert read_counter(page, "specplug:steps_total") > 0
