"""Heads as people publish them, at small sizes: which are served, and the reason of each refusal.

`specplug inspect`, `specplug convert` and the server use one check, so that each case asks all that concern it.
"""

import json

import pytest
import torch

from tests.unit.proposers.test_checkpoint import (
    CONFIG,
    DRAFT,
    HIDDEN,
    INNER,
    VOCAB,
    eagle3_state,
    eagle_state,
    refusal,
    write,
)
from vllm_specplug.cli import cli
from vllm_specplug.cli.inspection import inspect, render
from vllm_specplug.proposers.eagle2.checkpoint import load_head, save_head, validate_checkpoint

LAYERS = 30
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT}
AUX = "eagle_aux_hidden_state_layer_ids"


def renamed(state):
    """The layer's name in exports of NVIDIA's ModelOpt and in the speculators format."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def norms_of_queries_and_keys(layer):
    return {f"{layer}.self_attn.{name}_norm.weight": torch.ones(4) for name in "qk"}


def full_vocabulary(state):
    return without(state, "d2t", "t2d") | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}


def several_layers(state, count):
    layer = {name: tensor for name, tensor in state.items() if name.startswith("layers.0.")}
    more = {name.replace(".0.", f".{n}."): tensor.clone() for n in range(1, count) for name, tensor in layer.items()}
    return state | more


def more_layers(state, count):
    """Further layers of an EAGLE-3 head, which read one hidden state."""
    layer = {
        name: tensor for name, tensor in state.items() if name.startswith("layers.0.") and "hidden_norm" not in name
    }
    for number in range(1, count):
        for name, tensor in layer.items():
            one = tensor[:, :HIDDEN] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else tensor
            state = state | {name.replace("layers.0.", f"layers.{number}."): one.clone()}
    return state


def of_the_last_state(state):
    """The drafter reads the target's last hidden state as it is, so that there is nothing to combine."""
    return without(renamed(state), "fc.weight", "layers.0.hidden_norm.weight")


