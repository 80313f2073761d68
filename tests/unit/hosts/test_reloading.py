"""How published versions are taken, refused and taken back: the protocol without an engine, on one rank and on two."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from vllm_specplug.core.acceptance import LOOKS
from vllm_specplug.cpu import reloading
from vllm_specplug.cpu.reloading import Reloading
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.utils.metrics import publish as publish_metrics
from vllm_specplug.utils.published import publish


class Weights:
    """A version of ``Drafter``'s weights."""

    def __init__(self, drafter, folder):
        self.drafter, self.text = drafter, (folder / "config.json").read_text()

    def prepare(self):
        if self.text == "cannot be packed":
            raise RuntimeError("cannot be packed")

    def exchange(self):
        self.drafter.text, self.text = self.text, self.drafter.text


class Drafter:
    """Its weights are a text."""

    def __init__(self):
        self.text, self.slow = "first", threading.Event()
        self.slow.set()

    def version_check(self, folder):
        return None

    def new_version(self, folder, check):
        self.slow.wait()
        found = Weights(self, folder)
        if found.text == "damaged":
            raise ValueError("it is damaged")
        return found


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(reloading, "agreed", lambda value: value)
    monkeypatch.setattr(reloading, "on_all_ranks", lambda value: [value])
    monkeypatch.setattr(reloading, "leads", lambda: True)


@pytest.fixture
def head(tmp_path):
    published(tmp_path / "head", "first")
    return tmp_path / "head"


def published(head, text):
    return publish(head, lambda folder: (folder / "config.json").write_text(text), {}).version


def follow(head, requests=(), drafter=None, counters=None):
    drafter = drafter or Drafter()
    counters = counters or Counters(publish_metrics())
    return drafter, Reloading(drafter, str(head), str(head / "versions/000001"), requests, counters), counters


