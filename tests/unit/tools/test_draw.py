"""Drawings of trees."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.doubles import oracle
from vllm_specplug.cli.draw import draw_tree, save_tree, show_token, text_width

PARENTS = [-1, 0, 0, 0, 1, 2, 2, 5, 6]
TOKENS = ["The", " cat", " dog", "猫", " a", " sat", " ran", "\n", " off"]


def test_a_drawing():
    assert draw_tree(PARENTS, TOKENS, {0, 2, 6}) == "\n".join(
        [
            "The* ━┱─ ·cat ──── ·a",
            "      ┡━ ·dog* ━┱─ ·sat ──── ⏎",
            "      │         ┗━ ·ran* ─── ·off",
            "      └─ 猫",
        ]
    )


def test_values_and_no_path():
    values = [float("nan"), 0.5, 0.25]
    assert draw_tree([-1, 0, 1], ["x", "y", "z"], (), values) == "x ─── y 0.50 ─── z 0.25"
    assert draw_tree([-1, 0, 0], ["x", "y", "z"], (), values) == "x ─┬─ y 0.50\n   └─ z 0.25"


def test_colour_changes_no_column():
    coloured = draw_tree(PARENTS, TOKENS, {0, 2, 6}, color=True)
    bare = coloured.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert "\x1b[1;32m·dog\x1b[0m" in coloured
    assert [line.replace("━", "─").index("┱") for line in bare.splitlines() if "The" in line] == [5]
    assert "*" not in bare


def test_every_node_is_drawn_once_and_lines_are_leaves():
    rng = oracle.seeded(70)
    for _ in range(50):
        rows = oracle.random_tree(rng, 60, 9)
        parents = [parent for _, parent in rows]
        tokens = [f"<{row}>" for row in range(len(rows))]
        text = draw_tree(parents, tokens)
        assert sorted(re.findall(r"<\d+>", text)) == sorted(tokens)
        assert len(text.splitlines()) == len(set(range(len(rows))) - set(parents))


def test_columns_line_up():
    lines = draw_tree(PARENTS, TOKENS).splitlines()
    depth_one = [line for line in lines if any(token in line for token in ("cat", "dog", "猫"))]
    assert {text_width(line[: min(line.find(c) for c in "·猫" if c in line)]) for line in depth_one} == {8}


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


def test_bad_trees_are_refused():
    with pytest.raises(ValueError, match="row 1 has parent 1"):
        draw_tree([-1, 1], ["a", "b"])
    with pytest.raises(ValueError, match="one entry per row"):
        draw_tree([-1, 0], ["a"])
