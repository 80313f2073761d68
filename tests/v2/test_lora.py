"""LoRA on the V2 model runner: trees are verified with each request's adapter, of the LM head too."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.doubles.adapters import write_adapter
from tests.hosts.conftest import WHOLE, counters, token_ids
from tests.v2.conftest import ENGINE, PLAIN
from vllm_specplug.gpu.runner import TreeRunner

PROVEN = True
TREE = {"method": "eagle2", "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3, **WHOLE}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
#: One slot more than adapters, see ``tests/hosts/test_lora.py``.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root, everywhere = tmp_path_factory.mktemp("adapters"), ("q_proj", "down_proj", "embed_tokens", "lm_head")
    return [
        None,
        LoRARequest("first", 1, str(write_adapter(root / "first", seed=1))),
        LoRARequest("everywhere", 2, str(write_adapter(root / "everywhere", seed=2, modules=everywhere))),
    ]


def answers(llm, prompts, adapters):
    return token_ids(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters))


def test_mixed_batch(engine, prompts, adapters, monkeypatch):
    plain, llm = engine(**PLAIN, **LORA), engine("eagle", TREE, **ENGINE, **LORA)
    expected = answers(plain, prompts, adapters)
    base = answers(plain, prompts, None)
    assert [one == other for one, other in zip(base, expected, strict=True)] == [True, False, False]
    assert answers(llm, prompts, adapters) == expected
    assert counters(llm)["accepted_tokens"] > 0
    # vLLM's own mapping has one row of logits for each request.
    monkeypatch.delattr(TreeRunner, "_set_active_loras")
    with pytest.raises(RuntimeError, match="size"):
        answers(llm, prompts, adapters)
