"""The benchmark of a drafter that learns from a stream: its figures, without engines."""

import json

from benchmarks.end_to_end import learning
from vllm_specplug.bench.workers import Measurement


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
