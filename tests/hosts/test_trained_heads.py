"""Heads from our trainers in the real engine: they accept there what they accept offline, and change no token."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.doubles import tiny
from tests.hosts.conftest import WHOLE, acceptance_length, make_prompts, runner_of, token_ids
from vllm_specplug.proposers.eagle3 import train as eagle3
from vllm_specplug.proposers.eagle3.head import layer_ids
from vllm_specplug.proposers.hass.train import HassTrainOptions
from vllm_specplug.proposers.training import eagle, features
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.trainer import RunSettings, train

CHAIN = {"draft_top_k": 1, "draft_depth": 4, "num_speculative_tokens": 4, **WHOLE}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
IDS = torch.arange(tiny.VOCAB)
SMALL = {"epochs": 60, "batch_tokens": 1024, "lr": 5e-3, "draft_vocab_size": tiny.VOCAB, "align_steps": 2}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16)


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return token_ids(engine().generate(prompts, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def data(checkpoints, prompts, plain, tmp_path_factory):
    """Features of the very answers that are drafted later: a head that knows them by heart accepts much."""
    answers = [Answer("tiny", p["prompt_token_ids"], out[0]) for p, out in zip(prompts, plain, strict=True)]
    layers = layer_ids({"num_hidden_layers": 2})
    return features.extract(
        str(checkpoints["target"]), answers, tmp_path_factory.mktemp("features"), layers=layers, progress=False
    )


def trained(kind, checkpoints, files, out) -> float:
    """Train a head, register its checkpoint as `out.name`, and return its offline tau."""
    target = str(checkpoints["target"])
    data = features.load_features(files, layers=kind == "eagle3")
    _, embedding, lm_head = features.target_head(target)
    if kind == "eagle":
        train(eagle.EagleTask(target, IDS, HassTrainOptions(**SMALL)), data, str(out), RunSettings(progress=False))
        head, ids = eagle.load_trained(str(out))
    else:
        train(
            eagle3.Eagle3Task(target, IDS, eagle3.Eagle3Options(**SMALL)), data, str(out), RunSettings(progress=False)
        )
        head, ids = eagle3.load_trained(str(out))
        lm_head = head.lm_head.weight.detach()
    checkpoints[out.name] = out
    return chain_acceptance(head, data, embedding.float(), lm_head.float(), ids, depth=4).tau


@pytest.fixture(scope="module")
def heads(checkpoints, data, tmp_path_factory):
    """By kind: the offline tau of the head `trained-KIND`."""
    root = tmp_path_factory.mktemp("heads")
    return {kind: trained(kind, checkpoints, data, root / f"trained-{kind}") for kind in ("eagle", "eagle3")}


@pytest.mark.parametrize(("kind", "method"), [("eagle", "hass"), ("eagle3", "eagle2")])
def test_served_tau_is_the_offline_tau(engine, prompts, plain, heads, kind, method):
    offline = heads[kind]
    assert offline > 2.0  # else nothing was learnt, and nothing is compared
    llm = engine(f"trained-{kind}", {**CHAIN, "method": method})
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain
    assert acceptance_length(llm) == pytest.approx(offline, rel=0.05)


# ---- the same EAGLE-3 head as others publish theirs


def as_modelopt(config, tensors):
    """The layer is called `layers.0`, the ids are in `eagle_config`, and fewer positions than the prompts have."""
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    config["max_position_embeddings"] = 16
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_shared_lm_head(config, tensors):
    """No LM head of its own, and two of the three aux layers."""
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2]
    del tensors["lm_head.weight"]
    width = tiny.HIDDEN
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"][:, :width], tensors["fc.weight"][:, 2 * width :]], dim=1)
    return tensors


def of_another_width(config, tensors):
    """Wider than the target by numbers that are 0, with an embedding of its own; the norms divide by fewer of them."""
    more, old = tiny.HIDDEN // 2, tiny.HIDDEN
    config |= {"hidden_size": old + more, "target_hidden_size": old}
    wider = {}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor = torch.nn.functional.pad(tensor * math.sqrt(old / (old + more)), (0, more))
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = torch.cat([torch.nn.functional.pad(half, (0, more)) for half in tensor.split(old, dim=1)], dim=1)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, more))
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            tensor = torch.nn.functional.pad(tensor, (0, more))
        wider[name] = tensor
    return wider


@pytest.mark.parametrize(("change", "share"), [(as_modelopt, 1.0), (of_another_width, 1.0), (with_shared_lm_head, 0.4)])
def test_heads_as_others_publish_them(engine, checkpoints, prompts, plain, heads, tmp_path, change, share):
    """`share`: of what the trained head has accepted beside the bonus token."""
    config = json.loads((checkpoints["trained-eagle3"] / "config.json").read_text())
    tensors = load_file(checkpoints["trained-eagle3"] / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(checkpoints["target"] / "model.safetensors")["model.embed_tokens.weight"]
    tensors = change(config, tensors)
    path = tmp_path / change.__name__
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for number, names in enumerate((sorted(tensors)[:5], sorted(tensors)[5:]), start=1):
        shard = {name: tensors[name].contiguous() for name in names}
        torch.save(shard, path / f"pytorch_model-0000{number}-of-00002.bin")
    checkpoints[path.name] = path
    llm = engine(path.name, CHAIN)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain
    assert acceptance_length(llm) - 1 > 0.95 * share * (heads["eagle3"] - 1)
    draft = runner_of(llm).drafter.model
    assert draft.config.max_position_embeddings >= runner_of(llm).max_model_len
