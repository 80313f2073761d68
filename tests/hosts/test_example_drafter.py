"""A sixth drafter with weights, ``tests/example_drafter``: its own folder and one entry point, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from tests.doubles import tiny
from tests.doubles.installed import install
from tests.hosts.conftest import GREEDY, acceptance_length, answers_of, make_prompts
from vllm_specplug import proposer
from vllm_specplug.config import ConfigError

EXAMPLE = Path(__file__).parents[1] / "example_drafter"


@pytest.fixture(scope="module")
def linear_heads(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        install(patch, EXAMPLE, tmp_path_factory.mktemp("site"))
        yield
    proposer._registered.cache_clear()
    proposer.find_method.cache_clear()


def test_served_like_ours(engine, checkpoints, linear_heads, tmp_path_factory):
    plain, prompts = engine(), make_prompts(16)
    answers = answers_of(plain, prompts, GREEDY)
    texts = [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in zip(prompts, answers, strict=True)]
    checkpoints["linear"] = tiny.write_linear_heads(tmp_path_factory.mktemp("linear"), checkpoints["target"], texts)
    llm = engine("linear", {"method": "linear_heads"})
    assert answers_of(llm, prompts, GREEDY) == answers
    assert acceptance_length(llm) > 1.2
    seeded = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(prompts))]
    expected = answers_of(plain, prompts, seeded)
    assert answers_of(llm, prompts, seeded) == expected


def test_weights_of_another_target_are_refused_by_name(checkpoints, linear_heads, tmp_path):
    save_file({"weight": torch.zeros(2, 5, 7)}, tmp_path / "heads.safetensors")
    from vllm import LLM

    with pytest.raises(ConfigError, match=r"weight is \(2, 5, 7\), this target needs \(2, "):
        LLM(str(checkpoints["target"]), speculative_config={"method": "linear_heads", "model": str(tmp_path)})
