"""HTML pages of reports: tables, titled sections and the page around them; a page needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1b1b1b;--soft:#595959;--line:#d5d5d5;--tree-text:#555;
--tree-edge:#aaa;
--tree-accepted:#0a7d33;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a3478f;
--c4:#b58900;--c5:#3fa0d8;--c6:#7a5230;--c7:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--ground:#15181c;--text:#e8e8e8;--soft:#a9b0b8;--line:#3a4048;
--tree-text:#b9c0c7;
--tree-edge:#5a626b;--tree-accepted:#4fd07f;--c0:#5fb3e8;--c1:#ff9054;--c2:#3fd0a4;--c3:#dd8fcb;--c4:#e3c04a;
--c5:#a9dcf7;
--c6:#c89b72;--c7:#a8a8a8}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:1180px;margin:0 auto;
padding:1rem}
h1{font-size:1.7rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.2rem 0 .3rem;border-top:1px solid var(--line);
padding-top:1rem}
p,li{color:var(--soft);max-width:75ch}.side{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start}
.side>figure{flex:1 1 480px;margin:0;min-width:0}.side>div{flex:1 1 300px;overflow-x:auto}
figure{margin:0 0 1rem;overflow-x:auto}figcaption{color:var(--soft);font-size:.9rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft)}th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);
text-align:right}
th:first-child,td:first-child{text-align:left}td.text{text-align:left}
svg.chart{width:100%;height:auto}svg.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg.chart text.axis{font-size:12px}.grid{stroke:var(--line);fill:none}.reference{stroke:var(--text);
stroke-dasharray:5 4;fill:none}
.whisker{stroke:var(--text);fill:none;stroke-width:1.5}svg.tree{max-width:none}
.legend{list-style:none;padding:0;margin:.2rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
""" + "".join(
    f".s{i}{{fill:var(--c{i});background:var(--c{i})}}path.line.s{i}{{fill:none;background:none;stroke:var(--c{i});"
    f"stroke-width:2;{'' if i % 2 == 0 else 'stroke-dasharray:7 3'}}}"
    for i in range(8)
)


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table; the first cell of each row is its header.  ``scope`` tells screen readers what it heads."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in headers)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td{_text_class(cell)}>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text_class(cell: str) -> str:
    """Return the class attribute of a cell: none for a number, which is set to the right."""
    return "" if cell[:1] in "0123456789.-+" else ' class="text"'


def section_html(title: str, text: str, chart: str = "", table: str = "", wide: bool = False) -> str:
    """Return a section with a title, a text (HTML), a chart and a table beside it; ``wide`` puts the table below."""
    sides = (f"<figure>{chart}</figure>" if chart else "") + (f"<div>{table}</div>" if table else "")
    return (
        f'<section><h2>{escape(title)}</h2><p>{text}</p><div class="{"" if wide else "side"}">{sides}</div></section>'
    )


def page_html(title: str, intro: str, body: str) -> str:
    """Return a page with the style of all reports; ``body`` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"<p>{escape(intro)}</p>{body}</main></body></html>\n"
    )
