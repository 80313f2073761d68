"""Heads from our trainers in the real engine: they accept there what they accept offline, and change no token."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams
from vllm_specplug.proposers.eagle3 import train as eagle3
from vllm_specplug.proposers.eagle3.head import layer_ids
from vllm_specplug.proposers.hass.train import HassTrainOptions
from vllm_specplug.proposers.training import eagle, features
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.evaluate import chain_acceptance

from tests import tiny
from tests.hosts.conftest import acceptance_length, make_prompts, token_ids

CHAIN = {"draft_top_k": 1, "draft_depth": 4, "num_speculative_tokens": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
IDS = torch.arange(tiny.VOCAB)
SMALL = {"epochs": 12, "batch_tokens": 1024, "lr": 3e-3, "draft_vocab_size": tiny.VOCAB, "align_steps": 2}


def answered(engine, prompts) -> list[Answer]:
    outputs = token_ids(engine().generate(prompts, GREEDY, use_tqdm=False))
    return [Answer("tiny", prompt["prompt_token_ids"], out[0]) for prompt, out in zip(prompts, outputs, strict=True)]


@pytest.fixture(scope="module")
def material(engine, checkpoints, tmp_path_factory):
    """Features of answers to train on and, last, of 16 to measure on."""
    prompts = make_prompts(16), make_prompts(96, seed=7, longest=20)
    target, folder = str(checkpoints["target"]), tmp_path_factory.mktemp("features")
    layers = layer_ids({"num_hidden_layers": 2})
    sets = []
    for name, some in zip(("dev", "train"), prompts, strict=True):
        files = features.extract(target, answered(engine, some), folder / name, layers=layers, progress=False)
        sets.append([features.load_features(files, layers=with_layers) for with_layers in (False, True)])
    return {"prompts": prompts[0], "eagle": [s[0] for s in sets], "eagle3": [s[1] for s in sets]}


def trained(kind, checkpoints, material, out) -> float:
    """Train a head, register its checkpoint as `out.name`, and return its offline tau."""
    target = str(checkpoints["target"])
    dev, data = material[kind]
    if kind == "eagle":
        eagle.train_eagle(target, data, str(out), IDS, HassTrainOptions(**SMALL), progress=False)
        head, ids = eagle.load_trained(str(out))
        lm_head = features.target_head(target)[2].float()
    else:
        eagle3.train_eagle3(target, data, str(out), IDS, eagle3.Eagle3Options(**SMALL), progress=False)
        head, ids = eagle3.load_trained(str(out))
        lm_head = head.lm_head.weight.detach()
    checkpoints[out.name] = out
    embedding = features.target_head(target)[1].float()
    return chain_acceptance(head, dev, embedding, lm_head, ids, depth=4).tau


@pytest.mark.parametrize(("kind", "method"), [("eagle", "hass"), ("eagle3", "eagle2")])
def test_served_tau_is_the_offline_tau(engine, checkpoints, material, tmp_path, kind, method):
    offline = trained(kind, checkpoints, material, tmp_path / f"trained-{kind}")
    assert offline > 1.3  # else nothing was learnt, and nothing is compared
    expected = token_ids(engine().generate(material["prompts"], GREEDY, use_tqdm=False))
    llm = engine(f"trained-{kind}", {**CHAIN, "method": method})
    assert token_ids(llm.generate(material["prompts"], GREEDY, use_tqdm=False)) == expected
    assert acceptance_length(llm) == pytest.approx(offline, rel=0.08)
