"""A wheel of this checkout, in an environment of its own.

Installed and without a method of ours, vLLM computes the same bits as without the plugin; with one, it drafts trees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from benchmarks.end_to_end.stress import EAGLE2
from tests.doubles import tiny
from tests.host_versions import SPECULATES_ON_CPUS

ROOT = Path(__file__).parents[2]
needs_stock_speculation = pytest.mark.skipif(not SPECULATES_ON_CPUS, reason="this vLLM's own speculation fails on CPUs")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
#: Answers of a plain engine and of one with the host's own speculation; then where every function of the host comes
#: from, its registered models, and which of our modules were loaded.  At last the answers of an engine of ours.
PROGRAM = """
import inspect, json, sys
from pathlib import Path

def answers(speculative):
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True,
              kv_cache_memory_bytes=32 << 20, speculative_config=speculative, disable_log_stats=False)
    prompts = [{"prompt_token_ids": [(7 * i + j * j) % 150 + 3 for j in range(5 + 3 * i)]} for i in range(8)]
    # The host's own n-gram speculation does not answer a batch with sampled requests in it the same way twice.
    hot = 0.0 if speculative else 0.8
    params = [SamplingParams(temperature=hot * (i % 2), seed=i, logprobs=2, max_tokens=40) for i in range(8)]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0]
        numbers = [{t: entry.logprob.hex() for t, entry in place.items()} for place in answer.logprobs]
        found.append([list(answer.token_ids), numbers, answer.finish_reason])
    config = llm.llm_engine.vllm_config
    classes = [config.parallel_config.worker_cls, str(config.scheduler_config.scheduler_cls)]
    accepted = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    KEPT.append(llm)
    return {"answers": found, "classes": classes, "accepted": sum(accepted)}

def origins():
    found = {}
    def note(name, value):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if inspect.isfunction(value) and "__compiled_fn" not in name:  # torch.compile's own, under random names
            found[name] = f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            note(f"{name}:{attribute}", value)
            if inspect.isclass(value) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    note(f"{name}:{attribute}.{member}", inner)
    return found

if __name__ == "__main__":
    from vllm import LLM, ModelRegistry, SamplingParams

    KEPT = []
    speculative = json.loads(sys.argv[2])
    found = {name: answers(config) for name, config in speculative.items()}
    found["origins"] = origins()
    found["models"] = sorted(ModelRegistry.get_supported_archs())
    found["loaded"] = sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_specplug")
    ours = json.loads(sys.argv[4])
    if ours:
        import vllm_specplug.proposers
        from vllm.platforms import current_platform

        # The first engine has replaced vLLM's Triton kernels in all modules; a third time fails in one of Numba's.
        type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
        found["files"] = vllm_specplug.proposers.__file__
        found["trees"] = answers(ours)
    Path(sys.argv[3]).write_text(json.dumps(found))
"""


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


def start(python: Path, folder: Path, plugins: bool) -> subprocess.Popen:
    """Start the program with our plugin or without any; with it, in an engine of ours at the end."""
    (folder / "program.py").write_text(PROGRAM)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not plugins:
        settings["VLLM_PLUGINS"] = ""  # an empty allow-list
    stock = {"plain": None, **({"stock speculation": NGRAM} if SPECULATES_ON_CPUS else {})}
    ours = {**EAGLE2, "model": str(folder / "eagle")} if plugins else None
    command = [str(python), str(folder / "program.py"), str(folder / "target"), json.dumps(stock)]
    command += [str(folder / f"{plugins}.json"), json.dumps(ours)]
    with (folder / f"{plugins}.log").open("w") as log:
        # In another folder than this checkout, where Python would find it.
        return subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def found(python, tmp_path_factory) -> dict[bool, dict]:
    """What the program says with the plugin (True) and without any (False)."""
    folder = tmp_path_factory.mktemp("installed")
    tiny.write_target(folder / "target")
    tiny.write_drafter(folder / "eagle")
    processes = {plugins: start(python, folder, plugins) for plugins in (True, False)}
    try:
        for plugins, process in processes.items():
            assert process.wait(timeout=400) == 0, (folder / f"{plugins}.log").read_text()[-3000:]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {plugins: json.loads((folder / f"{plugins}.json").read_text()) for plugins in processes}


@pytest.mark.parametrize("kind", ["plain", pytest.param("stock speculation", marks=needs_stock_speculation)])
def test_byte_equal(found, kind):
    """Tokens, log probabilities to the last bit, and the same worker and scheduler."""
    assert found[True][kind] == found[False][kind]
    assert len(found[True][kind]["answers"]) == 8


def test_only_the_two_patches_touch_the_host(found):
    """Every function of the host is the host's own, except two, which pass calls for other methods on."""
    ours, clean = found[True]["origins"], found[False]["origins"]
    assert len(clean) > 5000
    changed = {name for name in clean if ours.get(name) != clean[name]}
    assert changed == {
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
    }
    assert all(ours[name].partition(":")[0].endswith("vllm/install.py") for name in changed)
    assert found[True]["models"] == found[False]["models"]


def test_nothing_that_works_in_a_step_is_loaded(found):
    assert found[False]["loaded"] == []
    loaded = found[True]["loaded"]
    assert "vllm_specplug.plugin" in loaded
    assert not [name for name in loaded if any(part in name for part in ("runner", "attention", "tree", "proposers"))]


def test_a_method_of_the_wheel_drafts_trees(python, found):
    """The greedy answers are plain decoding's."""
    assert found[True]["files"].startswith(str(python.parents[1]))
    plain, trees = (found[True][kind]["answers"][::2] for kind in ("plain", "trees"))
    assert [one[0] for one in trees] == [one[0] for one in plain]
    assert found[True]["trees"]["accepted"] > 10 > found[True]["plain"]["accepted"] == 0
