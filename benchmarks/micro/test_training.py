"""Times a training step by alignment steps: tokens per second and peak memory, against align-1 in the same run.

    python -m pytest -s benchmarks/micro/test_training.py --benchmark-json=out.json

A head of SmolLM2-135M's geometry with 8192 draft ids, random features, 4096 tokens a step, half of them answers.  Each
alignment has its own process (for memory) and takes turns with one of align-1 (for speed).  Read ``extra_info``:
``time_to_align_1`` is median over median (the HASS paper: 1.66 for align-3), ``peak_mib`` what steps add to a process.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from vllm_specplug.proposers.eagle2.checkpoint import save_head
from vllm_specplug.proposers.hass.train import HassTrainOptions
from vllm_specplug.proposers.training.eagle import EagleTask
from vllm_specplug.proposers.training.loop import Batch
from vllm_specplug.utils.environment import provenance

HIDDEN, VOCAB, DRAFT = 576, 49152, 8192
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
}
SEQUENCES, ROWS = 8, 512
TURNS = 3


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve() -> None:
    """Make one step per line of stdin; print its seconds and the memory that the steps have added."""
    align_steps = int(sys.argv[1])
    torch.manual_seed(0)
    embedding = (torch.randn(VOCAB, HIDDEN) * 0.14).bfloat16()
    options = HassTrainOptions(align_steps=align_steps, draft_vocab_size=DRAFT)
    with tempfile.TemporaryDirectory() as target:
        save_head(target, CONFIG, {"model.embed_tokens.weight": embedding})
        task = EagleTask(target, torch.arange(DRAFT), options)
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=1e-4)
    shape = (SEQUENCES, ROWS)
    features, targets = (torch.randn(*shape, HIDDEN).bfloat16() for _ in range(2))
    in_answer = (torch.arange(ROWS) >= ROWS // 2).expand(shape)
    ids = torch.randint(0, DRAFT, shape)
    batch = Batch(ids, features, targets, ids, in_answer, ids[:, 0])
    before = peak_mib()
    for line in sys.stdin:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        losses = task.losses(batch, 0, 1, torch.Generator().manual_seed(int(line)))
        sum(losses.values()).backward()
        optimizer.step()
        print(json.dumps([time.perf_counter() - started, peak_mib() - before]), flush=True)


class Worker:
    """A process that makes training steps of one alignment."""

    def __init__(self, align: int):
        command = [sys.executable, __file__, str(align)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step()  # warm-up

    def step(self) -> tuple[float, float]:
        """Return the seconds of one step, and the peak memory of all steps so far in MiB."""
        self.process.stdin.write("0\n")
        self.process.stdin.flush()
        seconds, peak = json.loads(self.process.stdout.readline())
        return seconds, peak

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


@pytest.mark.parametrize("align", [1, 2, 3, 4])
def test_training_step(benchmark, align):
    workers = {"align-1": Worker(1), "this": Worker(align)}
    seconds, peaks = {name: [] for name in workers}, {}

    def turn():
        for name, worker in workers.items():
            took, peaks[name] = worker.step()
            seconds[name].append(took)

    benchmark.pedantic(turn, rounds=TURNS, iterations=1)
    for worker in workers.values():
        worker.close()
    medians = {name: statistics.median(steps) for name, steps in seconds.items()}
    speeds = {name: round(SEQUENCES * ROWS / median) for name, median in medians.items()}
    ratio = medians["this"] / medians["align-1"]
    benchmark.extra_info.update(provenance(baseline="align-1, same run, taking turns"))
    benchmark.extra_info.update({"time_to_align_1": ratio, "tokens_per_s": speeds, "peak_mib": peaks})
    print(f"\nalign-{align}: {speeds['this']} tokens/s, {ratio:.2f}x the time of align-1, {peaks['this']:.0f} MiB")


if __name__ == "__main__":
    serve()
