"""What a step gives to the recorder, and what becomes of it when a request ends; with a stand-in for the runner."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specplug.cpu import recording
from vllm_specplug.cpu.draft import AcceptedRows
from vllm_specplug.cpu.recording import Recorder

WIDTH = 2


class Writer:
    """Takes answers in place of a ``ShardWriter``."""

    def __init__(self):
        self.failed, self.answers = False, []

    def add(self, answer):
        self.answers.append(answer)


class Runner:
    """Runs requests whose hidden state at position p of request r is (r, p); rejected rows have (-1, -1)."""

    def __init__(self):
        self.requests, self.numbers = {}, {}
        self.writer = Writer()
        self.recorder = Recorder(self, self.writer, 4)

    def add(self, req_id, prompt, output, **changes):
        params = {"extra_args": None, "stop_token_ids": [], "ignore_eos": False, "eos_token_id": 2}
        params |= {"max_tokens": 100, "min_tokens": 0, **changes.pop("params", {})}
        fields = {"mm_features": [], "lora_request": None, **changes}
        self.requests[req_id] = SimpleNamespace(
            prompt_token_ids=prompt, output_token_ids=output, sampling_params=SimpleNamespace(**params), **fields
        )
        self.numbers[req_id] = len(self.numbers)

    def step(self, *parts):
        """Run (req_id, first position, accepted rows, drafted nodes that are rejected, their place) together."""
        rows, path, starts, query_start, emitted, drafts = [], [], [], [0], [], []
        for req_id, start, count, rejected, front in parts:
            first = len(rows)
            good = [[self.numbers[req_id], start + n] for n in range(count)]
            # The root is the first row; rejected siblings may lie between the accepted ones.
            rows += good[:1] + [[-1, -1]] * (rejected if front else 0) + good[1:]
            rows += [[-1, -1]] * (0 if front else rejected)
            shift = rejected if front else 0
            path += [first + (n + shift if 0 < n < count else n) for n in range(count + rejected)]
            starts.append(start)
            query_start.append(len(rows))
            drafts.append(count - 1 + rejected if rejected else 0)
            emitted.append(count if rejected else 1)
        self.input_batch = SimpleNamespace(
            req_ids=[part[0] for part in parts], num_computed_tokens_cpu=np.array([*starts, 77])
        )
        accepted = AcceptedRows.make(np.array(query_start), np.array(emitted), np.array(drafts), torch.tensor(path))
        self.recorder.read(torch.tensor(rows, dtype=torch.float32), accepted)

    def end(self, *req_ids):
        self.recorder.finish(req_ids)
        for req_id in req_ids:
            self.requests.pop(req_id)
        return self.writer.answers


def positions(answer):
    return torch.cat(answer.features)[:, 1].int().tolist()


@pytest.fixture
def runner():
    return Runner()


def test_prompts_accepted_rows_and_chunks_are_put_together(runner):
    runner.add("a", [10, 11, 12, 13], [20, 21, 22, 23, 24])
    runner.add("b", [30, 31], [40, 41, 42])
    runner.step(("a", 0, 3, 0, False), ("b", 0, 2, 0, False))  # a's prompt comes in two chunks
    runner.step(("a", 3, 1, 0, False), ("b", 2, 1, 3, True))
    runner.step(("a", 4, 3, 2, True), ("b", 3, 1, 0, False))
    runner.step(("a", 7, 1, 4, False))
    first, second = runner.end("a", "b")
    assert first.ids == [10, 11, 12, 13, 20, 21, 22, 23, 24] and first.prompt_length == 4
    assert positions(first) == list(range(8)) and torch.cat(first.features)[:, 0].unique().tolist() == [0]
    assert second.ids == [30, 31, 40, 41, 42] and positions(second) == [0, 1, 2, 3]
    assert torch.cat(second.features)[:, 0].unique().tolist() == [1]


def test_rows_that_were_cached_are_missing_in_front(runner):
    runner.add("a", list(range(10, 20)), [20, 21])
    runner.step(("a", 8, 2, 0, False))
    runner.step(("a", 10, 1, 0, False))
    (answer,) = runner.end("a")
    assert answer.first_position == 8 and answer.prompt_length == 2
    assert answer.ids == [18, 19, 20, 21] and positions(answer) == [8, 9, 10]


def test_a_request_that_is_computed_again_is_recorded_once(runner):
    runner.add("a", [10, 11, 12], [20, 21, 22])
    runner.step(("a", 0, 3, 0, False))
    runner.step(("a", 3, 1, 0, False))
    runner.step(("a", 0, 2, 0, False))  # preempted
    runner.step(("a", 2, 3, 0, False))
    (answer,) = runner.end("a")
    assert positions(answer) == [0, 1, 2, 3, 4] and answer.first_position == 0


def test_a_turn_that_ends_inside_an_accepted_path(runner):
    """Of tokens 20, 21, 22 the turn keeps 20; the next input follows.  The rows of the others are replaced."""
    runner.add("a", [10, 11, 12], [20, 21, 22])
    runner.step(("a", 0, 3, 0, False))
    runner.step(("a", 3, 3, 1, False))
    runner.add("a", [10, 11, 12, 20, 30, 31], [40, 41])
    runner.step(("a", 4, 2, 0, False))
    runner.step(("a", 6, 1, 0, False))
    (answer,) = runner.end("a")
    assert answer.ids == [10, 11, 12, 20, 30, 31, 40, 41] and answer.prompt_length == 6
    assert positions(answer) == list(range(7)) and torch.cat(answer.features)[:, 0].tolist() == [0] * 4 + [1] * 3
    assert runner.recorder._room == recording.HELD_BYTES // 4


@pytest.mark.parametrize("silent", [0, 1])
def test_a_session_with_a_turn_that_is_not_recorded(runner, silent):
    for turn, prompt in enumerate(([10, 11, 12], [10, 11, 12, 20, 30])):
        runner.add("a", prompt, [20, 21], params={"extra_args": {"record": turn != silent}})
        runner.step(("a", 4 * turn, 3 - 2 * turn, 0, False))
        runner.step(("a", 3 + 2 * turn, 1, 0, False))
    assert runner.end("a") == [] and runner.recorder._room == recording.HELD_BYTES // 4


def test_a_gap_starts_anew(runner):
    runner.add("a", [10, 11, 12, 13], [20, 21, 22, 23])
    runner.step(("a", 0, 2, 0, False))
    runner.step(("a", 5, 2, 0, False))
    (answer,) = runner.end("a")
    assert answer.first_position == 5 and answer.prompt_length == 1
    assert answer.ids == [21, 22, 23] and positions(answer) == [5, 6]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [20, 21, 2]),
        ({"ignore_eos": True}, [20, 21, 2, 22, 23]),
        ({"stop_token_ids": [21]}, [20, 21]),
        ({"stop_token_ids": [21], "min_tokens": 2}, [20, 21, 2]),
        ({"max_tokens": 1}, [20]),
    ],
)
def test_answers_end_where_the_scheduler_ends_them(runner, params, kept):
    runner.add("a", [10, 11, 12], [20, 21, 2, 22, 23], params=params)
    runner.step(("a", 0, 3, 0, False))
    runner.step(("a", 3, 5, 1, True))
    (answer,) = runner.end("a")
    assert answer.ids[3:] == kept


@pytest.mark.parametrize(
    "changes",
    [
        {"params": {"extra_args": {"record": False}}},
        {"mm_features": ["image"]},
        {"lora_request": "adapter"},
        {"prompt": None},
        {"output": []},
    ],
)
def test_what_is_not_recorded(runner, changes):
    prompt, output = changes.pop("prompt", [10, 11, 12]), changes.pop("output", [20, 21])
    runner.add("a", prompt, output, **changes)
    runner.step(("a", 0, 3, 0, False))
    runner.step(("a", 3, 1, 0, False))
    assert runner.end("a") == []


def test_memory_is_bounded_and_comes_back(runner):
    runner.recorder._room = 7
    for name in "abc":
        runner.add(name, [10, 11, 12], [20, 21])
    runner.step(("a", 0, 3, 0, False), ("b", 0, 3, 0, False), ("c", 0, 3, 0, False))
    runner.step(("a", 3, 1, 0, False), ("b", 3, 1, 0, False), ("c", 3, 1, 0, False))
    answers = runner.end("a", "b", "c")
    assert len(answers) == 1 and runner.recorder._room == 7
    runner.add("d", [10, 11, 12], [20, 21])
    runner.step(("d", 0, 3, 0, False))
    runner.end("d")
    assert len(runner.writer.answers) == 2


def test_long_requests_are_cut(runner, monkeypatch):
    monkeypatch.setattr(recording, "MAX_LENGTH", 5)
    runner.add("a", [10, 11, 12], [20, 21, 22, 23])
    for start, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
        runner.step(("a", start, count, 0, False))
    (answer,) = runner.end("a")
    assert answer.ids == [10, 11, 12, 20, 21] and positions(answer) == [0, 1, 2, 3, 4]


def test_after_a_failure_of_the_writer_nothing_is_kept(runner):
    runner.add("a", [10, 11, 12], [20, 21])
    runner.step(("a", 0, 3, 0, False))
    runner.writer.failed = True
    runner.step(("a", 3, 1, 0, False))
    assert runner.end("a") == [] and not runner.recorder._kept
