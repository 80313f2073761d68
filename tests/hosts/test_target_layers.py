"""Which layers of a target are accepted: causal self-attention over a paged KV cache, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    CrossAttention,
    EncoderOnlyAttention,
    MLAAttention,
)
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import PrefillPrefixLMAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_specplug.config import ConfigError
from vllm_specplug.hosts.attention.backends import check_attention
from vllm_specplug.hosts.attention.cpu import TreeAttentionImpl, check_layers


def layer(kind: type = Attention, impl: type = TreeAttentionImpl, kv_cache_dtype: str = "auto", **changes: Any) -> Any:
    """A layer of vLLM that was not initialised."""
    made = kind.__new__(kind)
    attributes = {"attn_type": AttentionType.DECODER, "head_size": 64, "head_size_v": 64, "use_alibi_sqrt": False}
    vars(made).update(attributes | changes)
    vars(made)["impl"] = impl.__new__(impl)
    made.impl.kv_cache_dtype = kv_cache_dtype
    return made


def test_what_is_accepted():
    check_layers({"first": layer(), "second": layer()})


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (layer(MambaMixer2), "MambaMixer2.* recurrent state, which cannot be rolled back"),
        (layer(MLAAttention), "MLAAttention.* one key and one value per KV head"),
        (layer(CrossAttention, attn_type=AttentionType.ENCODER_DECODER), "the output of an encoder"),
        (layer(EncoderOnlyAttention, attn_type=AttentionType.ENCODER_ONLY), "attends to later tokens too"),
        (layer(ChunkedLocalAttention), "ChunkedLocalAttention.* all tokens before it, or the last ones only"),
        (layer(PrefillPrefixLMAttention), "PrefillPrefixLMAttention.* all tokens before it"),
        (layer(head_size_v=32), "keys of size 64 and values of size 32"),
        (layer(use_alibi_sqrt=True), "square root of the distance"),
    ],
)
def test_other_mechanisms_are_refused(odd, reason):
    with pytest.raises(ConfigError, match=f"causal self-attention: odd .*{reason}.*; serve this model without"):
        check_layers({"first": layer(), "odd": odd})


def test_other_backends_and_quantised_caches_are_refused():
    with pytest.raises(ConfigError, match=r"the attention of odd \(CPUAttentionBackendImpl\): serve"):
        check_layers({"odd": layer(impl=CPUAttentionBackendImpl)})
    with pytest.raises(ConfigError, match="quantised KV cache .layer odd.: use --kv-cache-dtype auto"):
        check_layers({"odd": layer(kv_cache_dtype="fp8")})
    with pytest.raises(ConfigError, match="use another one"):
        check_attention({"odd": layer()}, SimpleNamespace, "use another one")