def step_until(followed, condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        followed.before_step()
        time.sleep(0.002)


def take(followed, head, text):
    """Publish a version, and step until it is in use."""
    version = published(head, text)
    step_until(followed, lambda: followed.version == version)


def left_alone(followed):
    """Give the threads time to find something, and step."""
    for _ in range(30):
        followed.before_step()
        time.sleep(0.005)


def walk(followed, request_ids, accepted):
    tree = SimpleNamespace(num_rows=torch.full((len(request_ids),), 9))
    followed.walked(request_ids, tree, SimpleNamespace(num_emitted=torch.full((len(request_ids),), 1 + accepted)))


def answer(followed, name, count, accepted):
    for number in range(count):
        for tree in range(12):
            walk(followed, [f"{name}{number}"], accepted + tree % 2)
        followed.finish([f"{name}{number}"])
        followed.before_step()


def value(counters, name):
    from vllm_specplug.utils.metrics import COUNTERS

    return dict(zip((one.name for one in COUNTERS), counters.values(), strict=True))[f"specplug:{name}"]


def test_a_version_is_read_beside_the_steps_and_taken_between_two(head):
    drafter, followed, counters = follow(head)
    drafter.slow.clear()
    version = published(head, "second")
    step_until(followed, lambda: followed._reading is not None)
    left_alone(followed)
    assert (drafter.text, followed.version) == ("first", 1)
    drafter.slow.set()
    step_until(followed, lambda: followed.version == version)
    assert drafter.text == "second"
    walk(followed, ["a", "b"], 2)
    assert counters.versions() == (2, {2: (2.0, 4.0)}) and value(counters, "drafters_taken") == 1


@pytest.mark.parametrize("text", ["damaged", "cannot be packed"])
def test_a_version_that_fails_is_left_with_one_warning(head, caplog, text):
    drafter, followed, counters = follow(head)
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        published(head, text)
        step_until(followed, lambda: caplog.records)
        left_alone(followed)
    (warning,) = caplog.records
    assert "version 2 of the drafter is not taken, version 1 stays in use" in warning.getMessage()
    assert text in warning.getMessage() and drafter.text == "first" and value(counters, "drafters_refused") == 1
    take(followed, head, "third")
    assert drafter.text == "third"


def test_a_folder_that_is_gone_is_told_once_and_may_come_back(head, caplog):
    drafter, followed, _ = follow(head)
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        head.rename(head.with_name("away"))
        step_until(followed, lambda: caplog.records)
        left_alone(followed)
    assert len(caplog.records) == 1 and "the one in use stays" in caplog.records[0].getMessage()
    head.with_name("away").rename(head)
    take(followed, head, "second")
    assert drafter.text == "second"


def test_a_pointer_to_nothing_is_told_once(head, caplog):
    drafter, followed, _ = follow(head)
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        pointer = {"version": 7, "path": "versions/000007", "published": "now"}
        (head / "new.json").write_text(json.dumps(pointer))
        (head / "new.json").replace(head / "current.json")
        step_until(followed, lambda: caplog.records)
        left_alone(followed)
    assert len(caplog.records) == 1 and "versions/000007, which does not exist" in caplog.records[0].getMessage()
    assert drafter.text == "first"


def test_a_version_that_accepts_less_is_taken_back_and_not_tried_again(head, caplog):
    drafter, followed, counters = follow(head)
    answer(followed, "before", 40, 3)
    take(followed, head, "second")
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        answer(followed, "after", LOOKS[-1] + 1, 1)
    assert (drafter.text, followed.version) == ("first", 1) and value(counters, "drafters_rolled_back") == 1
    assert "accepted 1.50 tokens per tree, version 1 before it 3.50" in caplog.text
    (head / "current.json").touch()
    left_alone(followed)
    assert followed.version == 1
    take(followed, head, "third")
    assert drafter.text == "third"


def test_a_version_that_is_as_good_stays_and_the_next_one_waits_for_that(head):
    drafter, followed, _ = follow(head)
    answer(followed, "before", 40, 3)
    take(followed, head, "second")
    published(head, "third")
    time.sleep(0.1)
    left_alone(followed)
    assert drafter.text == "second"
    answer(followed, "after", LOOKS[-1] + 1, 3)
    step_until(followed, lambda: drafter.text == "third")


def test_requests_that_run_at_the_change_are_not_compared(head):
    """Their key/value is of the old version."""
    running = {f"before{number}" for number in range(LOOKS[-1] + 1)}
    drafter, followed, _ = follow(head, running)
    answer(followed, "earlier", 40, 3)
    take(followed, head, "second")
    for number in range(LOOKS[-1] + 1):
        walk(followed, [f"before{number}"], 0)
    answer(followed, "before", LOOKS[-1] + 1, 0)
    assert drafter.text == "second"
    # Such an id may come again for another request.
    answer(followed, "before", LOOKS[-1] + 1, 0)
    assert drafter.text == "first"


class TwoRanks:
    """Two threads that are ranks: what one sends, both have."""

    def __init__(self, monkeypatch):
        self.local, self.barrier, self.values = threading.local(), threading.Barrier(2, timeout=30), [None, None]
        monkeypatch.setattr(reloading, "leads", lambda: self.local.rank == 0)
        monkeypatch.setattr(reloading, "on_all_ranks", self.gather)
        monkeypatch.setattr(reloading, "agreed", lambda value: self.gather(value)[0])
        monkeypatch.setattr(reloading, "STEPS_BETWEEN", 4)

    def gather(self, value):
        self.values[self.local.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, program):
        """Run ``program(rank)`` on both; return their results."""
        results, errors = [None, None], []

        def work(rank):
            self.local.rank = rank
            try:
                results[rank] = program(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return results


@pytest.mark.parametrize("text", ["second", "damaged"])
def test_two_ranks_change_in_the_same_step_or_not_at_all(head, monkeypatch, text):
    """The second rank reads for longer, or finds the version damaged where the first one does not."""
    ranks, drafters = TwoRanks(monkeypatch), (Drafter(), Drafter())
    drafters[1].slow.clear()
    if text == "damaged":
        drafters[0].new_version = lambda folder, check: Weights(drafters[0], folder)
    published(head, text)

    def program(rank):
        # Both ranks are threads of one process, which can publish one file of counters.
        _, followed, _ = follow(head, drafter=drafters[rank], counters=Counters(None))
        found = []

        def step_together(condition):
            """Step until the condition holds on both ranks."""
            end, holds = time.monotonic() + 60, False
            while not holds:
                assert time.monotonic() < end
                followed.before_step()
                found.append((drafters[rank].text, followed.version))
                holds = all(ranks.gather(condition()))
                time.sleep(0.002)

        step_together(lambda: followed._reading is not None and (rank == 1 or followed._reading.has_ended))
        more = len(found) + 10 * reloading.STEPS_BETWEEN
        step_together(lambda: len(found) >= more)
        drafters[rank].slow.set()
        step_together(lambda: followed._reading is None)
        return found, more

    (first, more), (second, _) = ranks.run(program)
    assert first == second and first[:more] == [("first", 1)] * more
    assert first[-1] == (("second", 2) if text == "second" else ("first", 1))
