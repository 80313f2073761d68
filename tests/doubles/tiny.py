"""Tiny random checkpoints on disk: a Llama target, and a drafter that agrees with it about half of the time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 32, 96, 160


def llama_config(**changes) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**config, **changes}


def _layer(prefix: str, generator: torch.Generator, scale: float) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        f"{prefix}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN) * 4,
        f"{prefix}.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN) * 4,
        f"{prefix}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _write(path: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


#: Text of the ids from 3 on; single characters and some longer pieces, so that a text has several spellings.
PIECES = [chr(code) for code in range(32, 127)] + ["ab", "er", "true", "false", '": ', '", "', "</think>", "<think>"]


def write_tokenizer(path: Path) -> None:
    """A tokenizer of ``PIECES`` beside a target; ids behind them are empty, but for their name."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *(piece.replace(" ", "Ġ") for piece in PIECES)]
    names += [f"<unused{i}>" for i in range(len(names), VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)


#: Of each architecture: its name in a config, and what is special about it.
FAMILIES = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    # Its heads share the hidden size.
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": HIDDEN // HEAD_DIM},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def write_target(
    path: Path,
    seed: int = 0,
    scale: float = 0.09,
    num_layers: int = 2,
    redundant: dict[str, tuple[int, ...]] | None = None,
    family: str = "llama",
) -> Path:
    """A target whose next token depends mostly on the last one, and enough on the context for KV errors to show.

    ``redundant``: layers whose ``attention`` or ``mlp`` adds nothing to the residual stream.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.35,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= _layer(prefix, generator, scale) | {f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN)}
        if family == "qwen2":
            query, output = f"{prefix}.self_attn.q_proj", f"{prefix}.self_attn.o_proj"
            tensors[f"{query}.weight"] = tensors[f"{query}.weight"][:HIDDEN]
            tensors[f"{output}.weight"] = tensors[f"{output}.weight"][:, :HIDDEN].clone()
            tensors |= {f"{prefix}.self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in "qkv"}
        if family == "qwen3":
            tensors |= {f"{prefix}.self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
        for name, output in (("attention", "self_attn.o_proj"), ("mlp", "mlp.down_proj")):
            if redundant is not None and layer in redundant[name]:
                tensors[f"{prefix}.{output}.weight"].zero_()
    return _write(path, llama_config(num_hidden_layers=num_layers, **FAMILIES[family]), tensors)


def write_sibling(path: Path, target: Path, scale: float = 0.5, **changes) -> Path:
    """A small model that often agrees with ``target``: its first layer, whose outputs are scaled down.

    ``changes`` of its config; its vocabulary is padded to another size.
    """
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    for name in kept:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            kept[name] = scale * kept[name]
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1, **changes}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        missing = config["vocab_size"] - len(kept[name])
        kept[name] = torch.nn.functional.pad(kept[name], (0, 0, 0, missing))
    return _write(path, config, kept)


def renumber(folder: Path, lost: tuple[str, ...] = ()) -> Path:
    """Give the tokens of a model and its tokenizer other ids; ``lost`` tokens get other names."""
    order = [0, 1, 2, *range(VOCAB - 1, 2, -1)]  # the old ids
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][order].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {f"{name}?" if name in lost else name: order.index(old) for name, old in vocabulary}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_target_with_windows(path: Path, window: int) -> Path:
    """A target with a sliding window in every second of its four layers: vLLM puts those in a KV cache group."""
    write_target(path, num_layers=4)
    config = json.loads((path / "config.json").read_text())
    config |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"] * 2}
    (path / "config.json").write_text(json.dumps(config))
    return path


def drafter_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    """An EAGLE head that passes the embedding through: what the target predicts without its layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = _layer("layers.0", generator, 0.02)
    tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), 0.05 * torch.randn(HIDDEN, HIDDEN, generator=generator)], 1)
    return tensors


def drafter_config(**changes) -> dict:
    return llama_config(num_hidden_layers=1, bias=False, **changes)


def write_drafter(path: Path, seed: int = 1, draft_vocab: int | None = None, bias: bool = False) -> Path:
    """An EAGLE-1/2 checkpoint, optionally with a reduced draft vocabulary."""
    tensors = drafter_tensors(seed)
    config = drafter_config()
    if bias:
        tensors["fc.bias"] = torch.full((HIDDEN,), 0.01)
        config["bias"] = True
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        config["draft_vocab_size"] = draft_vocab
    return _write(path, config, tensors)


def write_eagle3_drafter(path: Path, seed: int = 1, draft_vocab: int = 96) -> Path:
    """An EAGLE-3 checkpoint (random: its drafts are rarely right)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    layer = _layer("midlayer", generator, 0.1)
    for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        layer[f"midlayer.self_attn.{name}_proj.weight"] = random(rows * HEAD_DIM, 2 * HIDDEN)
    ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    tensors = layer | {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": random(draft_vocab, HIDDEN),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": t2d,
    }
    config = drafter_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft_vocab)
    # The default layers (2, L//2, L-3) do not exist in a target of two layers.
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    return _write(path, config, tensors)


def extract_features(
    target: Path, texts: list[tuple[list[int], list[int]]], folder: Path, layers: tuple[int, ...] = ()
) -> list[Path]:
    """Files of a target's features over pairs of prompt and answer: heads fitted to them accept often."""
    from vllm_specplug.proposers.training.answers import Answer
    from vllm_specplug.proposers.training.features import extract

    rows = [Answer("tiny", prompt, answer) for prompt, answer in texts]
    return extract(str(target), rows, folder, layers=layers, progress=False)


def write_medusa(path: Path, target: Path, features: list[Path]) -> Path:
    """Medusa heads that know by heart what the features are of."""
    from vllm_specplug.proposers.medusa.train import MedusaTask, MedusaTraining
    from vllm_specplug.proposers.training.features import load_features
    from vllm_specplug.proposers.training.trainer import RunSettings, train

    training = MedusaTraining(num_heads=3, num_layers=1, epochs=80, batch_tokens=4096, lr=3e-2, draft_vocab_size=VOCAB)
    task = MedusaTask(str(target), torch.arange(VOCAB), training)
    train(task, load_features(features), str(path), RunSettings(progress=False))
    return path


def write_linear_heads(path: Path, target: Path, texts: list[tuple[list[int], list[int]]]) -> Path:
    """Weights of ``tests/example_drafter``: least squares from hidden states to the tokens behind the next one."""
    from vllm_specplug.proposers.training.features import load_features

    data = load_features(extract_features(target, texts, path / "features"))
    inputs, outputs = [], [[], []]
    for start, length in zip(data.starts.tolist(), data.lengths.tolist(), strict=True):
        inputs.append(data.features[start : start + length - 3].double())
        for level in range(2):
            tokens = data.ids[start + 2 + level : start + level + length - 1]
            outputs[level].append(torch.nn.functional.one_hot(tokens, VOCAB).double())
    solved = [torch.linalg.lstsq(torch.cat(inputs), torch.cat(one)).solution.T for one in outputs]
    save_file({"weight": torch.stack(solved).float().contiguous()}, path / "heads.safetensors")
    return path
