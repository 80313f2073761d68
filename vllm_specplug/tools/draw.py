"""Drawings of draft trees: as text for a terminal, as SVG for a page.

Both read from left to right, one column per depth, siblings from best to worst downwards.  Heavy lines mark the
accepted path.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape

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


def tree_svg(
    parents: Sequence[int],
    tokens: Sequence[str],
    accepted: Collection[int] = (),
    values: Sequence[float] | None = None,
    line_height: int = 18,
) -> str:
    """Draw a tree as a self-contained SVG; the arguments are those of ``draw_tree``."""
    shape = _prepare(parents, tokens, accepted, values, "")
    char_width, gap = 7.3, 34
    lefts = [10.0]
    for depth in range(max(shape.depths) + 1):
        labels = [label for label, d in zip(shape.labels, shape.depths, strict=True) if d == depth]
        lefts.append(lefts[-1] + max(map(text_width, labels)) * char_width + gap)
    lines, num_lines = _first_lines(shape)

    def middle(row: int) -> float:
        return (lines[row] + 0.75) * line_height

    edges, texts = [], []
    for row, label in enumerate(shape.labels):
        left, y, mark = lefts[shape.depths[row]], middle(row), ' class="a"' if row in shape.accepted else ""
        texts.append(f'<text x="{left:.0f}" y="{y + 4:.0f}"{mark}>{escape(label)}</text>')
        if row > 0:
            parent = parents[row]
            begin = lefts[shape.depths[parent]] + text_width(shape.labels[parent]) * char_width + 4
            bend, end, top = left - gap + 10, left - 4, middle(parent)
            curve = f"M{begin:.0f} {top:.0f}H{bend:.0f}C{end - 8:.0f} {top:.0f} {bend:.0f} {y:.0f} {end:.0f} {y:.0f}"
            edges.append(f'<path d="{curve}"{mark}/>')
    # Accepted edges come last, so that they lie on top.
    edges.sort(key=lambda edge: 'class="a"' in edge)
    style = (
        ".tree text{font:12px ui-monospace,monospace;fill:var(--tree-text,#555);white-space:pre}"
        ".tree path{fill:none;stroke:var(--tree-edge,#bbb)}"
        ".tree text.a{fill:var(--tree-accepted,#0a7d33);font-weight:bold}"
        ".tree path.a{stroke:var(--tree-accepted,#0a7d33);stroke-width:2.5}"
    )
    width, height = lefts[-1] - gap + 10, (num_lines + 0.5) * line_height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}">',
            f"<style>{style}</style>",
            *edges,
            *texts,
            "</svg>",
        ]
    )


def _first_lines(shape: _Shape) -> tuple[list[int], int]:
    """Return the line of each row (that of its first child) and the number of lines (one per leaf)."""
    lines, num_lines, stack = [0] * len(shape.labels), 0, [0]
    while stack:
        row = stack.pop()
        lines[row] = num_lines
        stack.extend(reversed(shape.children[row]))
        num_lines += not shape.children[row]
    return lines, num_lines