def narrow_state(hidden, target):
    """An EAGLE-3 head that is narrower than its target, with an embedding of its own."""
    return {
        "fc.weight": torch.randn(hidden, 3 * target),
        "midlayer.self_attn.q_proj.weight": torch.randn(16, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": torch.randn(8, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": torch.randn(8, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": torch.randn(hidden, 16),
        "midlayer.mlp.gate_proj.weight": torch.randn(INNER, hidden),
        "midlayer.mlp.up_proj.weight": torch.randn(INNER, hidden),
        "midlayer.mlp.down_proj.weight": torch.randn(hidden, INNER),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(VOCAB, hidden),
        "embed_tokens.weight": torch.randn(VOCAB, hidden),
    }


NARROW = {"hidden_size": 8, "head_dim": 4, "architectures": ["LlamaForCausalLMEagle3"]}

#: Changes of the config and tensors of heads that are served.
SERVED = {
    "SafeAILab": (EAGLE3, eagle3_state()),
    "names of ModelOpt": (EAGLE3, renamed(eagle3_state())),
    "ids in eagle_config": (EAGLE3 | {"eagle_config": {AUX: [1, 11, 21]}}, eagle3_state()),
    "full vocabulary with an LM head": ({}, full_vocabulary(eagle3_state())),
    "full vocabulary that shares the LM head": ({}, without(full_vocabulary(eagle3_state()), "lm_head.weight")),
    "an embedding of its own": (EAGLE3, eagle3_state() | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}),
    "four aux layers": (
        EAGLE3 | {AUX: [1, 11, 21, 30]},
        eagle3_state() | {"fc.weight": torch.randn(HIDDEN, 4 * HIDDEN)},
    ),
    "EAGLE-3.1": (
        EAGLE3 | {"fc_norm": True, "norm_output": True},
        eagle3_state() | {f"fc_norm.{number}.weight": torch.ones(HIDDEN) for number in range(3)},
    ),
    "a norm in front of fc": (
        EAGLE3 | {"norm_before_fc": True},
        eagle3_state() | {"input_norm.weight": torch.ones(3 * HIDDEN)},
    ),
    "EAGLE-3.1 of NVIDIA, by another key": (
        EAGLE3 | {"eagle_config": {"norm_before_fc": True}},
        eagle3_state() | {"input_norm.weight": torch.ones(3 * HIDDEN)},
    ),
    "a Qwen3 layer": (
        EAGLE3 | {"model_type": "qwen3"},
        eagle3_state() | norms_of_queries_and_keys("midlayer"),
    ),
    "a Qwen3 layer with biases": (
        EAGLE3 | {"attention_bias": True},
        eagle3_state()
        | norms_of_queries_and_keys("midlayer")
        | {f"midlayer.self_attn.{name}_proj.bias": torch.ones(16 if name == "q" else 8) for name in "qkv"},
    ),
    "two layers": (EAGLE3 | {"num_hidden_layers": 2}, more_layers(renamed(eagle3_state()), 2)),
    "three layers of Qwen3": (
        EAGLE3 | {"num_hidden_layers": 3},
        more_layers(renamed(eagle3_state()) | norms_of_queries_and_keys("layers.0"), 3),
    ),
    "narrower than the target": (NARROW | {"target_hidden_size": HIDDEN}, narrow_state(8, HIDDEN)),
    "narrower, and the config does not say so": (NARROW, narrow_state(8, HIDDEN)),
    "buffers that vLLM leaves out": (
        EAGLE3,
        eagle3_state() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    ),
    "quantised weights of the same shapes": (
        EAGLE3 | {"quantization_config": {"quant_method": "compressed-tensors"}},
        eagle3_state() | {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)},
    ),
    "biases": (
        EAGLE3 | {"attention_bias": True},
        eagle3_state()
        | {f"midlayer.self_attn.{name}_proj.bias": torch.ones(16 if name in "qo" else 8) for name in "qkvo"},
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(tmp_path, name):
    changes, state = SERVED[name]
    write(tmp_path, changes, state)
    info = validate_checkpoint(tmp_path, HIDDEN, VOCAB, num_layers=LAYERS)
    ids = changes.get(AUX) or changes.get("eagle_config", {}).get(AUX) or (2, 15, 27)
    assert (info.kind, info.aux_layers) == ("eagle3", tuple(ids))
    found = inspect(str(tmp_path))
    assert (found.kind, found.problem, found.hidden_size) == ("eagle3", None, HIDDEN)
    text = render(found)
    layers = "3 layers of the target (vLLM's default)" if tuple(ids) == (2, 15, 27) else f"layers {ids} of the target"
    assert f"\nreads       {layers}\n" in text
    assert f'"method": "eagle2", "model": "{tmp_path}"' in text


def test_the_last_hidden_state_is_served(tmp_path):
    write(
        tmp_path, EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False, AUX: []}}, of_the_last_state(eagle3_state())
    )
    info = validate_checkpoint(tmp_path, HIDDEN, VOCAB, num_layers=LAYERS)
    assert (info.kind, info.aux_layers) == ("eagle3", ())
    assert "\nreads       the target's last hidden state\n" in render(inspect(str(tmp_path)))
    assert "reads a target of hidden size 16, this target has 32" in refusal(tmp_path, hidden=32)


