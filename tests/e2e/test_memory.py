"""What the plugin adds to a server's memory: the drafter, its paged KV, and at most 240 MiB, uncompiled.

Of pages that the system cannot drop: those of a library's file, like LLVM's 80 MiB, can be read again.  The amount may
be negative: with AVX-512, vLLM's own linear layers leave freed memory behind (95 of 1955 MiB).
"""

from pathlib import Path

import pytest

from vllm_specplug.bench.methods import METHODS, Method
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import Worker
from vllm_specplug.config import resolve_drafter
from vllm_specplug.utils.processes import family_status

KV_GIB = 1


def memory_mib(method, smollm2, tmp_path) -> dict[str, int]:
    engine = {"model": smollm2, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}
    engine["disable_log_stats"] = False  # the worker reads the draft counters
    worker = Worker(Method(method, METHODS[method]), engine, KV_GIB, tmp_path / f"{method}.log")
    try:
        worker.receive()
        questions = [Question(str(i), "memory", f"Write a long story about {i} ships.") for i in range(8)]
        measurement = worker.generate(questions, max_tokens=32)
        assert bool(measurement.drafts) == (method != "plain")
        processes = family_status(worker.process.pid)
        # A server's processes.
        said = worker.log.read_text()
        assert "(EngineCore pid=" in said and "(Worker pid=" in said, said[-2000:]
        # Only the process that drafts loads the operators.
        maps = [Path(f"/proc/{process['Pid']}/maps").read_text() for process in processes]
        assert sum("/specplug_" in of_process for of_process in maps) == (method != "plain")
        return {
            key: sum(int(process.get(key, "0 kB").split()[0]) for process in processes) // 1024
            for key in ("RssAnon", "VmHWM")
        }
    finally:
        worker.kill()


@pytest.mark.wide
def test_memory(smollm2, tmp_path):
    checkpoint = resolve_drafter(METHODS["eagle2"]["model"]) / "model.safetensors"
    weights_mib = checkpoint.stat().st_size / 2**20
    with_trees, plain = (memory_mib(method, smollm2, tmp_path) for method in ("eagle2", "plain"))
    # The paged KV of the drafter is cut out of the same KV space.
    added = {key: with_trees[key] - plain[key] for key in plain}
    print(f"MiB added: {added}; {weights_mib:.0f} of them the drafter's weights")
    # A server holds at least its KV cache and the model's weights; with less, another process was read.
    least = KV_GIB * 1024 + (Path(smollm2) / "model.safetensors").stat().st_size / 2**20
    assert least < plain["RssAnon"] and least < with_trees["RssAnon"]
    assert added["RssAnon"] <= weights_mib + 240
