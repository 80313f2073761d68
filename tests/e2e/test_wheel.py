"""A wheel of this checkout, installed into an environment of its own, serves with a method of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from benchmarks.end_to_end.stress import write_models
from tests.e2e.test_server import free_port
from vllm_specplug.tools.server_process import read_counter

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
    kinds = (".cpp", ".json", ".safetensors")
    read = [p for root in ("vllm_specplug", "proposers") for p in (ROOT / root).rglob("*") if p.suffix in kinds]
    assert len(read) > 5
    for path in read:
        inside = path.relative_to(ROOT).as_posix().replace("proposers/", "vllm_specplug/proposers/", 1)
        assert inside in names, inside
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_it_serves(python, tmp_path):
    speculative, port = write_models(tmp_path)["eagle2"], free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "target")),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
        *("--speculative-config", json.dumps(speculative)),
    ]
    where = subprocess.run(
        [str(python), "-c", "import vllm_specplug.proposers as p; print(p.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout
    assert where.startswith(str(python.parents[1]))
    log = tmp_path / "log"
    with log.open("w") as sink:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        body = json.dumps({"model": "demo", "prompt": "count the lights", "max_tokens": 40, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        assert json.load(urllib.request.urlopen(request, timeout=120))["usage"]["completion_tokens"] > 1
        page = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
        assert read_counter(page, "vllm:spec_decode_num_accepted_tokens_total") > 0
        assert read_counter(page, "specplug:steps_total") > 0
    finally:
        process.terminate()
        process.wait(timeout=60)
