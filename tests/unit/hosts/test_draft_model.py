"""Which small models may draft: kinds of models, and vocabularies."""

from types import SimpleNamespace

import pytest
import torch

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.vllm.drafters import draft_model
from vllm_specplug.vllm.drafters.draft_model import DraftModelScorer, check_draft_model

FLAGS = ("is_encoder_decoder", "is_hybrid", "is_attention_free", "use_mla", "uses_mrope")
TOKENS = {"a": 0, "b": 1, "c": 2}


def model(name, vocab=4, max_model_len=64, **changes):
    return SimpleNamespace(
        model=name,
        tokenizer=name,
        max_model_len=max_model_len,
        get_vocab_size=lambda: vocab,
        runner_type="draft",
        trust_remote_code=False,
        tokenizer_mode="auto",
        **{**dict.fromkeys(FLAGS, False), **changes},
    )


def check(drafter, monkeypatch, tokens=TOKENS, own=TOKENS, v2=False, **target):
    tokenizers = {"small": tokens, "org/Target": own}

    def tokenizer(name, **_):
        if tokenizers[name] is None:
            raise OSError("no files")
        return SimpleNamespace(get_vocab=lambda: tokenizers[name], unk_token_id=0)

    monkeypatch.setattr(draft_model, "get_tokenizer", tokenizer)

    options = parse_options({"method": "draft_tree", "model": "small"})
    target = model("org/Target", **target)
    config = SimpleNamespace(specplug=options, draft_model_config=drafter, target_model_config=target, v2_runner=v2)
    config.use_heterogeneous_vocab = False
    check_draft_model(config)
    return config.use_heterogeneous_vocab


@pytest.mark.parametrize("vocab", [3, 4, 8])
def test_a_padded_vocabulary_fits(monkeypatch, vocab):
    check(model("small", vocab), monkeypatch)


@pytest.mark.parametrize("flag", FLAGS)
def test_other_kinds_of_models(monkeypatch, flag):
    with pytest.raises(ConfigError, match="the drafter 'small' is an? .*decoder-only models with causal"):
        check(model("small", **{flag: True}), monkeypatch)


@pytest.mark.parametrize(
    ("vocab", "tokens", "words"),
    [
        (2, {"a": 0, "b": 1}, "it lacks 1 of its tokens \\('c'\\); only 2 tokens have the same text in both: use"),
        (4, {"a": 0, "c": 1, "b": 2}, "2 token ids mean other tokens \\('b', 'c'\\); only 3 tokens have the same text"),
        (8, None, "the sizes differ, and there are no tokenizers"),
    ],
)
def test_other_vocabularies(monkeypatch, vocab, tokens, words):
    found = f"of {vocab}\\) does not (fit|have .* of) the model 'org/Target' \\(4\\): {words}"
    with pytest.raises(ConfigError, match=found):
        check(model("small", vocab), monkeypatch, tokens)


def test_tokens_that_only_one_of_them_has(monkeypatch):
    check(model("small"), monkeypatch, {"a": 0, "b": 1, "c": 2, "more": 3})
    check(model("small"), monkeypatch, {"a": 0, "b": 1})


def test_no_tokenizers_and_fewer_positions(monkeypatch, caplog):
    caplog.set_level("WARNING", "vllm_specplug")
    check(model("small", max_model_len=32), monkeypatch, None)
    assert "reads texts of up to 32 tokens" in caplog.text and "are not compared" in caplog.text


def test_tokens_of_the_same_text_with_other_ids(monkeypatch, caplog):
    """V1 maps them; one token has another text."""
    caplog.set_level("WARNING", "vllm_specplug")
    own = {f"word{i}": i for i in range(120)}
    tokens = {f"word{119 - i}": i for i in range(119)} | {"other": 119}
    assert check(model("small", 120), monkeypatch, tokens, own, vocab=120)
    assert "it drafts the 119 tokens that have the same text in both" in caplog.text
    with pytest.raises(ConfigError, match="120 token ids mean other tokens .*: use a model of the same family"):
        check(model("small", 120), monkeypatch, tokens, own, v2=True, vocab=120)
    assert not check(model("small", 120), monkeypatch, own, own, vocab=120)


def test_logits_and_ids_of_tokens_that_both_have():
    """Of four tokens the drafter has three, at other ids, and one of its own."""
    mapping = SimpleNamespace(
        intersection_mask_draft=torch.tensor([True, False, True, True]),
        draft_to_target_ids=torch.tensor([2, -1, 0, 3]),
        map_target_to_draft_ids=lambda ids: torch.tensor([2, 1, 0, 3])[ids],
    )
    config = SimpleNamespace(
        model_config=model("org/Target"), speculative_config=SimpleNamespace(draft_model_config=model("small"))
    )
    scorer = DraftModelScorer(SimpleNamespace(compute_logits=lambda hidden: hidden), config, mapping)
    hidden = torch.arange(8.0).view(2, 4)
    assert scorer.logits(hidden).tolist() == [[0, 2, 3], [4, 6, 7]] and scorer.draft_ids.tolist() == [2, 0, 3]
    assert scorer.known(torch.tensor([0, 1, 2])).tolist() == [2, 1, 0]
