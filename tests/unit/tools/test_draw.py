"""Drawings of trees."""

import xml.etree.ElementTree as ElementTree

import pytest

from tests.doubles import oracle
from vllm_specplug.cli.draw import draw_tree, save_tree, show_token

PARENTS = [-1, 0, 0, 0, 1, 2, 2, 5, 6]
TOKENS = ["The", " cat", " dog", "猫", " a", " sat", " ran", "\n", " off"]


def test_a_drawing():
    lines = draw_tree(PARENTS, TOKENS, {0, 2, 6}).splitlines()
    assert lines[:5] == ["The *", "  ·cat", "    ·a", "  ·dog *", "    ·sat"]
    assert lines[5:] == ["      ⏎", "    ·ran *", "      ·off", "  猫"]


def test_every_node_is_drawn_once():
    rng = oracle.seeded(70)
    for _ in range(50):
        rows = oracle.random_tree(rng, 60, 9)
        tokens = [f"<{row}>" for row in range(len(rows))]
        assert sorted(draw_tree([parent for _, parent in rows], tokens).split()) == sorted(tokens)


def test_a_picture_marks_the_accepted_path(tmp_path):
    file = tmp_path / "tree.svg"
    save_tree(file, [-1, 0, 0], ["<s>", "$x$", "\n"], {0, 2})
    ElementTree.fromstring(file.read_text())
    text = file.read_text()
    assert all(f"<!-- {label} -->" in text for label in ("&lt;s&gt;", "$x$", "⏎"))
    assert text.count("stroke: #0a7d33") == 1 and text.count("stroke: #bbbbbb") == 1
    assert text.count("fill: #0a7d33") == 2 and text.count("fill: #555555") == 1


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" a b", "·a b"), ("\n\n", "⏎⏎"), ("\t", "⇥"), ("\x00", "\\x00"), ("", "∅"), ("\u200b", "\\u200b")],
)
def test_tokens_stay_on_their_line(token, shown):
    assert show_token(token) == shown
