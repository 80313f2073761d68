"""Recording of served requests (option ``record``): tokens and hidden states, on one engine."""

import os
import stat
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import WHOLE, make_prompts, runner_of, token_ids
from vllm_specplug.config import ConfigError
from vllm_specplug.cpu import recording
from vllm_specplug.cpu.recording import Recorder, make_recorder
from vllm_specplug.proposers.training import features
from vllm_specplug.proposers.training.recorded import answers_of, is_recorded, read_recorded, shard_files

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NO_TOKENS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Collector:
    """Takes answers in place of a ``ShardWriter``."""

    def __init__(self):
        self.failed, self.answers = False, []

    def add(self, answer):
        self.answers.append(answer)

    def close(self):
        pass


@pytest.fixture(scope="module")
def llm(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "ring"
    return engine("eagle", {"record": str(folder), **WHOLE}, block_size=32)


@pytest.fixture
def collected(llm, monkeypatch):
    """Answers that the engine records in this test."""
    runner, collector = runner_of(llm), Collector()
    monkeypatch.setattr(runner, "recorder", Recorder(runner, collector, 4))
    yield collector.answers
    llm.generate(make_prompts(1, 99), NO_TOKENS, use_tqdm=False)  # the worker hears of the last test's ends


def check(answers, checkpoints, expected):
    """Compare recorded answers with the expected token ids, and with the states that `specplug data` computes."""
    model = features._load_target(checkpoints["target"], torch.float32)
    by_ids = {tuple(ids): ids for ids in expected}
    assert len(answers) == len(expected)
    for answer in answers:
        whole = next(ids for ids in by_ids if list(ids[answer.first_position :]) == answer.ids)
        rows = torch.cat(answer.features)[: len(answer.ids)]  # a step may accept more tokens than the request takes
        assert len(answer.ids) - 1 <= len(rows)
        with torch.no_grad():
            states = model(torch.tensor([whole])).last_hidden_state[0]
        torch.testing.assert_close(rows, states[answer.first_position :][: len(rows)], rtol=2e-3, atol=2e-3)


def texts(prompts, outputs):
    return [prompt["prompt_token_ids"] + ids[0] for prompt, ids in zip(prompts, token_ids(outputs), strict=True)]


def flush(llm):
    """Let the worker hear of the requests that have ended."""
    llm.llm_engine.step()
    llm.generate(make_prompts(1, 98), SamplingParams(max_tokens=1, extra_args={"record": False}), use_tqdm=False)


def test_recorded_hidden_states_are_those_that_the_data_command_computes(llm, collected, checkpoints):
    prompts = make_prompts(6, 3)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    flush(llm)
    check(collected, checkpoints, texts(prompts, outputs))
    assert {answer.first_position for answer in collected} == {0}
    by_ids = {tuple(answer.ids): answer.prompt_length for answer in collected}
    assert [by_ids[tuple(text)] for text in texts(prompts, outputs)] == [
        len(one["prompt_token_ids"]) for one in prompts
    ]


def test_rows_that_the_prefix_cache_had_are_left_out(llm, collected, checkpoints):
    prompts = [{"prompt_token_ids": list(range(5, 105))}]
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    flush(llm)
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    flush(llm)
    assert again[0].num_cached_tokens > 32
    assert [answer.first_position for answer in collected] == [0, again[0].num_cached_tokens]
    assert collected[1].prompt_length == 100 - again[0].num_cached_tokens
    for answer, outputs in zip(collected, (first, again), strict=True):
        check([answer], checkpoints, texts(prompts, outputs))


def test_a_preempted_request_is_recorded_once_and_whole(llm, collected, checkpoints):
    prompts = make_prompts(4, 7)
    core = llm.llm_engine.engine_core.engine_core
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), prompt, GREEDY)
    outputs, steps = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    flush(llm)
    check(collected, checkpoints, [one["prompt_token_ids"] + outputs[str(i)] for i, one in enumerate(prompts)])


def test_answers_end_where_the_scheduler_ends_them(llm, collected, checkpoints):
    prompts = make_prompts(5, 11)
    free = token_ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    flush(llm)
    collected.clear()
    stop = free[0][0][9]
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, stop_token_ids=[stop])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    flush(llm)
    assert outputs[0].outputs[0].token_ids[-1] == stop
    check(collected, checkpoints, texts(prompts, outputs))


def test_requests_opt_out(llm, collected):
    prompts = make_prompts(8, 5)
    params = [SamplingParams(temperature=0, max_tokens=8, extra_args={"record": n % 2 == 0}) for n in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    flush(llm)
    assert sorted(answer.ids for answer in collected) == sorted(texts(prompts[::2], outputs[::2]))
    with pytest.raises(ConfigError, match="record must be true or false"):
        recording.wants_record({"record": "no"})


def test_a_request_that_does_not_fit_in_memory_is_left_out(llm, collected, monkeypatch):
    recorder = runner_of(llm).recorder
    room = recorder._room
    monkeypatch.setattr(recorder, "_room", 60)
    prompts = [{"prompt_token_ids": list(range(20, 50))}, {"prompt_token_ids": list(range(90, 120))}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    flush(llm)
    assert len(collected) == 1 and collected[0].ids in texts(prompts, outputs)
    assert recorder._room == 60 < room
    recorder._room = room


def test_the_option_records_to_its_folder_and_nothing_without_it(llm, engine, checkpoints):
    runner = runner_of(llm)
    folder = runner.speculative_config.specplug.record
    prompts = make_prompts(3, 21)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    flush(llm)
    runner.recorder.close()
    data = read_recorded(folder, 1 << 20)
    texts_recorded = [answer.ids for answer in answers_of(data)]
    assert all(text in texts_recorded for text in texts(prompts, outputs))
    assert is_recorded(folder)
    for file in shard_files(folder):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert runner_of(engine("eagle")).recorder is None


def test_a_folder_of_another_target_is_refused(llm, tmp_path):
    runner = runner_of(llm)
    settings = runner.speculative_config.specplug
    (tmp_path / "recorded.json").write_text('{"target": "other", "hidden_size": 8, "vocab_size": 9}')
    options = SimpleNamespace(method="eagle2", record=str(tmp_path), record_mib=16)
    assert settings.record != str(tmp_path)
    with pytest.raises(ConfigError, match="another target"):
        make_recorder(runner, options)
