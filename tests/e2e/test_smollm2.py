"""Token identity on the real model, through the multi-process engine, float32."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.doubles.forked import answer_in_new_process
from tests.host_versions import comparable
from vllm_specplug.config import resolve_drafter
from vllm_specplug.proposers.medusa.calibrate import calibrate
from vllm_specplug.proposers.medusa.ranks import load_for_ranking, rank_answers
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.features import extract, load_features, target_head

#: On the first conversations.  Every parameter is tested on the tiny model; here are those that act on real texts.
SAMPLING = {
    "greedy": {"temperature": 0.0, "max_tokens": 32, "conversations": 8},
    "temperature 0.7": {"temperature": 0.7, "max_tokens": 24},
    "stop": {"temperature": 0.8, "stop": [".", "\n"]},
    "regex": {"temperature": 0.0, "structured_outputs": {"regex": "(Yes|No|Maybe), because [a-z ]{5,60}\\."}},
    "all together": {
        "temperature": 0.8, "top_p": 0.95, "top_k": 60, "min_p": 0.02, "repetition_penalty": 1.1,
        "logit_bias": {28: 1.0}, "bad_words": [" is"], "min_tokens": 8,
    },
}  # fmt: skip
SAMPLING = {name: {"max_tokens": 16, "conversations": 4} | params for name, params in SAMPLING.items()}
EAGLE2 = {"method": "eagle2", "model": "smollm2-135m-instruct"}
MEDUSA = {"method": "medusa", "model": "smollm2-135m-instruct"}

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")

pytestmark = pytest.mark.smollm2


def program(engine: dict, conversations: list, seeds: list[int], sampling: dict[str, dict]) -> dict[str, dict]:
    """Answer the conversations with each of the sampling parameters, in a process of its own.

    Args:
        engine: options of ``LLM``.
        conversations: chats without answers.
        seeds: one for each conversation.
        sampling: by name; ``conversations`` among them is the number to be answered, instead of all.

    Returns:
        ``answers``: token ids, and ``tau``, 0 where nothing was drafted; both by name of the sampling parameters.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(**engine)
    answers, tau, before = {}, {}, Counter()
    for name, all_params in sampling.items():
        params = dict(all_params)
        chosen = conversations[: params.pop("conversations", None)]
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        each = [SamplingParams(**params, seed=seed) for seed in seeds[: len(chosen)]]
        outputs = llm.chat(chosen, each, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
        now = Counter({metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")})
        drafts, accepted = (now[key] - before[key] for key in COUNTERS)
        before, tau[name] = now, drafts and 1 + accepted / drafts
    return {"answers": answers, "tau": tau}


@pytest.fixture(scope="module")
def answer(smollm2, conversations, tmp_path_factory):
    """Answer the conversations at ``places``, each with its place as its seed."""

    def answer(sampling: dict, places: slice = slice(None), **options) -> dict:
        engine = {
            "model": smollm2,
            "dtype": "float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": 512 << 20,
            **options,
        }
        seeds = range(len(conversations))
        request = engine, conversations[places], list(seeds[places]), sampling
        folder = tmp_path_factory.mktemp("engine")
        return answer_in_new_process(program, "vllm_specplug.cpu.worker", folder, *request)

    return answer


@pytest.fixture(scope="module")
def plain(answer):
    return answer(SAMPLING, max_num_seqs=8)["answers"]


def check_same(found: dict, plain: dict, name: str, places: slice = slice(None)) -> None:
    """Compare with plain vLLM's answers to the conversations at ``places``."""
    stops, expected = "stop" in SAMPLING[name], plain[name][places]
    answers = zip(found["answers"][name], expected, strict=True)
    assert [comparable(one, other, stops) for one, other in answers] == expected, name


def test_batch_of_8(answer, plain):
    # A fixed budget: whether drafting pays at this batch size depends on the machine.  Small trees: 72 rows a step.
    fixed = {**EAGLE2, "budget": "fixed", "num_speculative_tokens": 8, "draft_depth": 4}
    found = answer(SAMPLING, max_num_seqs=8, speculative_config=fixed)
    for name in SAMPLING:
        check_same(found, plain, name)
    assert found["tau"]["greedy"] > 1.6 and min(found["tau"].values()) > 1.2, found["tau"]


@pytest.mark.wide
def test_medusa(smollm2, conversations, answer, tmp_path):
    """A tree calibrated on half of the answers is served for the other half: the same tokens, and the tau foretold."""
    transformers = pytest.importorskip("transformers")
    sampling = {"greedy": {**SAMPLING["greedy"], "conversations": 16}}
    plain = answer(sampling, max_num_seqs=8)["answers"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in conversations]
    answers = [Answer("test", p, a) for p, a in zip(prompts, plain["greedy"], strict=False)]
    data = load_features(extract(smollm2, answers[::2], tmp_path, progress=False))
    heads, lm_head, ids = load_for_ranking(resolve_drafter(MEDUSA["model"], "medusa"), target_head(smollm2)[2])
    result = calibrate(rank_answers(heads, data, lm_head, ids), budget=16, prior=30.0)
    tree = {"tree": result["medusa_choices"], "num_speculative_tokens": 16, "budget": "fixed"}
    places = slice(1, 16, 2)
    found = answer(sampling, places, max_num_seqs=8, speculative_config=MEDUSA | tree)
    check_same(found, plain, "greedy", places)
    assert found["tau"]["greedy"] == pytest.approx(result["expected_tau"][-1], rel=0.15)
    assert found["tau"]["greedy"] > 1.2
