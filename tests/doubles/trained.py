"""A tiny random target, its answers and features, for the training tests."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm_specplug.proposers.training import features
from vllm_specplug.proposers.training.answers import Answer

HIDDEN, VOCAB, DRAFT = 16, 50, 30


def write_target(path: Path, layers: int = 2, hidden: int = HIDDEN) -> str:
    """Write a random Llama."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def make_answers(count: int = 24) -> list[Answer]:
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    return [Answer("test", ids(2, 12), ids(3, 20)) for _ in range(count)]


def make_features(target: str, answers: list[Answer], folder: Path, layers: tuple[int, ...] = ()):
    files = features.extract(target, answers, folder, progress=False, layers=layers)
    return features.load_features(files, layers=bool(layers))


@contextmanager
def full_disk(limit: int):
    """Let no file grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
