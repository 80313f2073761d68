"""A drafter that never helps is named once, also beside lookup; one that helps is not."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from tests.hosts.conftest import GREEDY, WHOLE, answers_of, counters, make_prompts, runner_of
from vllm_specplug.utils.metrics import Counters


def useless(checkpoints, path):
    """A head that believes in one token, whatever it reads."""
    path.mkdir()
    (path / "config.json").write_text((checkpoints["eagle"] / "config.json").read_text())
    tensors = load_file(checkpoints["eagle"] / "model.safetensors")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(tensors | {"fc.bias": torch.randn(len(tensors["fc.weight"]))}, path / "model.safetensors")
    return path


def test_a_useless_head_beside_lookup(engine, checkpoints, tmp_path, caplog):
    """Lookup helps, so that the union's own acceptance says nothing about the head."""
    prompts = make_prompts(16)
    plain = answers_of(engine(), prompts, GREEDY)
    head = {"method": "eagle2", "model": str(useless(checkpoints, tmp_path / "useless")), "draft_top_k": 1, **WHOLE}
    head = {key: value for key, value in head.items() if key != "budget"}
    union = {"method": "union", "min_node_value": 0.0, "sources": [head, {"method": "lookup", "traffic_tokens": 0}]}
    llm = engine(speculative_config=union)
    assert answers_of(llm, prompts, GREEDY) == plain
    warnings = [message for message in caplog.messages if "does not help" in message]
    assert len(warnings) == 1 and str(tmp_path / "useless") in warnings[0]
    watch = runner_of(llm).draft_watch
    assert watch.all.helpful > 0.04 * watch.all.drafts


def test_a_good_head(engine, caplog):
    llm = engine("eagle")
    before, watch = counters(llm), runner_of(llm).draft_watch
    known = watch.judged.drafts
    for seed in (0, 1):
        llm.generate(make_prompts(16, seed=seed), GREEDY, use_tqdm=False)
    drafts = counters(llm)["drafts"] - before["drafts"]
    assert drafts > 300 and (known or watch.judged.drafts) > 0
    assert not [message for message in caplog.messages if "does not help" in message]
    recent, helpful = Counters(runner_of(llm).speculative_config.metrics_file).recent()
    assert recent >= 300 and helpful / recent > 0.1
