"""LoRA: requests are verified with their adapters, drafts come from the base model's drafter; tokens as plain's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.doubles import tiny
from tests.doubles.adapters import write_adapter
from tests.doubles.quantised import write_quantised
from tests.hosts.conftest import (
    ENGINE,
    MEDUSA,
    SEEDED,
    SWIFT,
    acceptance_length,
    counters,
    needs_avx512,
    needs_bytes,
    runner_of,
    token_ids,
)

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
#: One slot more than adapters: in mixed batches vLLM 0.32 gives rows without an adapter that of the last slot on a CPU.
LORA = {"enable_lora": True, "max_loras": 5, "max_lora_rank": 8, "block_size": 32}
EVERYWHERE = ("q_proj", "down_proj", "embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of linear layers, and one of embedding and LM head too."""
    root = tmp_path_factory.mktemp("adapters")
    modules = {"first": {}, "second": {}, "everywhere": {"modules": EVERYWHERE}}
    return [
        LoRARequest(name, number, str(write_adapter(root / name, seed=number, **more)))
        for number, (name, more) in enumerate(modules.items(), start=1)
    ]


@pytest.fixture(scope="module")
def mixed(adapters):
    """The adapter of each prompt; every fourth has none."""
    return [None, *adapters] * 4


@pytest.fixture(scope="module")
def plain(engine):
    return engine(**LORA)


@pytest.fixture(scope="module")
def expected(plain, prompts, mixed):
    return answers(plain, prompts, mixed)


