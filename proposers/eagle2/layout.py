"""The tensors of an EAGLE head of Llama or Qwen3 layers: which ones a config asks for, and their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .kinds import LAYER_NAMES, CheckpointError, architectures, eagle_config, name_of, num_layers, reads_last_state

#: Keys with the aux layers of an EAGLE-3 head, at the top of its config or in ``eagle_config``.
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
#: Layers of the target that an EAGLE-3 head reads if its config says nothing.
DEFAULT_AUX_LAYERS = 3

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
#: vLLM ignores them.
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def check_fields(
    path: Path, config: Mapping, kind: str, found: Mapping, target_hidden_size: int, target_vocab_size: int
) -> None:
    """Raise ``CheckpointError`` unless the config has all sizes, and they are those of the weights and the target."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    optional = ("head_dim", "num_key_value_heads", "draft_vocab_size", "target_hidden_size", "num_hidden_layers")
    given = [key for key in optional if config.get(key) is not None]
    if missing := [key for key in (*needed, *given) if not _is_count(config.get(key))]:
        raise CheckpointError(
            f"{path / 'config.json'} lacks {', '.join(missing)} (integers from 1); use the config.json that "
            f"came with the head."
        )
    if not architectures(config) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path / 'config.json'} lacks architectures or model_type, which vLLM reads: use the config.json that "
            'came with the head, or add "architectures": ["LlamaForCausalLM"] and "model_type": "llama" to it.'
        )
    said, layers = config.get("num_hidden_layers") or 1, max(num_layers(found), 1)
    if said != layers:
        raise CheckpointError(
            f"{path / 'config.json'} says num_hidden_layers {said}, the weights have {layers} "
            f"layer{'s' if layers > 1 else ''}: use the config.json that came with the head."
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(
            f"{path / 'config.json'} says hidden_act {activation!r}: only heads of Llama or Qwen3 layers ('silu') are "
            "served."
        )
    _check_sizes(path, config, kind, target_hidden_size, target_vocab_size)


def _check_sizes(path: Path, config: Mapping, kind: str, target_hidden_size: int, target_vocab_size: int) -> None:
    hidden = config["hidden_size"]
    reads = config.get("target_hidden_size") or hidden
    if kind == "eagle" and hidden != target_hidden_size == reads:
        raise CheckpointError(
            f"The head at {path} has hidden size {hidden}, the target {target_hidden_size}: an EAGLE-1/2 or HASS head "
            f"must be as wide as its target; use such a head, or an EAGLE-3 head."
        )
    if kind == "eagle" and hidden != target_hidden_size:
        raise CheckpointError(
            f"The head at {path} has hidden size {hidden}, the target {target_hidden_size}: it was trained for another "
            f"model; use a head trained for this target."
        )
    must_match = config.get("target_hidden_size") or reads_last_state(config)
    if must_match and reads != target_hidden_size:
        raise _other_width(path, reads, target_hidden_size)
    if kind == "eagle3" and reads_last_state(config) and hidden != target_hidden_size:
        raise _other_width(path, hidden, target_hidden_size)
    if config["vocab_size"] != target_vocab_size:
        raise CheckpointError(
            f"The head at {path} has a vocabulary of {config['vocab_size']}, the target {target_vocab_size}: it was "
            f"trained for another tokenizer; use a head trained for this target."
        )


def _other_width(path: Path, reads: int, target_hidden_size: int) -> CheckpointError:
    return CheckpointError(
        f"The head at {path} reads a target of hidden size {reads}, this target has {target_hidden_size}: it was "
        f"trained for another model; use a head trained for this target."
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---- aux layers


def aux_layers(
    path: Path, config: Mapping, fused_width: int, target_hidden_size: int, num_layers: int | None
) -> tuple[int, ...] | None:
    """Return the layers of the target that an EAGLE-3 head reads; None: vLLM's default of an unknown target.

    Layer n stands for the input of layer n; the number of layers, for the output of the last one.

    Args:
        path, config: of the head.
        fused_width: inputs of ``fc``.
        target_hidden_size: of the target.
        num_layers: of the target; None: not known.

    Raises:
        CheckpointError: they do not fit ``fc`` or the target.
    """
    ids = _ids_of(config)
    count = _count_of(path, config, ids, fused_width, target_hidden_size)
    given = f"{AUX_KEY} {ids}"
    if ids is None:
        if count != DEFAULT_AUX_LAYERS:
            raise CheckpointError(
                f"{path / 'config.json'} names no layers of the target, and fc reads {count}: add {AUX_KEY}, the "
                f"{count} layers that the head was trained on."
            )
        if num_layers is None:
            return None
        ids = [2, num_layers // 2, num_layers - 3]
        given = f"no {AUX_KEY}, and vLLM's default is {ids}"
    if problem := _problem_of(ids, count, num_layers):
        last = "the target's number of layers" if num_layers is None else num_layers
        raise CheckpointError(
            f"{path / 'config.json'} has {given}: {problem}; correct it to the {count} layers of the target that the "
            f"head was trained on (increasing, from 0 to {last}), or use a head trained for this target."
        )
    return tuple(ids)


def _ids_of(config: Mapping) -> Any:
    return config.get(AUX_KEY) or eagle_config(config).get(AUX_KEY) or None


def _count_of(path: Path, config: Mapping, ids: Any, fused_width: int, target_hidden_size: int) -> int:
    """Return how many layers of the target ``fc`` reads."""
    said = config.get("num_aux_hidden_states")
    count = len(ids) if isinstance(ids, list) else said if _is_count(said) else DEFAULT_AUX_LAYERS
    if fused_width == count * target_hidden_size:
        return count
    reads = config.get("target_hidden_size") or config["hidden_size"]
    if reads != target_hidden_size:
        raise _other_width(path, reads, target_hidden_size)
    count, rest = divmod(fused_width, target_hidden_size)
    if rest or not count:
        raise CheckpointError(
            f"{path}: fc.weight reads {fused_width} numbers, which is no multiple of the target's hidden size "
            f"{target_hidden_size}; config.json and the weights do not belong together."
        )
    return count


def _problem_of(ids: Any, count: int, num_layers: int | None) -> str | None:
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        return "this is no list of integers"
    if len(ids) != count:
        return f"these are {len(ids)} layers, and fc reads {count}"
    if ids != sorted(set(ids)) or ids[0] < 0:
        return "they are not different, increasing numbers from 0"
    if num_layers is not None and ids[-1] > num_layers:
        return f"the target has {num_layers} layers"
    return None


def target_width(config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Return the hidden size of the target that a head was made for, if its config does not say it."""
    hidden, fused = config.get("hidden_size"), shapes.get("fc.weight", ())
    ids = _ids_of(config)
    count = len(ids) if isinstance(ids, list) else DEFAULT_AUX_LAYERS
    may_differ = (
        not reads_last_state(config) and _is_count(hidden) and len(fused) == 2 and "embed_tokens.weight" in shapes
    )
    if may_differ and fused[1] not in (2 * hidden, count * hidden) and fused[1] % count == 0:
        return fused[1] // count
    return hidden


# ---- tensors


def expected_shapes(
    config: Mapping, kind: str, found: Mapping[str, tuple[int, ...]], target_hidden_size: int, target_vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the head by its name; optional ones only if ``found`` has them."""
    hidden, layer = config["hidden_size"], layer_name(found)
    eagle3 = kind == "eagle3"
    is_qwen3 = eagle3 and has_qwen3_layers(found)
    shapes = _layer_shapes(config, layer, 2 * hidden if eagle3 else hidden, eagle3, is_qwen3)
    draft_vocab = config.get("draft_vocab_size") or target_vocab_size
    is_narrow, is_reduced = hidden != target_hidden_size, draft_vocab != target_vocab_size
    if "embed_tokens.weight" in found or is_narrow:
        shapes["embed_tokens.weight"] = (target_vocab_size, hidden)
    if is_reduced or ("d2t" in found and not eagle3):
        shapes["d2t"] = (draft_vocab,)
    if not eagle3:
        shapes["fc.weight"] = (hidden, 2 * hidden)
        if "fc.bias" in found or config.get("bias") is True:
            shapes["fc.bias"] = (hidden,)
        return shapes
    for number in range(1, num_layers(found)):
        further = f"layers.{number}"
        shapes |= _layer_shapes(config, further, hidden, eagle3, is_qwen3)
        unused = f"{further}.hidden_norm.weight"  # vLLM's further layers have it too
        norms = [f"{further}.input_layernorm.weight", *([unused] if unused in found else [])]
        shapes |= dict.fromkeys(norms, (hidden,))
    shapes |= {f"{layer}.input_layernorm.weight": (hidden,), "norm.weight": (hidden,)}
    if "lm_head.weight" in found or is_narrow or is_reduced:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    return shapes | _combining_shapes(config, layer, found, target_hidden_size)


def _combining_shapes(
    config: Mapping, layer: str, found: Mapping[str, tuple[int, ...]], target_hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that make an EAGLE-3 head's input of the target's hidden states."""
    hidden, norm = config["hidden_size"], f"{layer}.hidden_norm.weight"
    if reads_last_state(config):  # without this tensor, vLLM's norm has no weights
        return {norm: (hidden,)} if norm in found else {}
    fused_width = found["fc.weight"][-1] if found.get("fc.weight") else DEFAULT_AUX_LAYERS * target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {norm: (hidden,), "fc.weight": (hidden, fused_width)}
    if eagle_config(config).get("norm_before_fc", config.get("norm_before_fc")):
        shapes["input_norm.weight"] = (fused_width,)
    if config.get("fc_norm"):
        count = fused_width // target_hidden_size
        shapes |= {f"fc_norm.{number}.weight": (target_hidden_size,) for number in range(count)}
    return shapes


def missing_hint(config: Mapping, missing: list[str], target_hidden_size: int, target_vocab_size: int) -> str:
    """Return why tensors that a head could share with its target are needed, or that it is incomplete."""
    hidden, draft_vocab = config["hidden_size"], config.get("draft_vocab_size") or target_vocab_size
    if set(missing) <= {"embed_tokens.weight", "lm_head.weight"}:
        if hidden != target_hidden_size:
            return (
                f"the head has hidden size {hidden}, the target {target_hidden_size}, so it cannot share the target's: "
                "use a head that has its own."
            )
        return (
            f"the head has a draft vocabulary of {draft_vocab}, the target {target_vocab_size} tokens, so it cannot "
            "share the target's: use a head that has its own."
        )
    return "it is not a complete EAGLE head: export or download it again."


def layer_name(found: Mapping) -> str:
    """Return the name of a head's layer."""
    return next((layer for layer in LAYER_NAMES if any(name.startswith(f"{layer}.") for name in found)), "layers.0")


def has_qwen3_layers(found: Iterable[str]) -> bool:
    """Return whether the layers of an EAGLE-3 head norm queries and keys, as Qwen3's do."""
    return any(name.endswith((".q_norm.weight", ".k_norm.weight")) for name in found)


def head_dim_of(config: Mapping) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _layer_shapes(config: Mapping, layer: str, inputs: int, eagle3: bool, is_qwen3: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer, as vLLM builds it from the config."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = head_dim_of(config)
    q_size, kv_size = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    outputs = dict(zip(_ATTENTION, (q_size, kv_size, kv_size, hidden), strict=True))
    shapes = {
        f"{layer}.self_attn.{name}.weight": (size, q_size if name == "o_proj" else inputs)
        for name, size in outputs.items()
    }
    shapes |= {
        f"{layer}.mlp.{name}.weight": (hidden, inner) if name == "down_proj" else (inner, hidden) for name in _MLP
    }
    has_bias = bool(config.get("attention_bias"))
    biased = (_ATTENTION[:3] if is_qwen3 else _ATTENTION) if has_bias else ()
    if not eagle3 and "qkv_bias" in config:
        biased = [name for name in _ATTENTION if (has_bias if name == "o_proj" else config["qkv_bias"])]
    shapes |= {f"{layer}.self_attn.{name}.bias": (outputs[name],) for name in biased}
    if is_qwen3:
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    elif config.get("mlp_bias"):
        shapes |= {f"{layer}.mlp.{name}.bias": (hidden if name == "down_proj" else inner,) for name in _MLP}
    return shapes | {f"{layer}.post_attention_layernorm.weight": (hidden,)}


def check_names(path: Path, config: Mapping, kind: str, found: Mapping, expected: Mapping) -> None:
    """Raise ``CheckpointError`` if the head has tensors that nothing would compute with."""
    surplus = sorted(name for name in found.keys() - expected.keys() if name != "t2d" and not name.endswith(_IGNORED))
    missing = sorted(expected.keys() - found.keys())
    layer = f"{layer_name(found)}."
    if any(name.startswith(layer) for name in surplus) and any(name.startswith(layer) for name in missing):
        raise CheckpointError(
            f"{path} is {name_of(kind)} with another layer than Llama's: it has {_listed(surplus)}, and lacks "
            f"{_listed(missing)}; {_why_other(config, kind)}."
        )
    if config.get("quantization_config"):  # scales and zero points of the weights
        surplus = [name for name in surplus if f"{name.rpartition('.')[0]}.weight" not in expected]
    if surplus and not missing:
        raise CheckpointError(
            f"{path} is {name_of(kind)} with {len(surplus)} tensor(s) that are not computed here: {_listed(surplus)}; "
            f"{_why(surplus)}."
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _why_other(config: Mapping, kind: str) -> str:
    if config.get("quantization_config"):
        return "its weights are quantised: use the head that is not"
    return f"heads with Llama or Qwen3 layers draft trees; vLLM's own method {kind!r} may draft chains from it"


def _why(surplus: list[str]) -> str:
    if any("q_norm" in name or "k_norm" in name for name in surplus):
        return (
            "its layer is that of Qwen3 (norms of queries and keys): use a head with a Llama layer, or an EAGLE-3 head"
        )
    if all(name.endswith("_proj.bias") for name in surplus):
        return "if it was trained with these biases, config.json must say so (attention_bias, qkv_bias or mlp_bias)"
    if all(name.startswith(("input_norm.", "fc_norm.")) for name in surplus):
        return "if it was trained with these norms, config.json must say so (norm_before_fc or fc_norm)"
    if surplus == ["fc.weight"]:
        return "config.json says use_aux_hidden_state false: use the config.json that came with the head"
    if surplus == ["d2t"]:
        return "its draft vocabulary is the target's: export it without d2t"
    if surplus == ["lm_head.weight"]:
        return "an EAGLE-1/2 or HASS head uses the target's LM head: export it without lm_head"
    return "drafts without them would be wrong: use a head without them, or try vLLM's own methods"
