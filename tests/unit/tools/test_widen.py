"""A widened checkpoint computes what the original one computes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.end_to_end import widen
from tests.doubles import tiny


def test_shares_are_powers_of_two():
    for copies in range(1, 9):
        found = widen.shares(copies)
        assert len(found) == copies and sum(found) == 1
        assert all(torch.frexp(torch.tensor(share)).mantissa == 0.5 for share in found)


@pytest.mark.parametrize(("copies", "inner"), [(3, 5), (2, 1)])
def test_the_same_logits(tmp_path, copies, inner):
    target = tiny.write_target(tmp_path / "target")
    widen.write(target, tmp_path / "wide", copies, inner, is_head=False)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["hidden_size"] == copies * tiny.HIDDEN and config["intermediate_size"] == inner * tiny.INTERMEDIATE
    token_ids = torch.arange(3, 40).unsqueeze(0)
    with torch.inference_mode():
        wide, narrow = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)(token_ids).logits
            for name in ("wide", "target")
        )
    torch.testing.assert_close(wide, narrow, rtol=0, atol=2e-5)  # norms are float32


def test_a_head_reads_and_returns_copies(tmp_path):
    head = tiny.write_drafter(tmp_path / "head", draft_vocab=40)
    widen.write(head, tmp_path / "wide", 3, 2, is_head=True)
    narrow, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "wide"))
    embedding, hidden = torch.randn(2, tiny.HIDDEN, dtype=torch.float64)
    expected = narrow["fc.weight"].double() @ torch.cat((embedding, hidden))
    found = wide["fc.weight"].double() @ torch.cat((embedding.repeat(3), hidden.repeat(3)))
    torch.testing.assert_close(found, expected.repeat(3))
    assert torch.equal(wide["d2t"], narrow["d2t"])
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["draft_vocab_size"] == 40


def test_other_tensors_are_refused():
    with pytest.raises(ValueError, match=r"model\.layers\.0\.router\.weight: no Llama layer"):
        widen.widened({"model.layers.0.router.weight": torch.zeros(2, 2)}, 2, 2)
