"""Drawings of draft trees: as text for a terminal, as a picture.

Both read from left to right, one column per depth, siblings from best to worst downwards.  Heavy lines mark the
accepted path.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.utils.figures import new_figure, save

#: Columns between two depths of a picture, and inches of a column and of a line.
_GAP, _INCHES_PER_COLUMN, _INCHES_PER_LINE = 4, 0.078, 0.19
_ACCEPTED = "#0a7d33"

BOLD, PLAIN = "\x1b[1;32m", "\x1b[0m"

#: Line pieces by the accepted edge that goes through them: none, the edge to this child, an edge to a child below.
FIRST = {"none": "┬", "this": "┯", "below": "┱"}
MIDDLE = {"none": "├", "this": "┡", "below": "┠"}
LAST = {"none": "└", "this": "┗"}
ONLY = {"none": "─", "this": "━"}


@dataclass(frozen=True)
class _Shape:
    """A tree ready to draw: labels, children and depth of each row, and the rows on the accepted path."""

    labels: list[str]
    children: list[list[int]]
    depths: list[int]
    accepted: frozenset[int]


def draw_tree(
    parents: Sequence[int],
    tokens: Sequence[str],
    accepted: Collection[int] = (),
    values: Sequence[float] | None = None,
    color: bool = False,
) -> str:
    """Draw a tree with box characters, one line per leaf.

    Args:
        parents: parent of each row, a lower row; the root, row 0, has -1.
        tokens: text of each row.
        accepted: rows of the accepted path, the root included; marked by heavy lines and ``*``, or bold with ``color``.
        values: number after each token, e.g. its probability; NaN shows nothing.
        color: use terminal colours.
    """
    shape = _prepare(parents, tokens, accepted, values, "" if color else "*")
    widths = [0] * (max(shape.depths) + 1)
    for label, depth in zip(shape.labels, shape.depths, strict=True):
        widths[depth] = max(widths[depth], text_width(label))
    return "\n".join(line.rstrip() for line in _block(0, shape, widths, color))


def _prepare(
    parents: Sequence[int],
    tokens: Sequence[str],
    accepted: Collection[int],
    values: Sequence[float] | None,
    mark: str,
) -> _Shape:
    if not parents or len(parents) != len(tokens) or (values is not None and len(values) != len(parents)):
        raise ValueError("parents, tokens and values must have one entry per row, the root included")
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for row, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}; a parent is a lower row")
        children[parent].append(row)
        depths[row] = depths[parent] + 1
    labels = [show_token(token) + (mark if row in accepted else "") for row, token in enumerate(tokens)]
    if values is not None:
        labels = [
            label if math.isnan(value) else f"{label} {value:.2f}" for label, value in zip(labels, values, strict=True)
        ]
    return _Shape(labels, children, depths, frozenset(accepted))


def _block(row: int, shape: _Shape, widths: list[int], color: bool) -> list[str]:
    """Return the lines of the subtree under ``row``; the first line starts with its label."""
    label, children = shape.labels[row], shape.children[row]
    fill = widths[shape.depths[row]] - text_width(label) + 1
    head = f"{BOLD}{label}{PLAIN}" if color and row in shape.accepted else label
    if not children:
        return [head]
    taken = next((i for i, child in enumerate(children) if child in shape.accepted), -1)
    lines: list[str] = []
    for i, child in enumerate(children):
        first, last = i == 0, i == len(children) - 1
        pieces = ONLY if first and last else FIRST if first else LAST if last else MIDDLE
        junction = pieces["this" if i == taken else "below" if i < taken else "none"]
        edge = "━ " if i == taken else "─ "
        lead = head + " " + ("─" if taken < 0 else "━") * fill if first else " " * (widths[shape.depths[row]] + 2)
        bar = " " if last else "┃" if i < taken else "│"
        top, *rest = _block(child, shape, widths, color)
        lines.append(lead + junction + edge + top)
        lines += [" " * (widths[shape.depths[row]] + 2) + bar + "  " + line for line in rest]
    return lines


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
    shape = _prepare(parents, tokens, accepted, None, "")
    lines, num_lines = _first_lines(shape)
    lefts = [0.0]
    for depth in range(max(shape.depths) + 1):
        widest = max(text_width(label) for label, d in zip(shape.labels, shape.depths, strict=True) if d == depth)
        lefts.append(lefts[-1] + widest + _GAP)
    figure = new_figure(lefts[-1] * _INCHES_PER_COLUMN, (num_lines + 1) * _INCHES_PER_LINE)
    axes = figure.subplots()
    axes.set(xlim=(-1, lefts[-1] - _GAP + 1), ylim=(num_lines, -1))
    axes.axis("off")
    for row, label in enumerate(shape.labels):
        marked, left = row in shape.accepted, lefts[shape.depths[row]]
        style = {"color": _ACCEPTED, "weight": "bold"} if marked else {"color": "#555555"}
        axes.text(left, lines[row], label, va="center", family="monospace", fontsize=9, parse_math=False, **style)
        if row:
            parent = parents[row]
            begin = lefts[shape.depths[parent]] + text_width(shape.labels[parent]) + 0.5
            xs, ys = (begin, left - _GAP + 1, left - 0.5), (lines[parent], lines[parent], lines[row])
            look = {"color": _ACCEPTED, "linewidth": 2, "zorder": 3} if marked else {"color": "#bbbbbb", "linewidth": 1}
            axes.plot(xs, ys, **look)
    save(figure, path)


def _first_lines(shape: _Shape) -> tuple[list[int], int]:
    """Return the line of each row (that of its first child) and the number of lines (one per leaf)."""
    lines, num_lines, stack = [0] * len(shape.labels), 0, [0]
    while stack:
        row = stack.pop()
        lines[row] = num_lines
        stack.extend(reversed(shape.children[row]))
        num_lines += not shape.children[row]
    return lines, num_lines
