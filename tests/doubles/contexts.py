"""Inputs of model-free proposers for tests."""

from collections.abc import Sequence

import torch

from vllm_specplug.proposer import DraftContext


def context(
    sequences,
    ids=None,
    wanted=None,
    max_len=64,
    vocab_size=100,
    draft_by_model=None,
    prompt_lens=None,
    namespaces=None,
):
    """A context of token lists (prompt and output of each request); what stands behind them is garbage.

    By default all tokens are answers, and all requests share theirs.
    """
    nothing = [0] * len(sequences)
    token_ids = torch.full((len(sequences), max_len), 7, dtype=torch.int32)
    for row, tokens in zip(token_ids, sequences, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return DraftContext(
        root_token_ids=torch.tensor([tokens[-1] for tokens in sequences], dtype=torch.int64),
        token_ids=token_ids,
        num_tokens=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64),
        prompt_lens=torch.tensor(prompt_lens or nothing, dtype=torch.int64),
        namespaces=torch.tensor(namespaces or nothing, dtype=torch.int64),
        request_ids=tuple(ids or map(str, range(len(sequences)))),
        wanted=torch.tensor(wanted or [True] * len(sequences)),
        vocab_size=vocab_size,
        draft_by_model=draft_by_model,
    )


def make_match_inputs(lens: Sequence[int], max_len: int, vocab_size: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random ``token_ids``, ``slots`` and ``lens`` of ``match_keys``, for tests and timing.

    There are few different tokens, so that many positions match; the last of several slots has one token only.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocab_size, (len(lens), max_len), dtype=torch.int32, generator=generator)
    if len(lens) > 1:
        token_ids[-1] = 1
    slots = torch.randperm(len(lens), generator=generator)
    return {"token_ids": token_ids, "slots": slots, "lens": torch.tensor(lens, dtype=torch.int32)}
