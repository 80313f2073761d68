"""Every sampling parameter, greedy and seeded, with every kind of method: the same answers as plain vLLM."""

from __future__ import annotations

import math
import pickle

import pytest
from scipy.stats import chi2
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.sampler import Sampler

from tests.doubles import tiny
from tests.host_versions import comparable
from tests.hosts.conftest import SWIFT, TREE, make_prompts, some, token_ids
from vllm_specplug.cpu.runner import TreeCPUModelRunner
from vllm_specplug.cpu.walk import SampledWalk

METHODS = ("eagle2", "medusa", "union", "swift")
#: Of a method that leaves layers out, the others have the small one.
TARGETS = {"swift": "deep"}
STOPS = {"ignore_eos": False, "stop_token_ids": list(range(40, 46))}
#: Alone with temperature 0, and with 0.8 and a seed.
PARAMETERS = {
    "nothing else": {},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.2},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": {7: 3.0, 9: -4.0, 30: 2.0}},
    "bad_words": {"bad_words": ["a", "e", "t!", "5", "true", "er", "K"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 60))},
    "stop_token_ids": STOPS,
    "min_tokens": {**STOPS, "min_tokens": 12},
    "eos": {"ignore_eos": False, "logit_bias": {2: 3.5}},
    "stop": {"stop": ["e", "1", "Q", "ab", "unused13"]},
    "stop, included": {"stop": ["T", "3", "L", "unused12"], "include_stop_str_in_output": True},
    "n": {"n": 3},
    "logprobs 0": {"logprobs": 0},
    "logprobs 3": {"logprobs": 3, "top_p": 0.9},
    "logprobs -1": {"logprobs": -1},
    "logprob_token_ids": {"logprob_token_ids": [5, 50, 120]},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "custom logits processor": {"extra_args": {"avoid": 9}},
    "thinking budget": {"thinking_token_budget": 5, "logit_bias": {105: 2.5}},
    "all together": {
        "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {7: 1.0}, "bad_words": ["a", "t!"], "min_tokens": 5, **STOPS,
        "logprobs": 2, "extra_args": {"avoid": 4},
    },
}  # fmt: skip
#: Batches of requests with this parameter alone: the walk or vLLM's output differs there.  The others with ``-m wide``.
ALONE = (
    "nothing else", "top_k and top_p", "min_p", "repetition_penalty", "logit_bias", "eos", "stop", "n", "logprobs 3",
    "logprobs -1", "logprob_token_ids", "prompt_logprobs", "custom logits processor", "all together",
)  # fmt: skip
OPTIONS = {
    "skip_tokenizer_init": False,
    "max_logprobs": 200,
    "logits_processors": ["tests.doubles.processors:Avoid"],
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}


def parameters(changes: dict, index: int, temperature: float = 0.8) -> SamplingParams:
    settings = {"max_tokens": 30, "ignore_eos": True, "seed": 1000 + index, "temperature": temperature}
    return SamplingParams(**{**settings, **changes})


