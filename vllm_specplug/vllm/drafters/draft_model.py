"""A small model as drafter: its check against the target, and its logits over the tokens that both know."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.tokenizers.registry import get_tokenizer

from vllm_specplug.config import ConfigError, model_drafter

logger = logging.getLogger("vllm_specplug")

#: Differing tokens that a message names.
NAMED_TOKENS = 3


class DraftModelScorer:
    """Computes logits over the vocabulary that drafter and target share.

    Args:
        model: vLLM's draft model.
        vllm_config: of the engine.

    Attributes:
        max_position: the last position that the drafter knows.
        has_all: whether it has all of the target's token ids.
        draft_ids: None: a token has the same id in both.
    """

    draft_ids = None

    def __init__(self, model: torch.nn.Module, vllm_config: Any):
        target, drafter = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
        self._model, self._draft_vocab = model, drafter.get_vocab_size()
        self._size = min(self._draft_vocab, target.get_vocab_size())
        self.has_all = self._draft_vocab >= target.get_vocab_size()
        self.max_position = min(drafter.max_model_len, target.max_model_len) - 1

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, shared_vocab]``."""
        return self._model.compute_logits(hidden)[:, : self._size]

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids that the drafter's embedding has; ids of the target's padding become its last one."""
        return token_ids if self.has_all else token_ids.clamp(max=self._draft_vocab - 1)


def check_draft_model(speculative_config: Any) -> None:
    """Refuse models that do not draft trees, and vocabularies that differ.

    Raises:
        ConfigError: naming what was found and the fix.
    """
    drafter, target = speculative_config.draft_model_config, speculative_config.target_model_config
    method = model_drafter(speculative_config.specplug).method
    found = next((words for words, is_so in _UNSERVED if is_so(drafter)), None)
    if found is not None:
        raise ConfigError(
            f"method {method!r}: the drafter {drafter.model!r} is {found}; trees are drafted by decoder-only "
            "models with causal self-attention: use a smaller model of that kind, or the method eagle2 or lookup"
        )
    if drafter.max_model_len < target.max_model_len:
        logger.warning(
            "the drafter %s reads texts of up to %d tokens; longer ones (up to %d) get drafts that are rarely right",
            *(drafter.model, drafter.max_model_len, target.max_model_len),
        )
    _check_vocabulary(method, drafter, target)


_UNSERVED = (
    ("an encoder-decoder model", lambda config: config.is_encoder_decoder),
    ("a model with Mamba or linear-attention layers", lambda config: config.is_hybrid or config.is_attention_free),
    ("a model with latent attention (MLA)", lambda config: config.use_mla),
    ("a model with M-RoPE positions", lambda config: config.uses_mrope),
    ("an embedding model", lambda config: config.runner_type == "pooling"),
)


def _check_vocabulary(method: str, drafter: Any, target: Any) -> None:
    sizes = drafter.get_vocab_size(), target.get_vocab_size()
    found = f"method {method!r}: the drafter {drafter.model!r} (vocabulary of {sizes[0]}) does not fit the model "
    found += f"{target.model!r} ({sizes[1]})"
    fix = "use a model of the same family and version, or the method eagle2 or lookup"
    tokens = _tokens_of(drafter.model, drafter), _tokens_of(target.tokenizer or target.model, target)
    if None in tokens:
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{found}: the sizes differ, and there are no tokenizers to compare; {fix}")
        logger.warning("the tokenizers of %s and its drafter %s are not compared", target.model, drafter.model)
        return
    own = sorted(tokens[1].items(), key=lambda item: item[1])
    if missing := [token for token, number in own if number >= sizes[0]]:
        raise ConfigError(f"{found}: it lacks {len(missing)} of its tokens ({_some(missing)}); {fix}")
    by_id = {number: token for token, number in tokens[0].items()}
    differing = [token for token, number in own if by_id.get(number, token) != token]
    if differing:
        raise ConfigError(f"{found}: {len(differing)} token ids mean other tokens ({_some(differing)}); {fix}")


def _some(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:NAMED_TOKENS])) + (", ..." if len(tokens) > NAMED_TOKENS else "")


def _tokens_of(name: str, config: Any) -> dict[str, int] | None:
    """Return the ids of a tokenizer's tokens, by token; None: there is no tokenizer that can be read."""
    try:
        tokenizer = get_tokenizer(
            name, trust_remote_code=config.trust_remote_code, tokenizer_mode=config.tokenizer_mode
        )
        return tokenizer.get_vocab()
    except Exception as error:  # whatever the tokenizers' own code raises
        logger.info("there is no tokenizer in %s (%s)", name, error)
        return None
