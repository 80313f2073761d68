"""Plain-text and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Return a table with aligned columns; columns of numbers are right-aligned.

    Args:
        headers: one title per column.
        rows: cells as text; each row is as long as ``headers``.
        markdown: return a Markdown table instead of a ruled one.
    """
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(cells, widths, right, strict=True)]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    if markdown:
        rule = line(["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)])
    else:
        rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(headers), rule, *map(line, rows)])
