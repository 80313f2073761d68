"""The plugin is installed and none of its methods is configured: vLLM computes the same bits as without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles import tiny
from tests.host_versions import SPECULATES_ON_CPUS

needs_stock_speculation = pytest.mark.skipif(not SPECULATES_ON_CPUS, reason="this vLLM's own speculation fails on CPUs")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
#: Answers of a plain engine and of one with the host's own speculation; then where every function of the host comes
#: from, its registered models, and which of our modules were loaded.
PROGRAM = """
import inspect, json, sys
from pathlib import Path

def answers(speculative):
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True,
              kv_cache_memory_bytes=32 << 20, speculative_config=speculative)
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
    KEPT.append(llm)
    return {"answers": found, "classes": classes}

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
    Path(sys.argv[3]).write_text(json.dumps(found))
"""


def start(folder: Path, plugins: bool) -> subprocess.Popen:
    (folder / "program.py").write_text(PROGRAM)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not plugins:
        settings["VLLM_PLUGINS"] = ""  # an empty allow-list
    speculative = json.dumps({"plain": None, **({"stock speculation": NGRAM} if SPECULATES_ON_CPUS else {})})
    command = [sys.executable, str(folder / "program.py"), str(folder / "target"), speculative]
    with (folder / f"{plugins}.log").open("w") as log:
        return subprocess.Popen(
            [*command, str(folder / f"{plugins}.json")], env={**os.environ, **settings}, stdout=log, stderr=log
        )


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[bool, dict]:
    """What the program says with the plugin (True) and without any (False)."""
    folder = tmp_path_factory.mktemp("installed")
    tiny.write_target(folder / "target")
    processes = {plugins: start(folder, plugins) for plugins in (True, False)}
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
