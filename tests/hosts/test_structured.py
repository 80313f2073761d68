"""Structured output on real trees: plain decoding's tokens, with every kind of grammar."""

from __future__ import annotations

import json
import re

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.doubles import tiny
from tests.hosts.conftest import TREE, make_prompts
from tests.hosts.test_sampling import OPTIONS, check_same
from vllm_specplug.cpu.walk import SampledWalk

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"(ab|er|[a-e]{2,5}): [0-9]{1,12}(true|false)[a-zA-Z ]{4,40}"},
    "choice": {"choice": ["true story", "false alarm", "tabernacle", "a", "abersoon"]},
    "grammar": {"grammar": 'root ::= item ("," item){3,9} "."\nitem ::= [a-c] | "er" | "t" digits\ndigits ::= [0-9]+'},
}


@pytest.fixture(scope="module")
def start(engine, checkpoints):
    tiny.write_tokenizer(checkpoints["target"])
    speculative = {**TREE, "model": str(checkpoints["eagle"])}

    def make(ours: bool, **options):
        settings = {**OPTIONS, **options}
        return engine(**settings, **({"speculative_config": speculative} if ours else {}))

    return make


def both(start, params, **options):
    prompts = make_prompts(len(params), seed=8)
    return [start(ours, **options).generate(prompts, params, use_tqdm=False) for ours in (True, False)]


@pytest.fixture
def branching(monkeypatch):
    """For every tree walked: how many of its nodes have siblings, and how many were accepted."""
    seen = []
    honest = SampledWalk.__call__

    def counted(self, tree, *args):
        walk, output = honest(self, tree, *args)
        for parents, rows, emitted in zip(tree.parents.tolist(), tree.num_rows.tolist(), walk.num_emitted.tolist(),
                                          strict=True):  # fmt: skip
            used = parents[1:rows]
            seen.append((len(used) - len(set(used)), emitted - 1))
        return walk, output

    monkeypatch.setattr(SampledWalk, "__call__", counted)
    return seen


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_same_as_plain(start, branching, temperature, backend):
    """All kinds of grammars, and free requests, in one batch."""
    kinds = [*GRAMMARS, None]
    if backend == "guidance":
        kinds.remove("grammar")  # another dialect
    options = {} if backend == "xgrammar" else {"structured_outputs_config": {"backend": "guidance"}}
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=60, logprobs=1,
            structured_outputs=kind and StructuredOutputsParams(**GRAMMARS[kind]), ignore_eos=kind is None,
        )
        for i, kind in enumerate(kinds * 4)
    ]  # fmt: skip
    found, expected = both(start, params, **options)
    check_same(found, expected)
    for output, kind in zip(found, kinds * 4, strict=True):
        text, ended = output.outputs[0].text, output.outputs[0].finish_reason == "stop"
        if kind == "json" and ended:
            assert json.loads(text).keys() == {"name", "ok", "n"}
        if kind == "choice" and ended:
            assert text in GRAMMARS["choice"]["choice"]
        if kind == "regex" and ended:
            assert re.fullmatch(GRAMMARS["regex"]["regex"], text)
    assert sum(siblings > 0 and accepted > 0 for siblings, accepted in branching) > 10


def test_constrained_trees_branch_and_are_accepted(start, branching):
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=60, structured_outputs=StructuredOutputsParams(**GRAMMARS["json"])
        )
        for i in range(8)
    ]
    check_same(*both(start, params))
    assert sum(siblings > 0 and accepted > 0 for siblings, accepted in branching) > 5


def test_reasoning_is_free_and_what_follows_is_not(start):
    """The grammar begins after </think>, at any node of a tree."""
    options = {"reasoning_parser": "deepseek_r1", "reasoning_config": None}
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=40, logit_bias={tiny.PIECES.index("</think>") + 3: 4.0},
            structured_outputs=StructuredOutputsParams(regex=r"[0-9]{3,30}"),
        )
        for i in range(12)
    ]  # fmt: skip
    found, expected = both(start, params, **options)
    check_same(found, expected)
    ended = [output.outputs[0].text.split("</think>", 1)[-1] for output in found]
    assert sum(bool(re.fullmatch(r"[0-9]{3,30}", text)) for text in ended) > 3
