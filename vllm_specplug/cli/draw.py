"""Drawings of draft trees: as text for a terminal, as a picture with one column per depth.

Siblings go from best to worst downwards.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

from vllm_specplug.utils.figures import new_figure, save

#: Columns between two depths of a picture, and inches of a column and of a line.
_GAP, _INCHES_PER_COLUMN, _INCHES_PER_LINE = 4, 0.078, 0.19
_ACCEPTED = "#0a7d33"


def draw_tree(parents: Sequence[int], tokens: Sequence[str], accepted: Collection[int] = ()) -> str:
    """Draw a tree with one line per row, indented by depth.

    Args:
        parents: parent of each row, a lower row; the root, row 0, has -1.
        tokens: text of each row.
        accepted: rows of the accepted path, the root included; they are marked with ``*``.
    """
    depths, order = _depth_first(parents)
    return "\n".join(f"{'  ' * depths[row]}{show_token(tokens[row])}{' *' * (row in accepted)}" for row in order)


def _depth_first(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the depth of each row, and the rows from the root on, each before its children."""
    depths, order, stack = [0] * len(parents), [], [0]
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent].append(row)
        depths[row] = depths[parent] + 1
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    return depths, order


def show_token(token: str) -> str:
    """Show a token's text on one line: a leading space as ``·``, a line break as ``⏎``, other unprintables escaped."""
    if token.startswith(" "):
        token = "·" + token[1:]
    shown = token.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown) or "∅"


def text_width(text: str) -> int:
    """Return the terminal columns of ``text``: wide East Asian characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def save_tree(path: str | Path, parents: Sequence[int], tokens: Sequence[str], accepted: Collection[int] = ()) -> None:
    """Draw a tree into a file (svg, png or pdf); the other arguments are those of ``draw_tree``."""
    depths, order = _depth_first(parents)
    labels = [show_token(token) for token in tokens]
    lines, num_lines = [0] * len(labels), 0
    for row in order:  # a row has the line of its first child; each leaf ends a line
        lines[row] = num_lines
        num_lines += row not in parents
    lefts = [0.0]
    for depth in range(max(depths) + 1):
        widest = max(text_width(label) for label, d in zip(labels, depths, strict=True) if d == depth)
        lefts.append(lefts[-1] + widest + _GAP)
    figure = new_figure(lefts[-1] * _INCHES_PER_COLUMN, (num_lines + 1) * _INCHES_PER_LINE)
    axes = figure.subplots()
    axes.set(xlim=(-1, lefts[-1] - _GAP + 1), ylim=(num_lines, -1))
    axes.axis("off")
    for row, label in enumerate(labels):
        marked, left = row in accepted, lefts[depths[row]]
        style = {"color": _ACCEPTED, "weight": "bold"} if marked else {"color": "#555555"}
        axes.text(left, lines[row], label, va="center", family="monospace", fontsize=9, parse_math=False, **style)
        if row:
            parent = parents[row]
            begin = lefts[depths[parent]] + text_width(labels[parent]) + 0.5
            xs, ys = (begin, left - _GAP + 1, left - 0.5), (lines[parent], lines[parent], lines[row])
            look = {"color": _ACCEPTED, "linewidth": 2, "zorder": 3} if marked else {"color": "#bbbbbb", "linewidth": 1}
            axes.plot(xs, ys, **look)
    save(figure, path)
