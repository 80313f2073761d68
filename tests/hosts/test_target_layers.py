"""Which layers of a target are accepted: causal self-attention over a paged KV cache, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from vllm import LLM
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

from tests.hosts.conftest import ENGINE
from tests.hosts.test_attention_traits import SIZES
from vllm_specplug.config import ConfigError
from vllm_specplug.cpu.attention import TreeAttentionImpl, check_layers
from vllm_specplug.vllm.attention_backends import check_attention


def layer(kind: type = Attention, impl: type = TreeAttentionImpl, kv_cache_dtype: str = "auto", **changes: Any) -> Any:
    """A layer of vLLM that was not initialised."""
    made = kind.__new__(kind)
    attributes = {"attn_type": AttentionType.DECODER, "head_size": 64, "head_size_v": 64, "use_alibi_sqrt": False}
    vars(made).update(attributes | changes)
    vars(made)["impl"] = impl.__new__(impl)
    made.impl.kv_cache_dtype = kv_cache_dtype
    return made


def test_what_is_accepted():
    latents = {"indexer": None, "use_sparse": False}
    others = {"latents": layer(MLAAttention, **latents), "chunks": layer(ChunkedLocalAttention)}
    check_layers({"first": layer(), "second": layer(), **others})
    for name in others:  # on the V2 runner there is tree attention for Attention only
        with pytest.raises(ConfigError, match=name):
            check_attention({name: others[name]}, TreeAttentionImpl, "")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (layer(MambaMixer2), "MambaMixer2.* recurrent state, which cannot be rolled back"),
        (layer(MLAAttention, indexer=None, use_sparse=True), "MLAAttention.* only the tokens that its indexer selects"),
        (layer(MLAAttention, indexer=None, use_sparse=False, sliding_window=8), "a token all tokens before it"),
        (layer(CrossAttention, attn_type=AttentionType.ENCODER_DECODER), "the output of an encoder"),
        (layer(EncoderOnlyAttention, attn_type=AttentionType.ENCODER_ONLY), "attends to later tokens too"),
        (layer(PrefillPrefixLMAttention), "PrefillPrefixLMAttention.* all tokens before it"),
        (layer(head_size_v=32), "keys of size 64 and values of size 32"),
        (layer(use_alibi_sqrt=True), "square root of the distance"),
    ],
)
def test_other_mechanisms_are_refused(odd, reason):
    with pytest.raises(ConfigError, match=f"causal self-attention: odd .*{reason}.*; serve this model without"):
        check_layers({"first": layer(), "odd": odd})


#: Its first forward refuses a model.
PROVEN = True
#: Config class and fields of a target, and the reason for which it is refused.
REFUSED = {
    "MLA with wrong rotary positions": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,  # with AMX, vLLM packs these in steps of 32
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
        },
        r"operator for rotary positions is wrong .*layers\.0\.self_attn.*leave out --enforce-eager",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_real_targets_are_refused(tmp_path, expert_group, name):
    config_class, fields, reason = REFUSED[name]
    config = getattr(transformers, config_class)(**{**SIZES, "num_hidden_layers": 4, **fields})
    config.architectures = [config_class.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    # On some CPUs vLLM before 0.32 loads convolutions in bfloat16 only.
    settings = {**ENGINE, "dtype": "bfloat16", "load_format": "dummy"}
    with pytest.raises(ConfigError, match=reason):
        LLM(str(tmp_path), speculative_config={"method": "lookup"}, **settings)


def test_other_backends_and_quantised_caches_are_refused():
    with pytest.raises(ConfigError, match=r"the attention of odd \(CPUAttentionBackendImpl\): serve"):
        check_layers({"odd": layer(impl=CPUAttentionBackendImpl)})
    with pytest.raises(ConfigError, match="KV caches in nvfp4 .layer odd.: use --kv-cache-dtype auto or fp8"):
        check_layers({"odd": layer(kv_cache_dtype="nvfp4")})
    check_layers({"even": layer(kv_cache_dtype="fp8_e5m2")})
    with pytest.raises(ConfigError, match="use another one"):
        check_attention({"odd": layer()}, SimpleNamespace, "use another one")
