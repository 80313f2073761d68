"""Measures typical acceptance: tau and the likelihood of the answers, by its limits.

    SPECPLUG_QUESTIONS=spec_bench.jsonl python -m pytest -s benchmarks/end_to_end/test_typical.py

One engine with Medusa heads for SmolLM2 and ``"verification": "typical"``; every row is a temperature and an epsilon
set per request (delta is its square root, as the paper sets it).  "exact" are limits that nothing exceeds: the
target's own distribution.  Read ``extra_info.rows``: tau, and the mean log-likelihood of the answers' tokens under the
target at temperature 1.  SPECPLUG_TYPICAL=FILE writes the rows with their provenance.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from vllm_specplug.bench.methods import METHODS, Method
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.bench.workers import Worker
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.utils.tables import format_table

TEMPERATURES = (0.7, 1.0)
EPSILONS = (None, 0.3, 0.09, 0.03, 0.01)
NUM_QUESTIONS, MAX_TOKENS = 20, 64
EXACT = {"typical_epsilon": 1.0, "typical_delta": 1e6}


@pytest.fixture
def questions():
    file = os.environ.get("SPECPLUG_QUESTIONS")
    if not file:
        pytest.skip("set SPECPLUG_QUESTIONS to a file of questions")
    return read_questions(Path(file), NUM_QUESTIONS)


@torch.no_grad()
def mean_log_likelihood(model, tokenizer, questions, answers: list[list[int]]) -> float:
    total, count = 0.0, 0
    for question, answer in zip(questions, answers, strict=True):
        messages = [{"role": "user", "content": question.text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompt = prompt[: 2048 - MAX_TOKENS]  # as the worker truncates it
        # Logits of the answer only: those of a long prompt would take most of the time.
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1].float()
        total += logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).sum().item()
        count += len(answer)
    return total / count


def test_trade_off(benchmark, questions, tmp_path):
    transformers = pytest.importorskip("transformers")
    target = str(prepare())
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    engine = {"model": target, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8}
    engine |= {"enable_prefix_caching": False, "disable_log_stats": False}
    worker = Worker(Method("medusa", METHODS["medusa"] | {"verification": "typical"}), engine, 1, tmp_path / "log")
    rows = []

    def measure():
        worker.receive()
        for temperature in TEMPERATURES:
            for epsilon in EPSILONS:
                limits = EXACT if epsilon is None else {"typical_epsilon": epsilon, "typical_delta": epsilon**0.5}
                sampling = {"temperature": temperature, "seed": 1, "extra_args": limits}
                found = worker.generate(questions, MAX_TOKENS, sampling=sampling)
                rows.append(
                    {
                        "temperature": temperature,
                        "epsilon": epsilon,
                        "tau": round(1 + found.accepted / found.drafts, 3),
                        "log_likelihood": round(mean_log_likelihood(model, tokenizer, questions, found.token_ids), 3),
                        "tokens": found.tokens,
                    }
                )

    try:
        benchmark.pedantic(measure, rounds=1)
    finally:
        worker.kill()
    facts = provenance(baseline="exact verification, same run") | {"questions": NUM_QUESTIONS, "rows": rows}
    benchmark.extra_info.update(facts)
    if file := os.environ.get("SPECPLUG_TYPICAL"):
        Path(file).write_text(json.dumps(facts, indent=1) + "\n")
    cells = [
        [str(r["temperature"]), str(r["epsilon"] or "exact"), f"{r['tau']:.2f}", f"{-r['log_likelihood']:.3f}"]
        for r in rows
    ]
    print("\n" + format_table(["temperature", "epsilon", "tau", "-log-likelihood"], cells))
