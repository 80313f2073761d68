"""Times how a drafter reads its context: all rows as key/value and one through its forward, or all through its forward.

    python -m pytest benchmarks/micro/test_draft_context.py --benchmark-json=out.json

The shipped drafter in the real engine, bf16, with as many threads as a served worker has.  Attention to the context,
which the whole forward computes for every row, is excluded from both.
"""

import os

import pytest
import torch

from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare

DRAFTER = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def drafter():
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM

    from vllm_specplug.vllm.probes.in_process import use_served_threads

    speculative = {"method": "eagle2", "model": DRAFTER}
    llm = LLM(str(prepare()), dtype="bfloat16", max_model_len=2048, speculative_config=speculative)
    use_served_threads(llm.llm_engine.vllm_config)
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.drafter


@pytest.mark.parametrize("way", ["whole", "written"])
@pytest.mark.parametrize("rows", [16, 32, 64, 256, 1024])
def test_context(benchmark, drafter, rows, way):
    from vllm.forward_context import set_forward_context

    token_ids, positions, hidden = (x[:rows] for x in (drafter.input_ids, drafter.positions, drafter.hidden_states))

    @torch.inference_mode()
    def read():
        last = rows
        if way == "written":
            drafter.context.key_value(token_ids, positions, hidden)
            last = 1
        with set_forward_context(None, drafter.vllm_config, num_tokens=last):
            drafter.model(
                input_ids=token_ids[:last], positions=positions[:last], hidden_states=hidden[:last], inputs_embeds=None
            )

    benchmark.group = f"{rows} rows"
    benchmark.extra_info.update(provenance(baseline="the drafter's whole forward, same run"))
    benchmark.pedantic(read, rounds=40, warmup_rounds=3)
