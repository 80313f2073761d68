"""A small model as drafter: its check against the target, and its logits over the tokens that both know."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.tokenizers.registry import get_tokenizer

from vllm_specplug.config import ConfigError, model_drafter

logger = logging.getLogger("vllm_specplug")

#: Differing tokens that a message names.
NAMED_TOKENS = 3
#: Fewest tokens that a drafter of another vocabulary must share: vLLM warns below.
LEAST_SHARED = 100


class DraftModelScorer:
    """Computes logits over the vocabulary that drafter and target share.

    Args:
        model: vLLM's draft model.
        vllm_config: of the engine.
        mapping: vLLM's, between the ids of tokens that have the same text; None: they have the same ids.

    Attributes:
        max_position: the last position that the drafter knows.
        has_all: whether it has all of the target's token ids.
        draft_ids: int64 ``[shared_vocab]``; the target's token id of each logit; None: the same.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, mapping: Any = None):
        target, drafter = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
        self._model, self._draft_vocab = model, drafter.get_vocab_size()
        self._size = min(self._draft_vocab, target.get_vocab_size())
        self.has_all = self._draft_vocab >= target.get_vocab_size()
        self.max_position = min(drafter.max_model_len, target.max_model_len) - 1
        self._mapping, self._shared, self.draft_ids = mapping, slice(self._size), None
        if mapping is not None:
            self._shared = mapping.intersection_mask_draft.nonzero().squeeze(1)
            self.draft_ids = mapping.draft_to_target_ids[self._shared]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, shared_vocab]``."""
        return self._model.compute_logits(hidden)[:, self._shared]

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the drafter's ids of the target's tokens; those that it lacks become its last or its unknown one."""
        if self._mapping is not None:
            return self._mapping.map_target_to_draft_ids(token_ids)
        return token_ids if self.has_all else token_ids.clamp(max=self._draft_vocab - 1)


def check_draft_model(speculative_config: Any) -> None:
    """Refuse models that do not draft trees, and vocabularies that share few tokens; say if ids differ.

    Raises:
        ConfigError: naming the finding and the fix.
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
    if (problem := _difference(drafter, target)) is None:
        return
    found = f"method {method!r}: the drafter {drafter.model!r} (vocabulary of {drafter.get_vocab_size()}) does not have"
    found += f" the token ids of the model {target.model!r} ({target.get_vocab_size()}): {problem}"
    has_maps = hasattr(SpeculativeConfig, "use_heterogeneous_vocab") and not speculative_config.v2_runner
    num_shared = _num_shared(drafter, target) if has_maps else 0
    if num_shared < LEAST_SHARED:
        few = f"; only {num_shared} tokens have the same text in both" if has_maps else ""
        raise ConfigError(f"{found}{few}: use a model of the same family and version, or the method eagle2 or lookup")
    logger.warning("%s; it drafts the %d tokens that have the same text in both, and no others", found, num_shared)
    speculative_config.use_heterogeneous_vocab = True


_UNSERVED = (
    ("an encoder-decoder model", lambda config: config.is_encoder_decoder),
    ("a model with Mamba or linear-attention layers", lambda config: config.is_hybrid or config.is_attention_free),
    ("a model with latent attention (MLA)", lambda config: config.use_mla),
    ("a model with M-RoPE positions", lambda config: config.uses_mrope),
    ("an embedding model", lambda config: config.runner_type == "pooling"),
)


def _difference(drafter: Any, target: Any) -> str | None:
    """Return how the token ids of two models differ, or None.

    Raises:
        ConfigError: it cannot be known.
    """
    size = drafter.get_vocab_size()
    tokens = [None if one is None else one.get_vocab() for one in _tokenizers(drafter, target)]
    if None in tokens:
        if size != target.get_vocab_size():
            raise ConfigError(
                f"the drafter {drafter.model!r} (vocabulary of {size}) does not fit the model {target.model!r} "
                f"({target.get_vocab_size()}): the sizes differ, and there are no tokenizers to compare; add the files "
                "of the tokenizers, or use the method eagle2 or lookup"
            )
        logger.warning("the tokenizers of %s and its drafter %s are not compared", target.model, drafter.model)
        return None
    own = sorted(tokens[1].items(), key=lambda item: item[1])
    if missing := [token for token, number in own if number >= size]:
        return f"it lacks {len(missing)} of its tokens ({_some(missing)})"
    by_id = {number: token for token, number in tokens[0].items()}
    if differing := [token for token, number in own if by_id.get(number, token) != token]:
        return f"{len(differing)} token ids mean other tokens ({_some(differing)})"
    return None


def _num_shared(drafter: Any, target: Any) -> int:
    from vllm.v1.spec_decode.vocab_mapping import VocabMapping

    own, theirs = _tokenizers(drafter, target)
    return VocabMapping(theirs, own, target.get_vocab_size(), drafter.get_vocab_size(), "cpu").intersection_size


def _tokenizers(drafter: Any, target: Any) -> tuple[Any, Any]:
    """Return both tokenizers.  vLLM names the target's in the drafter's config too."""
    return _tokenizer_of(drafter.model, drafter), _tokenizer_of(target.tokenizer or target.model, target)


def _some(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:NAMED_TOKENS])) + (", ..." if len(tokens) > NAMED_TOKENS else "")


def _tokenizer_of(name: str, config: Any) -> Any:
    """Return a tokenizer; None: there is none that can be read."""
    try:
        return get_tokenizer(name, trust_remote_code=config.trust_remote_code, tokenizer_mode=config.tokenizer_mode)
    except Exception as error:  # whatever the tokenizers' own code raises
        logger.info("there is no tokenizer in %s (%s)", name, error)
        return None
