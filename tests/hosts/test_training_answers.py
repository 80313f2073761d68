"""The target's answers that training data is made of."""

import shutil

from tests.doubles import tiny
from vllm_specplug.vllm.probes.offline import start_engine

from .conftest import make_prompts


def test_sampled_answers_of_more_prompts_than_fit_in_a_step(engine, checkpoints, monkeypatch, tmp_path):
    """Each prompt has its own seed; vLLM cannot read such prompts in parts on a CPU."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    target = shutil.copytree(checkpoints["target"], tmp_path / "target")
    tiny.write_tokenizer(target)
    prompts = [prompt["prompt_token_ids"] for prompt in make_prompts(60, longest=200)]
    generate = start_engine(target, 6, 250, temperature=0.8)
    engine.kept.append(generate)  # the end of its engine would take the process's parallel state
    first, again, other = (dict(generate(prompts, seeds)) for seeds in (range(60), range(60), range(1, 61)))
    assert set(first) == set(range(60)) and all(first.values())
    assert first == again != other
