"""Counters with several API servers: vLLM then shows the files in prometheus_client's folder."""

import re
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from vllm_specplug.utils import metrics
from vllm_specplug.utils.metrics import Counters, publish


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "COPY_SECONDS", 0.05)
    return tmp_path


def page_of(folder) -> str:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    return generate_latest(registry).decode()


def wait_for(folder, line: str) -> str:
    for _ in range(200):
        if line in (page := page_of(folder)).splitlines():
            return page
        time.sleep(0.1)
    raise AssertionError(f"{line!r} is not in {page!r}")


def test_counters_reach_the_shared_folder(folder):
    path = publish(replicas=2)
    first, second = Counters(path, 0), Counters(path, 1)
    first.add("steps", 3)
    second.add("steps", 4)
    first.add("proposer failed")
    first.serve_version(2)
    first.add_trees(2, trees=5, accepted=9)
    page = wait_for(folder, "specplug:steps_total 7.0")
    assert re.search(r'^specplug:fallbacks_total\{reason="proposer failed"\} 1.0$', page, re.MULTILINE)
    assert "specplug:drafter_version 2.0" in page.splitlines()
    assert 'specplug:drafter_accepted_tokens_total{version="2"} 9.0' in page.splitlines()
    first.add("steps")
    wait_for(folder, "specplug:steps_total 8.0")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_is_gone_ends_the_copying(folder):
    path = publish()
    folder.rmdir()
    Counters(path).add("steps")
    metrics._shared.join(timeout=20)
    assert not metrics._shared.is_alive()


def test_nothing_is_shared_before_something_is_counted(folder):
    path = publish()
    time.sleep(0.5)
    assert not list(folder.iterdir())
    Counters(path).add("steps")
    wait_for(folder, "specplug:steps_total 1.0")
