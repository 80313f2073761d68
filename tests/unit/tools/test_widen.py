"""A widened checkpoint computes what the original one computes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.end_to_end import widen
from tests.doubles import tiny


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