@pytest.fixture(scope="module")
def medusa(checkpoints, prompts, expected, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    texts = [(p["prompt_token_ids"], a[0]) for p, a in zip(prompts[::4], expected[::4], strict=True)]
    features = tiny.extract_features(checkpoints["target"], texts, folder / "features")
    checkpoints["medusa-lora"] = tiny.write_medusa(folder / "medusa", checkpoints["target"], features)


def answers(llm, prompts, adapters, params=GREEDY):
    return token_ids(llm.generate(prompts, params, use_tqdm=False, lora_request=adapters))


def start(engine, speculative, target, **options):
    """An engine with this speculative config."""
    llm = LLM(str(target), speculative_config=speculative, **{**ENGINE, **LORA, **options})
    engine.kept.append(llm)
    return llm


def test_adapters_change_the_answers(plain, prompts, mixed, expected):
    """Else the other tests would show nothing.  Batches do not change them."""
    base = answers(plain, prompts, None)
    assert [one == other for one, other in zip(base, expected, strict=True)] == [True, False, False, False] * 4
    alone = [answers(plain, [prompt], [adapter])[0] for prompt, adapter in zip(prompts, mixed, strict=True)]
    assert alone == expected


@pytest.mark.parametrize("drafter", ["eagle", "reduced"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_same_as_plain(engine, plain, prompts, mixed, drafter, params):
    llm = engine(drafter, **LORA)
    before = counters(llm)
    assert answers(llm, prompts, mixed, params) == answers(plain, prompts, mixed, params)
    assert counters(llm)["draft_tokens"] > before["draft_tokens"]
    assert drafter != "eagle" or acceptance_length(llm, before) > 1.05


def test_the_drafter_reads_the_base_embedding(engine):
    runner = runner_of(engine("eagle", **LORA))
    embedding = runner.model.model.embed_tokens
    assert runner.drafter.model.model.embed_tokens is embedding.base_layer


def test_union(engine, checkpoints, prompts, mixed, expected):
    eagle = {"method": "eagle2", "model": str(checkpoints["eagle"]), "num_speculative_tokens": 12}
    union = {"method": "union", "sources": [eagle, {"method": "lookup"}], "num_speculative_tokens": 16}
    llm = start(engine, {**union, "budget": "fixed"}, checkpoints["target"])
    assert answers(llm, prompts, mixed) == expected
    assert answers(llm, prompts, mixed) == expected  # lookup finds the first answers, of every adapter
    assert acceptance_length(llm) > 1.05


def test_swift_drafts_with_the_adapter(engine, checkpoints, prompts, tmp_path, monkeypatch):
    """The target drafts, so that a request's adapter drafts with it; without it fewer drafts are accepted."""
    from vllm_specplug.cpu.drafters import swift as swift_v1

    deep = [LoRARequest("deep", 1, str(write_adapter(tmp_path / "deep", seed=1, num_layers=8))), None] * 8
    expected = answers(engine(target="deep", **LORA), prompts, deep)
    few = {**SWIFT, "optimise_share": 0.0, "skip_ratio": 0.15}
    llm = start(engine, few, target=checkpoints["deep"])
    assert answers(llm, prompts, deep) == expected
    with_adapters, before = acceptance_length(llm), counters(llm)
    nothing = torch.zeros(1, dtype=torch.int64)

    def without(runner, requests, rows_each):
        runner._set_active_loras(*[tuple(nothing.expand(len(requests) * rows_each).tolist())] * 2, set())

    monkeypatch.setattr(swift_v1, "map_adapters", without)
    assert answers(llm, prompts, deep) == expected
    assert acceptance_length(llm, before) < with_adapters - 0.2


@pytest.mark.parametrize("draft_vocabulary", [False, True])
def test_medusa(engine, checkpoints, prompts, mixed, expected, medusa, draft_vocabulary, tmp_path):
    """The heads use the base model's LM head, or rows of it."""
    name = "medusa-lora"
    if draft_vocabulary:
        tensors = load_file(checkpoints[name] / "model.safetensors")
        tensors["d2t"] = torch.arange(80)  # every second token
        config = json.loads((checkpoints[name] / "config.json").read_text()) | {"draft_vocab_size": 80}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        name = "medusa-lora-80"
        checkpoints[name] = tmp_path
    llm = engine(name, MEDUSA, **LORA)
    assert (runner_of(llm).drafter.heads._target_head is None) == draft_vocabulary
    before = counters(llm)
    assert answers(llm, prompts, mixed) == expected
    assert acceptance_length(llm, before) > (1.0 if draft_vocabulary else 1.1)


def test_preemption_and_prefix_hits(engine, plain, prompts, mixed):
    """Requests that continue their answers; the cache is keyed by adapter."""
    prompts, mixed = prompts[:8], mixed[:8]
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    first = answers(plain, prompts, mixed, long)
    llm = engine("eagle", **LORA, num_gpu_blocks_override=14)
    assert answers(llm, prompts, mixed, long) == first
    assert counters(llm)["preemptions"] > 0
    roomy = engine("eagle", **LORA)
    assert answers(roomy, prompts, mixed, long) == first
    grown = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer[0], 5]}
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    expected = answers(plain, grown, mixed)
    outputs = roomy.generate(grown, GREEDY, use_tqdm=False, lora_request=mixed)
    assert sum(output.num_cached_tokens for output in outputs) >= 8 * 32
    assert token_ids(outputs) == expected
    other = [*mixed[1:], mixed[0]]  # the same prompts with other adapters
    assert answers(roomy, grown, other) == answers(plain, grown, other)


def test_an_adapter_added_while_serving(engine, prompts, adapters, tmp_path):
    """And one that is removed, and loaded again when a request asks for it."""
    late = LoRARequest("late", 9, str(write_adapter(tmp_path / "late", seed=9)))
    wanted = [None, adapters[0], adapters[2], None]

    def serve(llm):
        core, finished = llm.llm_engine, {}
        for number, (prompt, adapter) in enumerate(zip(prompts, wanted, strict=False)):
            core.add_request(f"early-{number}", prompt, GREEDY, lora_request=adapter)
        for step in range(200):
            finished |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
            if step == 3:
                assert core.add_lora(late) and 9 in core.list_loras()
                for number in range(2):
                    core.add_request(f"late-{number}", prompts[number], GREEDY, lora_request=late)
            if step > 3 and not core.has_unfinished_requests():
                break
        assert core.remove_lora(9)
        finished["again"] = answers(llm, prompts[:1], [late])[0][0]
        return finished

    served, ours = serve(engine(**LORA)), serve(engine("eagle", **LORA))
    assert len(served) == 7 and served["late-0"] == served["again"]
    assert ours == served


@needs_avx512
@needs_bytes
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX texts in bfloat16 differ more often")
def test_on_quantised_weights_with_a_quantised_drafter(engine, checkpoints, prompts, mixed, tmp_path_factory):
    """vLLM's LoRA takes no W8A8 layers on a CPU."""
    root = tmp_path_factory.mktemp("quantised")
    checkpoints["lora-gptq"] = write_quantised(root, checkpoints["target"], "gptq")
    options = {"target": "lora-gptq", "dtype": "bfloat16", **LORA}
    plain, llm = engine(**options), engine("reduced", {"draft_int8": True}, **options)
    before, expected = counters(llm), answers(plain, prompts, mixed)
    assert [answers(plain, [prompts[i]], [mixed[i]])[0] for i in range(4)] == expected[:4]
    assert answers(llm, prompts, mixed) == expected
    assert acceptance_length(llm, before) > 1.05


def test_measured_budget(engine, checkpoints, prompts, mixed, expected):
    """Costs are measured with an adapter; the adapters of earlier requests are loaded again."""
    speculative = {"method": "eagle2", "model": str(checkpoints["eagle"]), "budget": "measured"}
    llm = start(engine, {**speculative, "num_speculative_tokens": 16}, checkpoints["target"])
    assert answers(llm, prompts, mixed) == expected
    serving = runner_of(llm).serving_budget
    assert serving.facts["lora_rank"] == 8
    serving._measure()
    assert answers(llm, prompts, mixed) == expected
