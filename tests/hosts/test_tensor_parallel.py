"""Two tensor-parallel ranks on the CPU engine, in processes of their own: plain decoding's tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.doubles import tiny
from tests.hosts.conftest import ENGINE, TREE
from vllm_specplug.proposers.eagle2.checkpoint import save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads

PROGRAM = """
import json, sys
from tests.hosts.conftest import ENGINE, acceptance_length, make_prompts, token_ids
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, speculative, out = sys.argv[1:]
    llm = LLM(model, **ENGINE, tensor_parallel_size=2, speculative_config=json.loads(speculative))
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30, ignore_eos=True) for i in range(8)]
    tokens = token_ids(llm.generate(make_prompts(8, seed=7), params, use_tqdm=False))
    tau = acceptance_length(llm) if speculative != "null" else 1
    with open(out, "w") as file:
        json.dump({"tokens": tokens, "tau": tau}, file)
"""


def run(model: Path, speculative: dict | None, folder: Path) -> dict:
    program, out = folder / "program.py", folder / "out.json"
    program.write_text(PROGRAM)
    # One core each: the ranks spin while they wait for each other.
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, str(program), str(model), json.dumps(speculative), str(out)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(out.read_text())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_same_as_plain(engine, checkpoints, tmp_path):
    """A union of a drafter with a reduced vocabulary (its rows of the LM head lie on both ranks) and lookup."""
    from vllm import SamplingParams

    from tests.hosts.conftest import make_prompts, token_ids

    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30, ignore_eos=True) for i in range(8)]
    expected = token_ids(engine().generate(make_prompts(8, seed=7), params, use_tqdm=False))
    source = {key: value for key, value in TREE.items() if key != "budget"} | {"model": str(checkpoints["reduced"])}
    union = {"method": "union", "sources": [source, {"method": "lookup"}], "num_speculative_tokens": 16}
    found = run(checkpoints["target"], union, tmp_path)
    assert found["tokens"] == expected
    assert found["tau"] > 1.1
    save_head(tmp_path / "medusa", {}, MedusaHeads(3, 1, tiny.HIDDEN).checkpoint_state())
    medusa = {"method": "medusa", "model": str(tmp_path / "medusa"), "num_speculative_tokens": 8}
    assert run(checkpoints["target"], medusa, tmp_path)["tokens"] == expected


def test_measured_budget_is_refused(checkpoints):
    """Ranks that decide by their own clocks would draft different trees."""
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "budget": "measured"}
    arguments = EngineArgs(str(checkpoints["target"]), **ENGINE, tensor_parallel_size=2, speculative_config=speculative)
    with pytest.raises(ValueError, match="budget='measured' does not support tensor parallelism: use budget='fixed'"):
        arguments.create_engine_config()
