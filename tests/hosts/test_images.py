"""A target with M-RoPE positions that reads images: token identity with plain vLLM, for requests with and without."""

from __future__ import annotations

import json

import pytest
from vllm import SamplingParams
from vllm.model_executor.layers import rotary_embedding

from tests.doubles import images, tiny
from tests.hosts.conftest import acceptance_length, answers_of, drafts_after_pauses, make_prompts, runner_of

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
#: Prompts are read in parts that end within images.
OPTIONS = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def start(engine, checkpoints, tmp_path_factory):
    """``start(drafter=None, tree=None)``: an engine of the target."""
    checkpoints["images"] = images.write_target(tmp_path_factory.mktemp("images") / "target")
    drafter = tiny.write_drafter(tmp_path_factory.mktemp("drafter") / "mrope")
    config = json.loads((drafter / "config.json").read_text())
    config["rope_parameters"] = images.ROPE
    (drafter / "config.json").write_text(json.dumps(config))
    checkpoints["with M-RoPE"] = drafter
    processor = images.make_processor(checkpoints["images"])
    with pytest.MonkeyPatch.context() as patch:
        # vLLM 0.30 keeps those of an earlier engine that left its vision part out: they have no values.
        patch.setattr(rotary_embedding, "_ROPE_DICT", {})
        patch.setattr(images.vllm_module().Qwen2VLProcessingInfo, "get_hf_processor", lambda _self, **_: processor)
        yield lambda drafter=None, tree=None, **more: engine(drafter, tree, target="images", **{**OPTIONS, **more})


@pytest.fixture(scope="module")
def prompts():
    texts = [[token % 150 for token in prompt["prompt_token_ids"]] for prompt in make_prompts(8, longest=40)]
    pictures = [[], [images.image(0)], [images.image(1, 48, 40)], [images.image(2), images.image(3, 40, 56)]]
    return [images.prompt_with_images(text, *pictures[i % 4]) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def plain(start, prompts):
    return answers_of(start(), prompts, GREEDY)


@pytest.mark.parametrize("drafter", ["eagle", "with M-RoPE"])
def test_same_as_plain(start, prompts, plain, drafter):
    llm = start(drafter)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) > 1.2  # else trees would not have been exercised
    assert runner_of(llm).drafter.uses_mrope == (drafter == "with M-RoPE")


def test_a_pause_in_drafting(start, prompts, plain, monkeypatch):
    """Rows that were missed, of images too, are read at the target's positions: the drafts are the same as without."""
    llm = start("with M-RoPE", {"budget": "measured"}, enable_prefix_caching=False)
    answers, share = drafts_after_pauses(monkeypatch, llm, prompts, GREEDY)
    assert answers == plain and share > 0.98


def test_same_seed_same_tokens(start, prompts):
    # vLLM itself cannot read seeded requests in parts on a CPU.
    whole = start(max_num_batched_tokens=512)
    expected = answers_of(whole, prompts[:4], SEEDED)
    assert answers_of(start("eagle"), prompts[:4], SEEDED) == expected