#: Changes of the config, tensors, and the words of the refusal.
REFUSED = {
    "no LM head for a draft vocabulary": (
        EAGLE3,
        without(eagle3_state(), "lm_head.weight"),
        "lacks 1 tensor(s): lm_head.weight; the head has a draft vocabulary of 20, the target 60 tokens, so it cannot",
    ),
    "no fc, and the config does not say so": (
        EAGLE3,
        of_the_last_state(eagle3_state()),
        "lacks 2 tensor(s): fc.weight, layers.0.hidden_norm.weight; it is not a complete EAGLE head",
    ),
    "an fc of the last hidden state": (
        EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}},
        renamed(eagle3_state()),
        "with 1 tensor(s) that are not computed here: fc.weight; config.json says use_aux_hidden_state false",
    ),
    "norms of queries only": (
        EAGLE3,
        eagle3_state() | {"midlayer.self_attn.q_norm.weight": torch.ones(4)},
        "lacks 1 tensor(s): midlayer.self_attn.k_norm.weight; it is not a complete EAGLE head",
    ),
    "an EAGLE-1 head with a Qwen3 layer": (
        {},
        eagle_state() | norms_of_queries_and_keys("layers.0"),
        "layers.0.self_attn.q_norm.weight; its layer is that of Qwen3 (norms of queries and keys): use a head with a",
    ),
    "an EAGLE-1 head of two layers": (
        {"num_hidden_layers": 2},
        several_layers(eagle_state(), 2),
        "an EAGLE-1/2 or HASS head of 2 layers; trees are drafted from such heads of one layer: vLLM's own method",
    ),
    "a layer with MLA": (
        EAGLE3,
        without(eagle3_state(), *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"))
        | {
            "midlayer.self_attn.q_a_proj.weight": torch.zeros(4, 32),
            "midlayer.self_attn.kv_b_proj.weight": torch.ones(4),
        },
        "an EAGLE-3 head with another layer than Llama's: it has midlayer.self_attn.kv_b_proj.weight, midlayer."
        "self_attn.q_a_proj.weight, and lacks midlayer.self_attn.k_proj.weight",
    ),
    "a layer of experts": (
        {},
        {name: tensor for name, tensor in eagle_state().items() if ".mlp." not in name}
        | {"layers.0.block_sparse_moe.gate.weight": torch.zeros(4, HIDDEN)},
        "an EAGLE-1/2 or HASS head with another layer than Llama's: it has layers.0.block_sparse_moe.gate.weight",
    ),
    "quantised weights": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {
            name.replace("proj.weight", "proj.weight_packed"): tensor
            for name, tensor in (eagle_state() | {"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}).items()
        },
        "its weights are quantised: use the head that is not",
    ),
    "two layers that both read an embedding": (
        EAGLE3 | {"num_hidden_layers": 2},
        several_layers(renamed(eagle3_state()), 2),
        "layers.1.self_attn.k_proj.weight expected [8, 16], found [8, 32]",
    ),
    "two layers in the config only": (
        EAGLE3 | {"num_hidden_layers": 2},
        eagle3_state(),
        "says num_hidden_layers 2, the weights have 1 layer: use the config.json",
    ),
    "the target's tensors": (
        EAGLE3,
        eagle3_state() | {"verifier_norm.weight": torch.ones(HIDDEN)},
        "verifier_norm.weight; drafts without them would be wrong",
    ),
    "P-EAGLE of one layer": (
        EAGLE3 | {"ptd_token_id": 3},
        eagle3_state() | {"mask_hidden": torch.zeros(1, 1, 3 * HIDDEN)},
        "a P-EAGLE head, which drafts all positions in one forward: the method 'dflash_tree'",
    ),
    "P-EAGLE without its key": (
        EAGLE3,
        eagle3_state() | {"mask_hidden": torch.zeros(1, 1, 3 * HIDDEN)},
        "a P-EAGLE head",
    ),
    "P-EAGLE of four layers": (
        EAGLE3 | {"ptd_token_id": 3, "num_hidden_layers": 4},
        several_layers(renamed(eagle3_state()), 4),
        "a P-EAGLE head",
    ),
    "DFlash": (
        {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "dflash_config": {"target_layer_ids": [1, 9]}},
        several_layers(
            without(eagle_state(fc_input=2 * HIDDEN), "none")
            | norms_of_queries_and_keys("layers.0")
            | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN), "hidden_norm.weight": torch.ones(HIDDEN)},
            5,
        ),
        "a DFlash drafter, which drafts all positions in one forward: the method 'dflash_tree'",
    ),
    "DFlash of the last hidden state": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"use_aux_hidden_state": False}},
        without(eagle_state(), "fc.weight") | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)},
        "a DFlash drafter",
    ),
    "DFlash by its tensors": (
        {"num_hidden_layers": 5},
        several_layers(eagle_state() | {"hidden_norm.weight": torch.ones(HIDDEN)}, 5),
        "a DFlash drafter",
    ),
    "DSpark": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "num_hidden_layers": 2},
        several_layers(eagle_state(), 2),
        "a DSpark drafter, which drafts all positions in one forward: the method 'dflash_tree' drafts trees from it",
    ),
    "a drafter that nobody here knows": (
        {"architectures": ["OtherDraftModel"], "num_hidden_layers": 2},
        several_layers(eagle_state(), 2),
        "a drafter of the kind 'OtherDraftModel': use an EAGLE, HASS or EAGLE-3 head",
    ),
    "XPress": (
        {"architectures": ["XPressDraftModel"], "num_hidden_layers": 2},
        several_layers(eagle_state(), 2),
        "an XPress drafter, which drafts all positions in one forward and refines them in others: no release of vLLM",
    ),
    "MTP": (
        {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"},
        {"layers.61.eh_proj.weight": torch.zeros(4, 8), "layers.61.enorm.weight": torch.ones(4)},
        "MTP layers, which belong to a target's own checkpoint: the method 'mtp_tree', without 'model', drafts",
    ),
    "Medusa": (
        {},
        {f"medusa_head.{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(3)},
        "a set of Medusa heads: the method 'medusa' serves it",
    ),
    "a norm that the config does not name": (
        EAGLE3,
        eagle3_state() | {"input_norm.weight": torch.ones(3 * HIDDEN)},
        "input_norm.weight; if it was trained with these norms, config.json must say so (norm_before_fc or fc_norm)",
    ),
    "a norm that only the config names": (
        EAGLE3 | {"norm_before_fc": True},
        eagle3_state(),
        "lacks 1 tensor(s): input_norm",
    ),
    "biases that the config does not name": (
        {},
        eagle_state() | {f"layers.0.self_attn.{name}_proj.bias": torch.ones(8) for name in "kv"},
        "if it was trained with these biases, config.json must say so (attention_bias, qkv_bias or mlp_bias)",
    ),
    "an EAGLE-1 head with an LM head": (
        {},
        eagle_state() | {"lm_head.weight": torch.ones(VOCAB, HIDDEN)},
        "an EAGLE-1/2 or HASS head with 1 tensor(s) that are not computed here: lm_head.weight; an EAGLE-1/2 or HASS",
    ),
    "d2t beside the target's vocabulary": (
        {},
        full_vocabulary(eagle3_state()) | {"d2t": torch.zeros(VOCAB, dtype=torch.long)},
        "its draft vocabulary is the target's: export it without d2t",
    ),
    "another activation": (
        EAGLE3 | {"hidden_act": "gelu"},
        eagle3_state(),
        "hidden_act 'gelu': only heads of Llama or",
    ),
    "no architectures": ({"architectures": None}, eagle_state(), "lacks architectures or model_type, which vLLM reads"),
    "no type of model": ({"model_type": None}, eagle_state(), "lacks architectures or model_type, which vLLM reads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    changes, state, words = REFUSED[name]
    write(tmp_path, changes, state)
    assert words in refusal(tmp_path, num_layers=LAYERS)
    found = inspect(str(tmp_path))
    if found.kind in ("medusa", "dflash", "dspark", "peagle"):  # other methods serve them
        assert found.problem is None
    else:
        assert words in found.problem


def test_a_whole_model_is_no_head(tmp_path):
    state = several_layers(eagle_state() | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}, 3)
    write(tmp_path, {"num_hidden_layers": 3}, without(state, "fc.weight") | {"norm.weight": torch.ones(HIDDEN)})
    message = refusal(tmp_path)
    assert "is a whole language model and not a draft head: is this the target's own folder?" in message
    assert "the method 'draft_tree' drafts trees with a small model" in message


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 15, 99], f"{AUX} [1, 15, 99]: the target has 30 layers; correct it to the 3 layers"),
        ([1, 15], "these are 2 layers, and fc reads 3"),
        ([1, 2, 15, 27], "these are 4 layers, and fc reads 3"),
        ([-1, 15, 27], "not different, increasing numbers from 0"),
        ([15, 1, 27], "not different, increasing numbers from 0"),
        ([1, 15, 15], "not different, increasing numbers from 0"),
        ([1, 15, "27"], "this is no list of integers"),
        ("1,15,27", "this is no list of integers"),
    ],
)
@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_aux_layers_that_the_target_does_not_have(tmp_path, capsys, ids, words, place):
    write(tmp_path / "head", EAGLE3 | ({AUX: ids} if place == "top" else {"eagle_config": {AUX: ids}}), eagle3_state())
    message = refusal(tmp_path / "head", num_layers=LAYERS)
    assert words in message and "from 0 to 30" in message
    save_head(tmp_path / "target", {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}, {})
    assert cli.main(["inspect", str(tmp_path / "head"), "--target", str(tmp_path / "target")]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and "fits" not in printed.out


def test_the_last_aux_layer_may_be_the_last_output(tmp_path):
    write(tmp_path, EAGLE3 | {AUX: [0, 15, LAYERS]}, eagle3_state())
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB, num_layers=LAYERS).aux_layers == (0, 15, LAYERS)


