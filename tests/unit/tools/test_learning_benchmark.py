"""The benchmark of a drafter that learns from a stream: its figures, without engines."""

import json
import sys
import time
from pathlib import Path

from benchmarks.end_to_end import learning
from benchmarks.end_to_end.unseen_prompts import KINDS, make
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import Measurement
from vllm_specplug.utils.published import read_current


def block(seconds, drafts=0, accepted=0, token_ids=((1, 2), (3, 4))):
    return Measurement(["a", "b"], "mixed", seconds, [list(ids) for ids in token_ids], drafts, accepted)


FOUND = {
    "blocks": {
        "plain": [block(1.0)] * 4,
        "lookup": [block(0.8, 3, 1)] * 4,
        "static": [block(0.7, 2, 2)] * 4,
        "learning": [
            block(0.9, 2, 2, ((1, 2), (3, 5))),
            block(0.9, 2, 2),
            block(0.6, 2, 3),
            block(0.5, 2, 4),
        ],
    },
    "versions": [1, 1, 2, 2],
    "trainer_seconds": [0.1, 0.2, 0.5, 0.58],
    "rounds": [],
}


def test_the_summary_compares_the_last_quarter_and_counts_same_texts(tmp_path):
    result = learning.summary(FOUND)
    assert result["methods"]["learning"]["tau"] == [2.0, 2.0, 2.5, 3.0]
    assert result["tau_of_learning_over_static"] == 1.5 and result["speed_of_learning_over_static"] == 1.4011
    assert result["trainer_share"] == 0.2
    assert result["methods"]["learning"]["same_texts"] == 7 and result["requests"] == 8
    assert result["block_that_overtakes_lookup_by_1.0"] == 2 == result["block_that_overtakes_plain_by_1.2"]
    assert learning.overtakes(result["methods"]["plain"], result["methods"]["lookup"], 1.0) is None
    learning.plot(result, 20, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    json.dumps(result)


def test_the_two_drafters_alone_are_compared_with_each_other(tmp_path):
    drafters = {name: FOUND["blocks"][name] for name in ("static", "learning")}
    result = learning.summary({**FOUND, "blocks": drafters})
    assert result["methods"]["learning"]["same_texts"] == 7 and result["methods"]["learning"]["texts"] == 8
    assert result["methods"]["static"]["texts"] == 0 and not any("overtakes" in key for key in result)
    learning.plot(result, 20, tmp_path / "picture.png")


def test_no_text_of_a_stream_comes_twice():
    stream = learning.stream_of([Question("a", "x", "one"), Question("b", "x", "two")], 7)
    assert len(stream) == 7 and len({question.text for question in stream}) == 7


def test_prompts_of_each_kind_are_different_and_repeatable():
    for kind in KINDS:
        rows = make(kind, 300)
        assert len({row["prompt"] for row in rows}) == 300 and rows == make(kind, 400)[:300]


def test_the_trainer_is_halted_and_goes_on(tmp_path):
    trainer = learning.Trainer([sys.executable, "-c", "while True: pass"], tmp_path / "log")
    try:

        def state():
            return Path(f"/proc/{trainer._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

        assert _becomes(state, "T")
        trainer.go_on()
        assert _becomes(state, "R")
        trainer.halt()
        assert _becomes(state, "T") and trainer.processor_seconds() >= 0
    finally:
        trainer.stop()
    assert trainer._process.returncode is not None


def _becomes(state, wanted):
    end = time.monotonic() + 30
    while state() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return state() == wanted


def test_the_learning_drafter_starts_as_the_shipped_one(tmp_path):
    folder = learning.make_head(tmp_path / "head", from_nothing=False)
    current = read_current(tmp_path / "head")
    assert current.version == 1 and (current.folder / "config.json").exists() and folder == str(current.folder)
