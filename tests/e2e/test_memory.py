"""What the plugin adds to a server's memory: the drafter, its paged KV, and at most 200 MB."""

from vllm_specplug.bench import METHODS, Method, Question, Worker
from vllm_specplug.config import resolve_drafter

KV_GIB = 1


def peak_mib(method, smollm2, tmp_path) -> int:
    engine = {"model": smollm2, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8}
    engine["disable_log_stats"] = False  # the worker reads the draft counters
    worker = Worker(Method(method, METHODS[method]), engine, KV_GIB, tmp_path / f"{method}.log")
    try:
        worker.receive()
        questions = [Question(str(i), "memory", f"Write a long story about {i} ships.") for i in range(8)]
        worker.generate(questions, max_tokens=96)
        return worker.close()
    finally:
        worker.kill()


def test_peak_memory(smollm2, tmp_path):
    checkpoint = resolve_drafter(METHODS["eagle2"]["model"]) / "model.safetensors"
    weights_mib = checkpoint.stat().st_size / 2**20
    added = peak_mib("eagle2", smollm2, tmp_path) - peak_mib("plain", smollm2, tmp_path)
    # The paged KV of the drafter is cut out of the same KV space.
    print(f"peak memory added: {added} MiB, {weights_mib:.0f} of them the drafter's weights")
    assert added <= weights_mib + 200