def test_default_aux_layers_that_the_target_does_not_have(tmp_path):
    write(tmp_path, EAGLE3, eagle3_state())
    assert "no eagle_aux_hidden_state_layer_ids, and vLLM's default is [2, 2, 1]" in refusal(tmp_path, num_layers=4)
    state = eagle3_state() | {"fc.weight": torch.randn(HIDDEN, 4 * HIDDEN)}
    message = refusal(write(tmp_path / "four", EAGLE3, state), num_layers=LAYERS)
    assert "names no layers of the target, and fc reads 4: add eagle_aux_hidden_state_layer_ids" in message


def test_heads_that_are_narrower_than_the_target(tmp_path):
    """They cannot share the target's embedding and LM head, and an EAGLE-1 head must be as wide as its target."""
    state = narrow_state(8, HIDDEN)
    write(tmp_path / "a", NARROW, without(state, "embed_tokens.weight"))
    share = "the head has hidden size 8, the target 16, so it cannot share the target's"
    assert f"lacks 1 tensor(s): embed_tokens.weight; {share}" in refusal(tmp_path / "a")
    write(tmp_path / "b", NARROW, without(state, "lm_head.weight"))
    assert f"lacks 1 tensor(s): lm_head.weight; {share}" in refusal(tmp_path / "b")
    write(tmp_path / "c", {"target_hidden_size": 32}, eagle_state())
    assert "has hidden size 16, the target 32: an EAGLE-1/2 or HASS head must be as wide" in refusal(
        tmp_path / "c", hidden=32
    )
    write(tmp_path / "d", NARROW | {"target_hidden_size": HIDDEN}, state)
    assert "reads a target of hidden size 16, this target has 32" in refusal(tmp_path / "d", hidden=32)


