"""Which small models may draft: kinds of models, and vocabularies."""

from types import SimpleNamespace

import pytest

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.vllm.drafters import draft_model
from vllm_specplug.vllm.drafters.draft_model import check_draft_model

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


def check(drafter, monkeypatch, tokens=TOKENS, own=TOKENS, **target):
    tokenizers = {"small": tokens, "org/Target": own}
    monkeypatch.setattr(draft_model, "get_tokenizer", lambda name, **_: SimpleNamespace(get_vocab=lambda: vocab(name)))

    def vocab(name):
        if tokenizers[name] is None:
            raise OSError("no files")
        return tokenizers[name]

    options = parse_options({"method": "draft_tree", "model": "small"})
    target = model("org/Target", **target)
    check_draft_model(SimpleNamespace(specplug=options, draft_model_config=drafter, target_model_config=target))


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
        (2, {"a": 0, "b": 1}, "it lacks 1 of its tokens \\('c'\\)"),
        (4, {"a": 0, "c": 1, "b": 2}, "2 token ids mean other tokens \\('b', 'c'\\)"),
        (8, None, "the sizes differ, and there are no tokenizers"),
    ],
)
def test_other_vocabularies(monkeypatch, vocab, tokens, words):
    with pytest.raises(ConfigError, match=f"of {vocab}\\) does not fit the model 'org/Target' \\(4\\): {words}"):
        check(model("small", vocab), monkeypatch, tokens)


def test_tokens_that_only_one_of_them_has(monkeypatch):
    check(model("small"), monkeypatch, {"a": 0, "b": 1, "c": 2, "more": 3})
    check(model("small"), monkeypatch, {"a": 0, "b": 1})


def test_no_tokenizers_and_fewer_positions(monkeypatch, caplog):
    caplog.set_level("WARNING", "vllm_specplug")
    check(model("small", max_model_len=32), monkeypatch, None)
    assert "reads texts of up to 32 tokens" in caplog.text and "are not compared" in caplog.text
