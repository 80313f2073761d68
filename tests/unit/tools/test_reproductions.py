"""The papers' claims: intervals, verdicts, the page, and the parts of the scripts that need no model."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from benchmarks.papers import reproductions

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
#: Files of the page, and the scripts that wrote them.
FILES = {
    "reproduce_eagle2": "reproduce_eagle2",
    "hass_alignment": "reproduce_hass",
    "reproduce_medusa": "reproduce_medusa",
    "reproduce_swift": "reproduce_swift",
}
SLOW = [(10, 8), (12, 10), (30, 22), (8, 8), (22, 16)]


def test_a_gain_has_an_interval_over_answers():
    fast = [(tokens, cycles - 3) for tokens, cycles in SLOW]
    ratio, low, high = reproductions.gain(fast, SLOW)
    assert ratio == pytest.approx((82 / 49) / (82 / 64)) and 1 < low < ratio < high
    assert reproductions.verdict_on(fast, SLOW) == "holds"
    assert reproductions.verdict_on(SLOW, fast) == "does not hold"
    assert reproductions.gain(SLOW, SLOW) == (1.0, 1.0, 1.0)
    mixed = [(tokens, cycles + sign) for (tokens, cycles), sign in zip(SLOW, (1, -1, 2, -2, 0), strict=True)]
    assert reproductions.verdict_on(mixed, SLOW) == reproductions.verdict_on(SLOW, mixed) == "cannot be told"
    assert reproductions.summary({"a": "holds", "b": "cannot be told"}) == "holds in 1 of 2 comparisons; " + (
        "cannot be told against b."
    )


CLAIM = {
    "title": "Dynamic against static",
    "source": "EAGLE-2, table 5",
    "claim": "4.62 against 4.24.",
    "verdict": "holds",
    "headers": ["tree", "tau"],
    "rows": [["static", 1.7], ["dynamic", 1.9]],
}


def test_a_stopped_script_keeps_its_figures_and_goes_on(tmp_path, capsys):
    out, asked = tmp_path / "r.json", []

    def script(stop_at=None, answers="a"):
        figures = reproductions.Figures(out, 3, {"answers": answers})

        def measure(name):
            if name == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            asked.append(name)
            return [(name, 1)]

        found = [figures(name, partial(measure, name)) for name in "abc"]
        assert found == [[[name, 1]] for name in "abc"]  # the same types, measured or read
        reproductions.write(out, [CLAIM], "another tree")

    assert reproductions.run_script(partial(script, "c")) == 130
    assert asked == ["a", "b"] and not out.exists()
    assert "the same command continues" in capsys.readouterr().err
    assert reproductions.run_script(partial(script, None, "other")) == 2
    assert "with other answers: delete it" in capsys.readouterr().err
    assert reproductions.run_script(script) == 0
    assert asked == ["a", "b", "c"] and [file.name for file in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(("name", "script"), FILES.items())
def test_the_page_shows_the_files(name, script):
    content = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert reproductions.markdown(content) in (BENCHMARKS / "REPRODUCTIONS.md").read_text()
    assert content["provenance"]["command"].startswith(f"{script}.py")
    assert all(table["claim"] and table["verdict"] for table in content["reproductions"])
