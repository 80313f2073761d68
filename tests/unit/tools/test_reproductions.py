"""The papers' claims: intervals, verdicts, the page, and the parts of the scripts that need no model."""

import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.papers import reproduce_eagle2, reproduce_hass, reproduce_medusa, reproduce_swift, reproductions
from vllm_specplug.proposers.medusa.sparse_tree import grow_from_accuracies
from vllm_specplug.proposers.swift import drafting
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.trees import Drafted

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
#: Files of the page, and the scripts that wrote them.
FILES = {
    "reproduce_eagle2": "reproduce_eagle2",
    "hass_alignment": "reproduce_hass",
    "reproduce_medusa": "reproduce_medusa",
    "reproduce_swift": "reproduce_swift",
}
SLOW = [(10, 8), (12, 10), (30, 22), (8, 8), (22, 16)]
PROVENANCE = {
    "hardware": {"cpu": "a CPU", "cores": 2},
    "versions": {"python": "3.11"},
    "commit": "abc",
    "command": "reproduce.py",
    "baseline": "another tree",
    "date": "2026-01-02T03:04:05+00:00",
}


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


def test_tables_go_into_their_place_of_a_page(tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "reproduce_x.json", tmp_path / "page.md"
    file.write_text(json.dumps({"reproductions": [CLAIM | {"note": "offline"}], "provenance": PROVENANCE}))
    page.write_text("above\n<!-- reproduce_x -->\nformer\n<!-- /reproduce_x -->\nbelow\n")
    monkeypatch.setattr("sys.argv", ["reproductions", str(file), "--into", str(page)])
    reproductions.main()
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("<!-- /reproduce_x -->\nbelow\n") and "former" not in text
    for said in (
        "EAGLE-2, table 5 claims: 4.62 against 4.24. Here: holds",
        "| dynamic | 1.9 |",
        "Offline.",
        "commit abc",
    ):
        assert said in text, said
    page.write_text("no place\n")
    with pytest.raises(ValueError, match="reproduce_x"):
        reproductions.main()


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


def test_eagle2s_script_saves_each_figure(tmp_path, monkeypatch):
    """Stopped at its fourth figure; the second run measures the others only, and gives all tables."""
    head = torch.nn.Linear(1, 1)
    monkeypatch.setattr(reproduce_eagle2.eagle, "load_trained", lambda folder: (head, torch.arange(2)))
    answers = [Answer("s", [1], [2])]
    monkeypatch.setattr(reproduce_eagle2, "read_answers", lambda file: answers)
    monkeypatch.setattr(reproduce_eagle2, "extract", lambda *_, **__: [])
    monkeypatch.setattr(reproduce_eagle2, "load_features", lambda files: answers)
    monkeypatch.setattr(reproduce_eagle2, "target_head", lambda target: ({}, torch.eye(2), torch.eye(2)))
    monkeypatch.setattr(reproduce_eagle2, "fit_shape", lambda *_: frozenset({(0,)}))
    measured, stop_at = [], 3

    def tree_tau(*_, depth, beam, policy):
        if len(measured) == stop_at:
            raise KeyboardInterrupt
        measured.append(depth)
        return [(len(measured) + 9, 5)]

    monkeypatch.setattr(reproduce_eagle2, "tree_tau", tree_tau)
    words = ["x", "--target", "t", "--head", "h", "--answers", "a", "--features", "f", "--out"]
    monkeypatch.setattr("sys.argv", [*words, str(tmp_path / "r.json")])
    assert reproductions.run_script(reproduce_eagle2.main) == 130 and measured == [4, 4, 4]
    stop_at = None
    assert reproductions.run_script(reproduce_eagle2.main) == 0 and measured == [4] * 5 + [6] * 5
    tables = json.loads((tmp_path / "r.json").read_text())["reproductions"]
    assert [row[2] for row in tables[0]["rows"]] == ["2.000", "2.800", "3.000", "3.800"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: No such file"), ("{", "is not one JSON object"), ("{}", "is not an object with prov")],
)
def test_a_file_without_reproductions(tmp_path, monkeypatch, capsys, content, said):
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    monkeypatch.setattr("sys.argv", ["reproductions", str(tmp_path / "r.json")])
    assert reproductions.run_script(reproductions.main) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(("name", "script"), FILES.items())
def test_the_page_shows_the_files(name, script):
    content = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert reproductions.markdown(content) in (BENCHMARKS / "REPRODUCTIONS.md").read_text()
    assert content["provenance"]["command"].startswith(f"{script}.py")
    assert all(table["claim"] and table["verdict"] for table in content["reproductions"])


def drafted(log_value, confidence, parent, *ranks):
    return Drafted(log_value, confidence, parent, 0, ranks)


#: Two levels of two nodes each below the root and below its best child; the second level has the surer tokens.
POOL = [
    drafted(-0.2, -0.2, -1, 0),
    drafted(-1.0, -1.0, -1, 1),
    drafted(-1.5, -1.3, 0, 0, 0),
    drafted(-1.1, -0.9, 0, 0, 1),
    drafted(-1.3, -0.3, 1, 1, 0),
    drafted(-4.0, -3.0, 1, 1, 1),
]


def test_policies_of_eagle2_differ_as_they_say():
    size = reproduce_eagle2.Size(beam=2, depth=2)
    value, confidence = (reproduce_eagle2.expansion(key, True, size) for key in ("value", "confidence"))
    assert value.feed(POOL, 2) == [3, 4] and confidence.feed(POOL, 2) == [4, 3]
    assert sorted(value.keep(POOL)) == sorted(confidence.keep(POOL)) == [0, 1, 3, 4]
    one = reproduce_eagle2.Size(beam=1, depth=2)
    assert sorted(reproduce_eagle2.expansion("value", True, one).keep(POOL)) == [0, 1]
    assert sorted(reproduce_eagle2.expansion("value", False, one).keep(POOL)) == [0, 3]
    assert sorted(reproduce_eagle2.expansion("confidence", False, one).keep(POOL)) == [0, 4]
    fixed = reproduce_eagle2.static(frozenset({(0,), (1,), (1, 0)}))
    assert fixed.feed(POOL, 0) == [1] and fixed.keep(POOL) == [0, 1, 4]


def test_the_sweep_of_hass_has_the_papers_pairs():
    assert reproduce_hass.parse_sweep("10:0,1:1.0") == [(10, 0.0), (1, 1.0)]
    for text in ("10:1", "10:0,7:1"):
        with pytest.raises(Exception, match="table 7"):
            reproduce_hass.parse_sweep(text)


def test_a_sparse_tree_is_ahead_of_dense_ones(monkeypatch):
    """The first guess of these heads is mostly right, so width on deep levels is wasted."""
    monkeypatch.setattr(reproduce_medusa, "DENSE", (8, 16, 32))
    draw = random.Random(0)
    shares = [[0.6, 0.1, 0.05, 0.05], [0.5, 0.1, 0.05, 0.05], [0.4, 0.1, 0.05, 0.05]]
    rows = [
        torch.tensor([[draw.choices((0, 1, 2, 3, 32), [*row, 1 - sum(row)])[0] for row in shares] for _ in range(60)])
        for _ in range(40)
    ]
    sparse, values = grow_from_accuracies([row + [0.0] * 28 for row in shares], 60)
    table = reproduce_medusa.sparse_against_dense(rows[::2], rows[1::2], sparse)
    assert len(table["rows"]) == 3 and "at 3 of 3 sizes" in table["verdict"]
    for nodes, found, best, widths, median, chance in table["rows"]:
        assert nodes >= len(widths.split(" x ")) and float(found) >= float(best) - 1e-9
        assert float(median) <= float(chance) <= float(best) + 0.05
    steps = {"plain_ms": {1: 10.0}, "draft_ms": {1: 2.0}, "step_ms": {1: {2: 10.0, 5: 13.0, 17: 48.0}}}
    taus = {1: 1.6, 4: 2.0, 16: 2.4, 48: 2.6}
    sweep = reproduce_medusa.budget_sweep(sparse, values, taus, steps)
    assert [row[3:] for row in sweep["rows"]] == [
        ["1.200", "1.333"],
        ["1.500", "1.333"],
        ["5.000", "0.480"],
        ["-", "-"],
    ]
    assert "0.480x at 16" in sweep["verdict"] and "5.00 times" in sweep["verdict"]
    assert {row[3] for row in reproduce_medusa.budget_sweep(sparse, values, taus, None)["rows"]} == {"-"}


@pytest.mark.parametrize("most", [8, 64, 255])
def test_dense_shapes_by_chance_have_the_size(most):
    draw = random.Random(1)
    for _ in range(20):
        widths = reproduce_medusa.random_widths(3, most, draw)
        nodes = widths[0] * (1 + (widths[1] * (1 + widths[2]) if len(widths) == 3 else sum(widths[1:])))
        assert most / 2 <= nodes <= most


def test_swifts_figures():
    drafts = reproduce_swift.Drafts(rounds=[10, 30], steps=[20, 40], accepted=[10, 20])
    assert (drafts.length, drafts.alpha, drafts.cycles) == (1.75, 0.5, [(20, 10), (50, 30)])
    # 1.75 * 0.5 / (0.75 * 0.6 + 0.5), equation 6
    assert drafts.cells(0.4) == ["1.50", "0.500", "1.750", "0.921x"]
    long, chain = (
        reproduce_swift.Drafts([10, 10], steps, got) for steps, got in (([90] * 2, [9] * 2), ([20] * 2, [6] * 2))
    )
    found = {"SWIFT": drafts, "no optimisation": chain, "no dynamic verification": chain, "no early stop": long}
    table = reproduce_swift.ablation(found, 0.4)
    assert "alpha by 5.00" in table["verdict"] and f"M by {1.75 / 1.6:.2f}" in table["verdict"]
    assert [row[0] for row in table["rows"]] == list(found) and table["rows"][0][-1] == "-"


def test_without_siblings_every_position_has_one_token():
    sure = torch.tensor([0.2, 0.6, 0.9, 0.99])
    assert drafting.num_siblings(sure).tolist() == [10, 5, 3, 1]
    with reproduce_swift.no_siblings():
        assert drafting.num_siblings(sure).tolist() == [1, 1, 1, 1]
    assert drafting.num_siblings(sure).tolist() == [10, 5, 3, 1]
