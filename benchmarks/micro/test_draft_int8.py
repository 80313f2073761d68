"""Times a draft level, forward and LM head, in 8 bits and in bfloat16.

    python -m pytest benchmarks/micro/test_draft_int8.py --benchmark-json=out.json

The shipped drafter in the real engine, with as many threads as a served worker has; attention is excluded from both.
Before each call the CPU caches are filled with other data, as the target's weights do between two draft phases.
"""

import os

import pytest
import torch

from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare

DRAFTER = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def drafters():
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM

    from vllm_specplug.hosts.probes.in_process import use_served_threads
    from vllm_specplug.utils.environment import multiplies_bytes

    if not multiplies_bytes():
        pytest.skip("this CPU does not multiply 8-bit numbers (VNNI)")
    found, kept = {}, []
    for way in ("bfloat16", "int8"):
        speculative = {"method": "eagle2", "model": DRAFTER, "draft_int8": way == "int8"}
        llm = LLM(str(prepare()), dtype="bfloat16", max_model_len=2048, speculative_config=speculative)
        use_served_threads(llm.llm_engine.vllm_config)
        kept.append(llm)
        core = llm.llm_engine.engine_core.engine_core
        found[way] = core.model_executor.driver_worker.worker.model_runner.drafter
    yield found


def fill(memory: torch.Tensor) -> None:
    memory.add_(1)


@pytest.mark.parametrize("way", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 12, 24, 96])
def test_level(benchmark, drafters, rows, way):
    from vllm.forward_context import set_forward_context

    drafter, other = drafters[way], torch.ones(64 << 20, dtype=torch.int8)
    token_ids, positions, hidden = (x[:rows] for x in (drafter.input_ids, drafter.positions, drafter.hidden_states))

    @torch.inference_mode()
    def level():
        with set_forward_context(None, drafter.vllm_config, num_tokens=rows):
            score, _ = drafter.model(input_ids=token_ids, positions=positions, hidden_states=hidden, inputs_embeds=None)
        drafter._scorer.head(score)

    benchmark.group = f"{rows} rows"
    benchmark.extra_info.update(provenance(baseline="the same drafter in bfloat16, same run"))
    benchmark.pedantic(level, setup=lambda: fill(other), rounds=60, warmup_rounds=3)