@pytest.fixture(scope="module")
def start(engine, checkpoints, tmp_path_factory):
    """``start(method)``: an engine of the method, or plain decoding of a target, all with a tokenizer."""
    for target in ("target", "deep"):
        tiny.write_tokenizer(checkpoints[target])
    plain = engine(**OPTIONS)
    prompts = make_prompts(16, seed=3)
    outputs = token_ids(plain.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    texts = [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in zip(prompts, outputs, strict=True)]
    root = tmp_path_factory.mktemp("medusa")
    features = tiny.extract_features(checkpoints["target"], texts, root / "features")
    heads = tiny.write_medusa(root / "heads", checkpoints["target"], features)
    eagle = {**TREE, "model": str(checkpoints["eagle"])}
    source = {key: value for key, value in eagle.items() if key != "budget"}  # the union has it
    speculative = {
        "eagle2": eagle,
        "medusa": {"method": "medusa", "model": str(heads), "num_speculative_tokens": 20},
        "union": {"method": "union", "sources": [source, {"method": "lookup"}], "num_speculative_tokens": 20},
        "swift": SWIFT | {"optimise_share": 0.02},
    }

    def make(method: str | None = None, target: str = "target"):
        if method is None:
            return engine(target=target, **OPTIONS)
        return engine(target=TARGETS.get(method, target), **OPTIONS, speculative_config=speculative[method])

    return make


@pytest.fixture(scope="module")
def plain_outputs(start):
    """``plain_outputs(prompts, params, method)``: plain decoding of the method's target, computed once for all."""
    known = {}

    def answer(prompts, params, method=None):
        target = TARGETS.get(method, "target")
        key = pickle.dumps((prompts, params, target))  # their repr leaves out some
        if key not in known:
            known[key] = start(target=target).generate(prompts, params, use_tqdm=False)
        return known[key]

    return answer


def check_same(outputs, expected, loose_ranks=False, rounding=1e-4):
    """Tokens, texts, how they ended, and all log probabilities."""
    for output, reference in zip(outputs, expected, strict=True):
        check_same_logprobs(output.prompt_logprobs, reference.prompt_logprobs, loose_ranks, rounding)
        for found, wanted in zip(output.outputs, reference.outputs, strict=True):
            stopped = isinstance(wanted.stop_reason, str)
            assert comparable(list(found.token_ids), wanted.token_ids, stopped) == list(wanted.token_ids)
            assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
            assert found.stop_reason == wanted.stop_reason
            logprobs = found.logprobs and comparable(found.logprobs, wanted.token_ids, stopped)
            check_same_logprobs(logprobs, wanted.logprobs, loose_ranks, rounding)


def check_same_logprobs(found, wanted, loose_ranks, rounding):
    if wanted is None:
        assert found is None
        return
    for one, other in zip(found, wanted, strict=True):
        if other is None:  # the first token of a prompt
            assert one is None
            continue
        assert one.keys() == other.keys()
        for token_id in other:
            # Over the whole vocabulary, tokens nearly equal may swap places by rounding.
            assert abs((one[token_id].rank or 0) - (other[token_id].rank or 0)) <= (2 if loose_ranks else 0)
            assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=rounding)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", some(PARAMETERS, ALONE))
def test_same_as_plain(start, plain_outputs, name, temperature):
    """With one method: all share the walk, and ``test_mixed_batch`` asks each for every parameter."""
    if name == "n" and temperature == 0:
        pytest.skip("the host refuses n > 1 at temperature 0")
    prompts = make_prompts(5, seed=3)
    params = [parameters(PARAMETERS[name], i, temperature) for i in range(len(prompts))]
    outputs = start("eagle2").generate(prompts, params, use_tqdm=False)
    check_same(outputs, plain_outputs(prompts, params), name == "logprobs -1")


@pytest.fixture
def tokens_per_tree(emitted):
    """Mean over the trees of this test."""
    return lambda: sum(emitted) / len(emitted)


@pytest.mark.parametrize("method", METHODS)
def test_mixed_batch(start, plain_outputs, tokens_per_tree, method):
    """Requests of every kind in one batch, some greedy, some seeded; trees are accepted."""
    # Those two shape the host's output of the whole batch.
    kinds = [PARAMETERS[name] for name in PARAMETERS if name not in ("logprobs -1", "logprob_token_ids")] * 2
    prompts = make_prompts(len(kinds), seed=5)
    params = [parameters(changes, i, 0.8 if i % 3 else 0.0) if "n" not in changes else parameters(changes, i)
              for i, changes in enumerate(kinds)]  # fmt: skip
    llm = start(method)
    # SWIFT's target has four times the layers to round in.
    rounding = 3e-4 if method in TARGETS else 1e-4
    check_same(llm.generate(prompts, params, use_tqdm=False), plain_outputs(prompts, params, method), rounding=rounding)
    assert tokens_per_tree() > 1.05  # else trees would not have been exercised


