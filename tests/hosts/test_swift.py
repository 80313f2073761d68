"""SWIFT in the real engine: token identity, committed key/value, layer sets that change, and every refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import get_layers_from_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tests.doubles import tiny
from tests.hosts.conftest import ENGINE, GREEDY, SWIFT, answers_of, check_prefix_cache_hits, make_prompts, runner_of
from vllm_specplug.budget.planner import PLAIN
from vllm_specplug.core.tree_rows import CpuTreeRows, KvPages
from vllm_specplug.cpu import attention as hosts_attention
from vllm_specplug.cpu.drafters.layer_skipping import LayerSkipping
from vllm_specplug.cpu.kernels.tree_attention import tree_attention_reference, unpack_pages
from vllm_specplug.proposers.swift.layer_set import LayerSet
from vllm_specplug.proposers.swift.search import LayerSearch

LAYERS = 8


@pytest.fixture(scope="session")
def target(checkpoints):
    """A target of eight layers, some of which add nothing."""
    return checkpoints["deep"]


@pytest.fixture(scope="session")
def start(engine, target):
    """``start(changes, **engine_options)``: an engine with SWIFT, or a plain one for None, kept for the session."""
    engine()  # before the others: the newest engine owns the process's metrics
    started = {}

    def make(changes, **options):
        key = json.dumps([changes, options], sort_keys=True)
        if key not in started:
            speculative = {} if changes is None else {"speculative_config": {**SWIFT, **changes}}
            started[key] = LLM(str(target), **speculative, **{**ENGINE, **options})
            engine.kept.append(started[key])
        return started[key]

    return make


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(24, seed=4)


def drafter_of(llm):
    return runner_of(llm).drafter


# ---- exactness


def test_greedy_and_the_set_changes_while_requests_run(start, prompts, monkeypatch):
    llm, plain = start({}), start(None)
    wanted = answers_of(plain, prompts, GREEDY)
    assert answers_of(llm, prompts, GREEDY) == wanted
    state = drafter_of(llm).state
    search = state.search
    assert state.acceptance.tokens_per_step > 1.5 and search.all_steps > 20  # candidates were scored between the steps
    others = cycle([LayerSet(LAYERS, (1, 2, 6), (4,)), LayerSet(LAYERS, (), (1, 2, 3)), search.best])
    propose, used = drafter_of(llm).propose, set()

    def change(*args, **kwargs):
        search.best = next(others)
        used.add(search.best)
        return propose(*args, **kwargs)

    monkeypatch.setattr(drafter_of(llm), "propose", change)
    assert answers_of(llm, prompts, GREEDY) == wanted
    assert len(used) == 3 and runner_of(llm)._draft_guard.failures == 0


@pytest.mark.wide
def test_seeded_sampling(start, prompts):
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))
    ]
    wanted = answers_of(start(None), prompts, params)
    assert answers_of(start({}), prompts, params) == wanted


@pytest.mark.wide
def test_torch_compile(start, prompts):
    """The verification keeps the compiled graph; no set of layers is compiled for."""
    from torch._dynamo.utils import counters

    llm = start({}, enforce_eager=False)
    wanted = answers_of(start(None), prompts[:12], GREEDY)
    llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    before, search = counters["stats"]["unique_graphs"], drafter_of(llm).state.search
    first = search.all_steps
    assert answers_of(llm, prompts[:12], GREEDY) == wanted
    assert search.all_steps > first + 5 and runner_of(llm)._draft_guard.failures == 0
    assert before > 0 and counters["stats"]["unique_graphs"] == before


@pytest.mark.wide
def test_prefix_cache_hits_and_chunked_prefill(start, prompts):
    llm = start({}, block_size=32, max_num_batched_tokens=48, max_num_seqs=2)
    check_prefix_cache_hits(start(None, block_size=32), llm, prompts[:4])


@pytest.mark.wide
def test_running_into_max_model_len(start, prompts):
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    wanted = answers_of(start(None), prompts[:6], endless)
    llm = start({})
    assert answers_of(llm, prompts[:6], endless) == wanted
    assert runner_of(llm)._draft_guard.failures == 0


# ---- committed key/value


def committed(llm, prompt, num_tokens):
    """Token ids and the pages' content of every layer after ``num_tokens`` of the answer, and draft rounds so far."""
    engine, runner = llm.llm_engine, runner_of(llm)
    engine.add_request("kv", prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    count = len(prompt["prompt_token_ids"]) + num_tokens
    while not (runner.input_batch.num_reqs and runner.input_batch.num_tokens_no_spec[0] > count):
        engine.step()
    table, found = runner.input_batch.block_table[0].get_device_tensor(1)[0].long(), {}
    for name, layer in attention(llm).items():
        pages = layer.kv_cache[table[: -(-count // layer.kv_cache.shape[2])]]
        found[name] = torch.stack(unpack_pages(pages, layer.isa))[:, :, :count].clone()
    token_ids = runner.input_batch.token_ids_cpu[0, :count].tolist()
    engine.abort_request(["kv"])
    while engine.has_unfinished_requests():
        engine.step()
    return token_ids, found


def attention(llm):
    return get_layers_from_vllm_config(llm.llm_engine.vllm_config, AttentionLayerBase)


@pytest.fixture
def rounded_attention(start, monkeypatch):
    """Plain decoding and SWIFT with all attention in float64, rounded once, and the host's linear layers: the host's
    kernels and ours sum in different orders otherwise."""
    options = {
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": 4 << 20,
    }  # few pages to convert
    engines = [start(changes, **options) for changes in (None, {"linear_rows": 0})]

    def compute(query, output, pages, tree, key, value, *rest):
        exact = torch.zeros(output.shape, dtype=torch.float64)
        cache, query, key, value = (t.double().nan_to_num() for t in (pages.kv_cache, query, key, value))
        tree_attention_reference(query, exact, pages._replace(kv_cache=cache), tree, key, value, *rest)
        output.copy_(exact)

    def forward(impl, layer, query, key, value, kv_cache, attn_metadata, output, *_, **__):
        if attn_metadata is None:
            return output
        start = attn_metadata.query_start_loc
        lens = start.diff()
        width = int(lens.max())
        mask = torch.ones(len(lens), width, width, dtype=torch.bool).tril()
        tree = CpuTreeRows(
            context_lens=attn_metadata.seq_lens - lens,
            query_start=start[:-1],
            query_lens=lens,
            tree_start=start[:-1],
            tree_lens=lens,
            mask=mask,
        )
        pages = KvPages(kv_cache, attn_metadata.block_table, layer.isa)
        compute(query, output, pages, tree, key, value, impl.scale)
        return output

    monkeypatch.setattr(hosts_attention.TreeAttentionImpl, "computes_all_rows", False)
    monkeypatch.setattr(hosts_attention, "tree_attention", compute)
    monkeypatch.setattr(hosts_attention.CPUAttentionBackendImpl, "forward", forward)
    return engines


def test_committed_kv_is_plain_decodings(prompts, rounded_attention):
    """Bit by bit, in every layer, after many rounds of drafting and scoring."""
    plainly, swift = rounded_attention
    for prompt in prompts[:2]:
        plain_ids, plain = committed(plainly, prompt, 90)
        ids, found = committed(swift, prompt, 90)
        assert ids == plain_ids and found.keys() == plain.keys() and len(found) == LAYERS
        for name, content in found.items():
            assert torch.equal(content, plain[name]), name
    state = drafter_of(swift).state
    assert state.acceptance.rounds > 30 and state.search.all_steps > 30


def test_drafting_and_scoring_change_no_page(start, prompts, monkeypatch):
    """Every byte of every page stays, committed or not."""
    llm = start({})
    drafter, layers, checked = drafter_of(llm), list(attention(llm).values()), []

    def watched(name):
        call = getattr(drafter, name)

        def wrapper(*args, **kwargs):
            before = [layer.kv_cache.clone() for layer in layers]
            result = call(*args, **kwargs)
            checked.append(name)
            assert all(torch.equal(a, layer.kv_cache) for a, layer in zip(before, layers, strict=True))
            return result

        monkeypatch.setattr(drafter, name, wrapper)

    failures = runner_of(llm)._draft_guard.failures
    for name in ("propose", "_matchness"):
        watched(name)
    llm.generate(prompts[:2], GREEDY, use_tqdm=False)
    assert {"propose", "_matchness"} <= set(checked) and runner_of(llm)._draft_guard.failures == failures


# ---- layers left out


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", *(pytest.param(name, marks=pytest.mark.wide) for name in ("mistral", "qwen2"))]
)
def test_families(engine, family, tmp_path_factory, prompts, monkeypatch):
    """Without sub-layers that add nothing the target's tokens stay; without others they do not."""
    path = tmp_path_factory.mktemp("families") / family
    tiny.write_target(path, num_layers=6, redundant={"attention": (1, 3), "mlp": (3, 4)}, family=family)
    settings = {**ENGINE, "kv_cache_memory_bytes": 16 << 20}
    llm = LLM(str(path), speculative_config={**SWIFT, "skip_ratio": 0.5}, **settings)
    engine.kept.append(llm)
    drafter, scores = drafter_of(llm), {LayerSet(6, (1, 3), (3, 4)): [], LayerSet(6, (2, 4), (1, 2)): []}

    @torch.inference_mode()
    def score(*_):
        batch = drafter.runner.input_batch
        start = int(batch.num_tokens_no_spec[0]) - 9
        if start >= batch.num_prompt_tokens[0]:
            for layer_set, found in scores.items():
                found.append(drafter._matchness(layer_set, 0, start))

    monkeypatch.setattr(drafter, "_optimise", score)
    llm.generate(prompts[:4], GREEDY, use_tqdm=False)
    redundant, others = scores.values()
    assert len(redundant) > 5 and min(redundant) == 1.0 and sum(others) < 0.95 * len(others)
    assert runner_of(llm)._draft_guard.failures == 0


@pytest.mark.wide
def test_redundant_layers_are_found_while_serving(start, prompts):
    """The search leaves out what adds nothing, and acceptance rises."""
    # The last swap is a random one of about 200, and how often the Gaussian process helps depends on the time left: 14
    # searches took 42 to 434 steps and up to 14 calls, one took more than 1000 steps.
    llm = start({"skip_ratio": 5 / 12}, enable_prefix_caching=False)
    drafter = drafter_of(llm)
    state = drafter.state
    state.search = LayerSearch(replace(state.options, max_steps=4000, patience=4000))
    before = state.search.best
    for _ in range(150):
        llm.generate(prompts, GREEDY, use_tqdm=False)
        if drafter.state.search.stopped:
            break
    search = drafter.state.search
    assert search.best != before and search.matchness > search.history[0][1]
    assert "matchness above" in search.stopped
    assert len(set(search.best.attention) & {3, 5}) + len(set(search.best.mlp) & {2, 3, 5}) >= 4


# ---- state, switching off, refusals


def test_state_is_kept(start, prompts, tmp_path, target, engine):
    path = tmp_path / "state.json"
    llm = start({"swift_state": str(path)})
    llm.generate(prompts[:8], GREEDY, use_tqdm=False)
    state = drafter_of(llm).state
    state.save(str(path))
    options = {**SWIFT, "swift_state": str(path)}
    again = LLM(str(target), speculative_config=options, **ENGINE)
    engine.kept.append(again)
    assert drafter_of(again).state.search.best == state.search.best
    assert drafter_of(again).state.search.all_steps == state.search.all_steps > 0


def test_switches_itself_off(start, prompts, monkeypatch):
    """With a measured budget and drafts that cost more than they give, requests decode plainly."""
    llm = start({"budget": "measured", "min_confidence": 0.0, "skip_ratio": 0.1})
    wanted = answers_of(start(None), prompts, GREEDY)
    budget = runner_of(llm).serving_budget.budget
    assert answers_of(llm, prompts, GREEDY) == wanted
    # Drafts look a thousand times as long as a step, whatever a busy machine measures.
    worth_of = budget.worth_of
    monkeypatch.setattr(budget, "worth_of", lambda *args: replace(worth_of(*args), cost=1e3))
    rounds = drafter_of(llm).state.acceptance.rounds
    assert answers_of(llm, prompts, GREEDY) == wanted
    assert budget.planner.regime.arm is PLAIN
    assert drafter_of(llm).state.acceptance.rounds - rounds < 40


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"skip_ratio": 0.01}, {}, "raise skip_ratio"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_refused_before_the_engine_starts(target, changes, options, message):
    args = EngineArgs(str(target), speculative_config={**SWIFT, **changes}, **{**ENGINE, **options})
    with pytest.raises(ValueError, match=message):
        args.create_engine_config()


def test_architectures_are_refused_by_name():
    class OlmoForCausalLM(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="cannot leave out layers of OlmoForCausalLM"):
        LayerSkipping(OlmoForCausalLM())
