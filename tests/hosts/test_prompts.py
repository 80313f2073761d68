"""Attention of prompts in bfloat16, which the plugin computes on CPUs that multiply pairs of it."""

import pytest
import torch
from vllm import SamplingParams

from vllm_specplug.cpu import attention as cpu
from vllm_specplug.cpu.kernels.tree_attention import causal_attention_pays
from vllm_specplug.utils.environment import has_amx

from .conftest import make_prompts, token_ids

IS_OURS = causal_attention_pays(torch.bfloat16, "vec") and not has_amx()
pytestmark = pytest.mark.skipif(not IS_OURS, reason="vLLM's kernel computes them")
SCORED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)


def logprobs(outputs):
    """Of all prompt tokens, each behind the ones before."""
    found = [one for output in outputs for one in output.prompt_logprobs if one is not None]
    return torch.tensor([next(iter(one.values())).logprob for one in found])


@pytest.fixture
def called(monkeypatch):
    """For each call of the kernel, whether the forward had trees too."""
    calls, honest = [], cpu.causal_attention

    def counted(query, output, kv_cache, layout, table, seq_lens, start, lens, *rest):
        calls.append(bool((lens == 0).any()))
        honest(query, output, kv_cache, layout, table, seq_lens, start, lens, *rest)

    monkeypatch.setattr(cpu, "causal_attention", counted)
    return calls


def test_as_vllms_kernel_also_in_parts_and_beside_trees(engine, monkeypatch, called):
    """Prompts of up to 200 tokens, of which a step takes at most 64, while others draft."""
    monkeypatch.setattr(cpu, "PROMPT_ROWS", 32)
    prompts = make_prompts(8, seed=3, longest=200)
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    llm = engine("eagle", **options)
    outputs = llm.generate(prompts, SCORED, use_tqdm=False)
    assert {True, False} == set(called)
    number = len(called)
    monkeypatch.setattr(cpu, "causal_attention_pays", lambda *_: False)
    expected = llm.generate(prompts, SCORED, use_tqdm=False)
    assert len(called) == number
    errors = (logprobs(outputs) - logprobs(expected)).abs()
    assert errors.mean() < 0.01 and errors.max() < 0.1
    same = sum(ours == theirs for ours, theirs in zip(token_ids(outputs), token_ids(expected), strict=True))
    assert same >= len(prompts) // 2  # rounding decides near ties