# ---- the speculators format

SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/Target-1B"}},
    "draft_vocab_size": DRAFT,
    AUX: [1, 2, 3],
    "transformer_layer_config": {k: v for k, v in CONFIG.items() if k not in ("architectures", "bias")},
}


QWEN3 = SPECULATORS["transformer_layer_config"] | {"model_type": "qwen3"}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, eagle3_state()),
        ({"transformer_layer_config": QWEN3}, eagle3_state() | norms_of_queries_and_keys("midlayer")),
        ({"norm_before_fc": True}, eagle3_state() | {"input_norm.weight": torch.ones(3 * HIDDEN)}),
        (
            {"transformer_layer_config": QWEN3 | {"num_hidden_layers": 2}},
            more_layers(renamed(eagle3_state()) | norms_of_queries_and_keys("layers.0"), 2),
        ),
    ],
)
def test_the_speculators_format_is_served_as_it_is(tmp_path, capsys, changes, state):
    save_head(tmp_path / "a", SPECULATORS | changes, renamed(state))
    info = validate_checkpoint(tmp_path / "a", HIDDEN, VOCAB, num_layers=LAYERS)
    assert (info.kind, info.aux_layers, info.config["norm_before_residual"]) == ("eagle3", (1, 2, 3), True)
    found = inspect(str(tmp_path / "a"))
    assert (found.kind, found.problem, found.target) == ("eagle3", None, "org/Target-1B")
    assert "speculators format" in found.layout
    assert cli.main(["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    converted = validate_checkpoint(tmp_path / "b", HIDDEN, VOCAB, num_layers=LAYERS)
    assert converted.aux_layers == info.aux_layers and converted.config == info.config
    tensors = load_head(tmp_path / "a")[1]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_head(tmp_path / "b")[1].items())


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        (
            {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | {"model_type": "gemma3"}},
            eagle3_state(),
            "an EAGLE-3 head with a 'gemma3' layer; heads with a Llama or Qwen3 layer are served",
        ),
        ({"speculators_model_type": "peagle"}, eagle3_state(), "a P-EAGLE head"),
        ({"speculators_model_type": "dflash2"}, eagle3_state(), "a DFlash drafter"),
        ({"speculators_model_type": "dspark"}, eagle3_state(), "a DSpark drafter"),
        ({"speculators_model_type": "xpress"}, eagle3_state(), "an XPress drafter"),
        ({}, eagle3_state() | {"mask_hidden": torch.zeros(1, 48)}, "a P-EAGLE head"),
        ({}, more_layers(renamed(eagle3_state()), 2), "says num_hidden_layers 1, the weights have 2 layers"),
        ({AUX: [-1, 2, 3]}, eagle3_state(), "not different, increasing numbers from 0"),
        ({AUX: [1, 2]}, eagle3_state(), "these are 2 layers, and fc reads 3"),
    ],
)
def test_what_the_speculators_format_has_that_is_not_served(tmp_path, capsys, changes, state, words):
    save_head(tmp_path / "a", SPECULATORS | changes, renamed(state))
    message = refusal(tmp_path / "a")
    assert words in message and "specplug convert" not in message
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert words in printed and "specplug convert" not in printed
    assert cli.main(["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_the_targets_tensors_are_left_out_by_convert(tmp_path):
    save_head(
        tmp_path / "a", SPECULATORS, renamed(eagle3_state()) | {"verifier_lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    )
    message = refusal(tmp_path / "a")
    assert "verifier_lm_head.weight, which vLLM does not load: `specplug convert" in message
    assert cli.main(["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    found = inspect(str(tmp_path / "b"))
    assert (found.target, found.problem) == ("org/Target-1B", None)
    assert load_head(tmp_path / "b")[0][AUX] == [1, 2, 3]


def test_convert_compares_the_aux_layers_with_a_target_on_this_machine(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    source = {"verifier": {"name_or_path": str(tmp_path / "target")}}
    save_head(tmp_path / "a", SPECULATORS | {"speculators_config": source}, renamed(eagle3_state()))
    assert cli.main(["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 2
    assert f"{AUX} [1, 2, 3]: the target has 2 layers" in capsys.readouterr().err
