"""Draft contexts for unit tests."""

import torch

from vllm_specplug.proposer import DraftContext


def context(sequences, ids=None, wanted=None, max_len=64, vocab_size=100, draft_by_model=None):
    """A context of token lists (prompt and output of each request); what stands behind them is garbage."""
    token_ids = torch.full((len(sequences), max_len), 7, dtype=torch.int32)
    for row, tokens in zip(token_ids, sequences, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return DraftContext(
        root_token_ids=torch.tensor([tokens[-1] for tokens in sequences], dtype=torch.int64),
        token_ids=token_ids,
        num_tokens=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64),
        request_ids=tuple(ids or map(str, range(len(sequences)))),
        wanted=torch.tensor(wanted or [True] * len(sequences)),
        vocab_size=vocab_size,
        draft_by_model=draft_by_model,
    )
