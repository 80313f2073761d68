"""Charts as inline SVG strings; the page's CSS colours them (classes ``s0`` to ``s7``).

Screen readers get the title of a chart only, because the page shows the same numbers in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 44
NUM_STYLES = 8

Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return evenly spaced round numbers that cover ``low`` to ``high``."""
    if high <= low:
        high = low + 1
    raw = (high - low) / count
    step = 10.0 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * step >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    unit: str = "",
    reference: float | None = None,
    ranges: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
) -> str:
    """Draw bars side by side in groups; the y axis starts at 0.

    Args:
        title: title of the chart.
        groups: names of the groups, along the x axis.
        series: one value per group, or None for no bar; the index of a series selects its style.
        unit: text behind the numbers of the y axis.
        reference: height of a dashed horizontal line, e.g. 1 for the speedup of plain decoding.
        ranges: lowest and highest value of each bar, drawn as a whisker.
    """
    values = [value for row in series.values() for value in row if value is not None]
    highs = [span[1] for row in (ranges or {}).values() for span in row if span]
    marks = ticks(0, max([*values, *highs, reference or 0, 1e-9]))
    width = max(WIDTH, _LEFT + _RIGHT + 16 * len(groups) * (len(series) + 1))
    step = (width - _LEFT - _RIGHT) / max(len(groups), 1)
    bar = min(step * 0.8 / max(len(series), 1), 48)
    turned = any(len(group) * 7 > step for group in groups)
    height = HEIGHT + (50 if turned else 0)
    bottom = height - _BOTTOM - (50 if turned else 0)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value / marks[-1]

    parts = _y_axis(marks, y, width, unit)
    for number, (name, row) in enumerate(series.items()):
        for group, value in enumerate(row):
            if value is None:
                continue
            left = _LEFT + step * (group + 0.5) + bar * (number - len(series) / 2)
            label = f"{escape(name)}, {escape(groups[group])}: {value:.2f}{unit}"
            parts.append(
                f'<rect class="s{number % NUM_STYLES}" x="{left:.1f}" y="{y(value):.1f}" width="{bar * 0.92:.1f}" '
                f'height="{bottom - y(value):.1f}"><title>{label}</title></rect>'
            )
            span = ranges.get(name, [None] * len(groups))[group] if ranges else None
            if span:
                x = left + bar * 0.46
                parts.append(f'<path class="whisker" d="M{x:.1f} {y(span[0]):.1f}V{y(span[1]):.1f}"/>')
    for group, name in enumerate(groups):
        x, label_y = _LEFT + step * (group + 0.5), bottom + 16
        turn = f' transform="rotate(-35 {x:.1f} {label_y})" text-anchor="end"' if turned else ' text-anchor="middle"'
        parts.append(f'<text x="{x:.1f}" y="{label_y}"{turn}>{escape(name)}</text>')
    if reference is not None:
        parts.append(f'<path class="reference" d="M{_LEFT} {y(reference):.1f}H{width - _RIGHT}"/>')
    return _svg(title, width, height, parts)


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    unit: str = "",
    reference: float | None = None,
    diagonal: bool = False,
    log_x: bool = False,
    from_zero: bool = True,
) -> str:
    """Draw lines with marked points.

    Args:
        title: title of the chart.
        series: points by rising x; the index of a series selects its style.
        x_label, y_label, unit: texts of the axes.
        reference: height of a dashed horizontal line.
        diagonal: draw a dashed line of y = x.
        log_x: use a logarithmic x axis, with its ticks at the points; a few whole numbers get ticks at the points too.
        from_zero: start the y axis at 0.
    """
    points = [point for line in series.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    if reference is not None:
        ys.append(reference)
    few = len(xs) <= 12 and all(value == int(value) for value in xs)
    x_marks = xs if log_x or few else ticks(min(xs), max(xs))
    y_marks = ticks(0 if from_zero else min(ys), max(ys))
    bottom = HEIGHT - _BOTTOM
    scale = math.log if log_x else float
    low, high = scale(x_marks[0]), scale(x_marks[-1])

    def x(value: float) -> float:
        share = (scale(value) - low) / ((high - low) or 1)
        return _LEFT + 10 + (WIDTH - _LEFT - _RIGHT - 20) * share

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (value - y_marks[0]) / (y_marks[-1] - y_marks[0])

    parts = _y_axis(y_marks, y, WIDTH, unit)
    for mark in x_marks:
        parts.append(f'<text x="{x(mark):.1f}" y="{bottom + 16}" text-anchor="middle">{mark:g}</text>')
    if reference is not None:
        parts.append(f'<path class="reference" d="M{_LEFT} {y(reference):.1f}H{WIDTH - _RIGHT}"/>')
    if diagonal:
        ends = max(x_marks[0], y_marks[0]), min(x_marks[-1], y_marks[-1])
        parts.append(
            f'<path class="reference" d="M{x(ends[0]):.1f} {y(ends[0]):.1f}L{x(ends[1]):.1f} {y(ends[1]):.1f}"/>'
        )
    for number, (name, line) in enumerate(series.items()):
        parts += _marked_line(f"s{number % NUM_STYLES}", name, unit, [(px, py, x(px), y(py)) for px, py in line])
    return _svg(title, WIDTH, HEIGHT, [*parts, *_axis_labels(x_label, y_label)])


def _marked_line(style: str, name: str, unit: str, points: Sequence[tuple[float, float, float, float]]) -> list[str]:
    """Draw a line and its points; ``points`` holds the x and y values of each, then its coordinates in the picture."""
    path = "L".join(f"{left:.1f} {top:.1f}" for _, _, left, top in points)
    parts = [f'<path class="line {style}" d="M{path}"/>']
    for px, py, left, top in points:
        label = f"{escape(name)}: {py:.3g}{unit} at {px:g}"
        parts.append(f'<circle class="{style}" cx="{left:.1f}" cy="{top:.1f}" r="3.5"><title>{label}</title></circle>')
    return parts


def _axis_labels(x_label: str, y_label: str) -> list[str]:
    across, down = (_LEFT + WIDTH - _RIGHT) / 2, (HEIGHT - _BOTTOM + _TOP) / 2
    return [
        f'<text class="axis" x="{across:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text class="axis" x="12" y="{down:.0f}" text-anchor="middle" transform="rotate(-90 12 {down:.0f})">'
        f"{escape(y_label)}</text>",
    ]


def stacked_bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "") -> str:
    """Draw one horizontal bar per row, made of its parts in order; the index of a part selects its style."""
    left, height = 110, 30 * len(rows) + 34
    marks = ticks(0, max(sum(parts.values()) for parts in rows.values()))

    def x(value: float) -> float:
        return left + (WIDTH - left - 24) * value / marks[-1]

    parts_drawn = [
        f'<path class="grid" d="M{x(mark):.1f} 6V{height - 24}"/>'
        f'<text x="{x(mark):.1f}" y="{height - 8}" text-anchor="middle">{mark:g}{unit}</text>'
        for mark in marks
    ]
    for number, (name, parts) in enumerate(rows.items()):
        top, start = 10 + 30 * number, 0.0
        parts_drawn.append(f'<text x="{left - 6}" y="{top + 15}" text-anchor="end">{escape(name)}</text>')
        for index, (part, value) in enumerate(parts.items()):
            label = f"{escape(name)}, {escape(part)}: {value:.2f}{unit}"
            parts_drawn.append(
                f'<rect class="s{index % NUM_STYLES}" x="{x(start):.1f}" y="{top}" height="20" '
                f'width="{x(start + value) - x(start):.1f}"><title>{label}</title></rect>'
            )
            start += value
    return _svg(title, WIDTH, height, parts_drawn)


def legend(names: Sequence[str]) -> str:
    """Return the legend, which style has which name, as HTML."""
    items = (f'<li><span class="swatch s{i % NUM_STYLES}"></span>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _y_axis(marks: Sequence[float], y, width: float, unit: str) -> list[str]:
    return [
        f'<path class="grid" d="M{_LEFT} {y(mark):.1f}H{width - _RIGHT}"/>'
        f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}{unit}</text>'
        for mark in marks
    ]


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{1.25 * width:.0f}px" '
        f'aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