@pytest.mark.parametrize("method", METHODS)
def test_speculation_off_for_one_request(start, plain_outputs, tokens_per_tree, monkeypatch, method):
    """Every other request is decoded plainly, the rest with trees; the answers stay."""
    plainly = []
    honest = TreeCPUModelRunner._keep

    def remembered(self, draft):
        flat = honest(self, draft)
        params = [self.requests[req_id].sampling_params for req_id in self.input_batch.req_ids]
        plainly.extend((p.extra_args is not None, bool(one)) for p, one in zip(params, flat, strict=True))
        return flat

    monkeypatch.setattr(TreeCPUModelRunner, "_keep", remembered)
    prompts = make_prompts(8, seed=3)
    params = [parameters({"extra_args": {"speculation": False}} if i % 2 else {}, i, 0.0) for i in range(8)]
    check_same(start(method).generate(prompts, params, use_tqdm=False), plain_outputs(prompts, params, method))
    assert (True, False) in plainly and (False, True) in plainly and (True, True) not in plainly
    with pytest.raises(VLLMValidationError, match="speculation must be true or false, not 'maybe'"):
        start(method).generate(prompts[:1], parameters({"extra_args": {"speculation": "maybe"}}, 0))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_modes(start, mode, monkeypatch):
    """The other modes are checked on the running engines, whose samplers are exchanged."""
    kinds = [{"logprobs": 3, "top_k": 9, "repetition_penalty": 1.3}, {"logprobs": 2, "prompt_logprobs": 1}]
    prompts = make_prompts(6, seed=3)
    params = [parameters(kinds[i % 2], i, 0.8 if i % 3 else 0.0) for i in range(len(prompts))]
    outputs = []
    for method in (None, "eagle2"):
        runner = start(method).llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        monkeypatch.setattr(runner, "sampler", Sampler(logprobs_mode=mode))
        monkeypatch.setattr(runner.model_config, "logprobs_mode", mode)
        outputs.append(start(method).generate(prompts, params, use_tqdm=False))
    check_same(outputs[1], outputs[0])
    found = [
        logprob.logprob for output in outputs[1] for place in output.outputs[0].logprobs for logprob in place.values()
    ]
    assert (max(found) > 0) == mode.endswith("logits")  # the mode was in force


def test_stops_fall_inside_accepted_paths(start, monkeypatch):
    """Some answers above end in the middle of what one step emitted."""
    cut = []
    honest = SampledWalk.__call__

    def counted(self, tree, *args):
        walk, output = honest(self, tree, *args)
        tokens = walk.output_token_ids
        cut.extend((((tokens >= 40) & (tokens <= 45))[:, :-1] & (tokens[:, 1:] >= 0)).flatten().tolist())
        return walk, output

    monkeypatch.setattr(SampledWalk, "__call__", counted)
    params = [parameters({**PARAMETERS["stop_token_ids"]}, i, 0.0) for i in range(16)]
    start("eagle2").generate(make_prompts(16, seed=3), params, use_tqdm=False)
    assert any(cut)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_seeds_and_parameters_matter(plain_outputs, temperature):
    """Control: other seeds and every parameter change the answers, so that the identities above are not trivial."""
    prompts = make_prompts(5, seed=3)

    def answers(changes):
        return token_ids(plain_outputs(prompts, [parameters(changes, i, temperature) for i in range(5)]))

    usual = answers({})
    idle = {name for name in PARAMETERS if "logprob" in name} - {"logprobs 3"} | {"nothing else"}
    if temperature == 0:
        idle |= {"top_k", "top_p", "top_k and top_p", "min_p", "n", "logprobs 3"}
    assert [name for name in PARAMETERS if name not in idle and answers(PARAMETERS[name]) == usual] == []
    assert (answers({"seed": 7}) != usual) == (temperature > 0)


def test_unseeded_sampling_follows_the_target(start):
    """Chi-square of the first two tokens without seeds, against the target's own probabilities."""
    prompt = make_prompts(1, seed=11)[0]
    count, top_k = 800, 4
    llm = start("eagle2")
    params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=3, ignore_eos=True, n=count)
    seen: dict[tuple[int, int], int] = {}
    for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
        pair = tuple(sample.token_ids[1:3])
        triple = (sample.token_ids[0], *pair)
        seen[triple] = seen.get(triple, 0) + 1

    plain = start()
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=top_k)

    def distribution(history: list[int]) -> dict[int, float]:
        output = plain.generate([{"prompt_token_ids": prompt["prompt_token_ids"] + history}], one, use_tqdm=False)
        weights = {t: math.exp(entry.logprob) for t, entry in output[0].outputs[0].logprobs[0].items()}
        total = sum(weights.values())
        return {t: weight / total for t, weight in weights.items()}

    expected: dict[tuple[int, ...], float] = {}
    for a, p in distribution([]).items():
        for b, q in distribution([a]).items():
            for c, r in distribution([a, b]).items():
                expected[a, b, c] = p * q * r
    assert set(seen) <= set(expected)
    statistic = rest = seen_rest = 0.0
    cells = 0
    for triple, probability in expected.items():
        if probability * count < 5:
            rest, seen_rest = rest + probability * count, seen_rest + seen.get(triple, 0)
            continue
        statistic += (seen.get(triple, 0) - probability * count) ** 2 / (probability * count)
        cells += 1
    if rest >= 5:
        statistic += (seen_rest - rest) ** 2 / rest
        cells += 1
    assert chi2.sf(statistic, cells - 1) > 1e-4
