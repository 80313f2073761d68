"""The type of training's products: float32 on CPUs without AVX-512, and the same training in both types."""

import pytest
import torch

from tests.doubles.trained import DRAFT, make_answers, make_features
from vllm_specplug.proposers.eagle2.checkpoint import load_head
from vllm_specplug.proposers.training import comparison, eagle, precision, trainer
from vllm_specplug.proposers.training.features import target_head


def set_cpu(monkeypatch, lacks_avx512: bool) -> None:
    monkeypatch.setattr(precision, "lacks_avx512", lambda: lacks_avx512)


@pytest.mark.parametrize(("device", "lacks"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_products_are_in_bfloat16(device, lacks, monkeypatch):
    set_cpu(monkeypatch, lacks)
    assert precision.compute_dtype(device) == torch.bfloat16


@pytest.mark.slow
def test_a_cpu_without_avx512_trains_and_measures_in_float32(target, tmp_path, monkeypatch):
    """Data of one kind of machine is taken on the other, and the heads agree up to bfloat16's rounding."""
    answers, heads, taus, written = make_answers(), {}, {}, set()
    _, embedding, lm_head = target_head(target)
    for lacks in (False, True):
        set_cpu(monkeypatch, lacks)
        dtype = torch.float32 if lacks else torch.bfloat16
        assert precision.compute_dtype("cpu") == dtype
        data = make_features(target, answers, tmp_path / "features")
        written |= {file.stat().st_mtime_ns for file in (tmp_path / "features").glob("shard-*.safetensors")}
        options = eagle.EagleOptions(epochs=1, batch_tokens=96, draft_vocab_size=DRAFT, align_steps=2)
        task = eagle.EagleTask(target, torch.arange(DRAFT), options)
        assert task.draft_head.dtype == dtype
        seen = []
        task.head.fc.register_forward_hook(lambda _module, _args, output, seen=seen: seen.append(output.dtype))
        out = tmp_path / str(lacks)
        heads[lacks] = trainer.train(task, data, str(out), trainer.RunSettings(progress=False))
        assert set(seen) == {dtype}
        assert load_head(out)[1]["fc.weight"].dtype == torch.bfloat16
        draft_head = lm_head[:DRAFT].to(dtype)
        taus[lacks] = comparison.measure(heads[lacks], data, embedding, draft_head, torch.arange(DRAFT)).chain_tau
    one, other = (head.fc.weight for head in heads.values())
    torch.testing.assert_close(one, other, atol=5e-3, rtol=5e-2)
    assert taus[True] == pytest.approx(taus[False], rel=0.1)
    assert len(written) == 1
