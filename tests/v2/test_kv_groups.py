"""Several KV cache groups, and M-RoPE with images, on the V2 runner."""

from __future__ import annotations

import pytest

from tests.doubles import images
from tests.hosts.conftest import TREE as DYNAMIC
from tests.hosts.conftest import acceptance_length, runner_of
from tests.v2.conftest import ENGINE, PLAIN, answers, check_control, same
from vllm_specplug.gpu.trees import DeviceTrees

PROVEN = True
TREE = {**DYNAMIC, "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}


def test_groups(engine, grouped, prompts):
    expected = answers(engine(target=grouped, **PLAIN), prompts)
    llm = engine("eagle", TREE, target=grouped, **ENGINE)
    runner = runner_of(llm)
    assert len(runner.kv_cache_config.kv_cache_groups) == 3 and len({group for group, *_ in runner._committed}) == 3
    assert same(answers(llm, prompts), expected)
    assert acceptance_length(llm) > 1.2
    honest = runner._committed
    runner._committed = [((group + 1) % 3, *rest) for group, *rest in honest]
    try:
        check_control(llm, prompts, expected)
    finally:
        runner._committed = honest


@pytest.fixture(scope="module")
def pictures(checkpoints, tmp_path_factory):
    checkpoints["images"] = images.write_target(tmp_path_factory.mktemp("images") / "target")
    processor = images.make_processor(checkpoints["images"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images.vllm_module().Qwen2VLProcessingInfo, "get_hf_processor", lambda _self, **_: processor)
        yield "images"


@pytest.mark.wide
def test_images(engine, pictures, prompts, monkeypatch):
    texts = [[token % 150 for token in prompt["prompt_token_ids"]] for prompt in prompts]
    prompts = [images.prompt_with_images(text, *[images.image(i)] * (i > 0)) for i, text in enumerate(texts)]
    options = {"target": pictures, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    expected = answers(engine(**options, **PLAIN), prompts)
    llm = engine("eagle", TREE, **options, **ENGINE)
    assert same(answers(llm, prompts), expected)
    assert acceptance_length(llm) > 1.2
    monkeypatch.setattr(DeviceTrees, "move_positions", lambda *_: None)
    check_control(llm, prompts[1:], tuple(part[1:] for part in expected))  # the first has no image
