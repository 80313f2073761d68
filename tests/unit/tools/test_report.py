import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vllm_specplug.tools import cli, report
from vllm_specplug.tools.bench.methods import parse_methods
from vllm_specplug.tools.bench.results import build_report, render
from vllm_specplug.tools.bench.workers import Measurement
from vllm_specplug.utils import charts

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Collects tags in order, checks their nesting, and collects links and the texts of table cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.cells, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def svgs(text):
    return [
        ElementTree.fromstring(part[: part.index("</svg>") + 6])
        for part in text.split("<svg")[1:]
        for part in ["<svg" + part]
    ]


def made(label, category, seconds, ids, drafts=0, depths=(), concurrency=1, repeat=0):
    m = Measurement([label], category, seconds, [ids], drafts, sum(depths), list(depths), [0.25], [0.0125])
    m.concurrency, m.repeat = concurrency, repeat
    return m


@pytest.fixture
def results():
    methods = parse_methods("plain,eagle2")
    cases = [
        ("a", "maths", 1, 0),
        ("b", "<code>", 1, 0),
        ("a", "maths", 1, 1),
        ("b", "<code>", 1, 1),
        ("a", "mixed", 4, 0),
    ]
    measured = {"plain": [], "eagle2": []}
    for name, category, concurrency, repeat in cases:
        measured["plain"].append(made(name, category, 2.0, [1] * 20, concurrency=concurrency, repeat=repeat))
        seconds = {4: 2.5}.get(concurrency, 1.0 + repeat)
        measured["eagle2"].append(
            made(name, category, seconds, [1] * 20, 10, (6, 3, 1, 0), concurrency=concurrency, repeat=repeat)
        )
    settings = {"questions": "q.jsonl", "num_questions": 2, "dtype": "bfloat16", "concurrency": "1,4"}
    settings |= {"max_tokens": 20, "model": "tiny", "repeats": 2, "temperature": 0.0}
    found = build_report(methods, measured, {"plain": 900, "eagle2": 950}, settings)
    stages = {
        "rounds": 9,
        "round_ms": 20.0,
        "verify_ms": 14.0,
        "draft_forward_ms": 3.0,
        "draft_other_ms": 1.0,
        "host_ms": 2.0,
    }
    found["methods"]["plain"]["stages"] = stages | {"draft_forward_ms": 0.0, "draft_other_ms": 0.0}
    found["methods"]["eagle2"] |= {
        "stages": stages,
        "trees": [
            {
                "tokens": ["<root>", " a", " b&", "\n"],
                "parents": [-1, 0, 0, 1],
                "accepted_rows": [0, 1],
                "log_values": [-0.5, -1, -2],
            }
        ],
        "sources": {"head": {"drafted": 71, "accepted": 43, "alone": 29}},
        "calibration": {"error": 0.031, "bins": [{"outcomes": 40, "predicted": 0.15, "accepted": 0.2}]},
    }
    steps = [{"nodes": 1, "step_ms": 12.0}, {"nodes": 8, "step_ms": 15.0}]
    found["step_cost"] = {"steps": steps, "weight_bytes": 200_000_000, "read_gb_s": 20.0, "threads": 1}
    return found


CLAIM = {
    "title": "Dynamic against static",
    "source": "EAGLE-2, table 5",
    "claim": "4.62 against 4.24.",
    "verdict": "holds",
    "headers": ["tree", "tau"],
    "rows": [["static", 1.7], ["dynamic", 1.9]],
}


def test_figures_by_depth_repeat_and_concurrency(results):
    overall = results["methods"]["eagle2"]["overall"]
    assert overall["speedup"] == 1.333 and overall["speedup_by_repeat"] == [2.0, 1.0]
    assert overall["acceptance_by_depth"] == [0.6, 0.3, 0.1] and overall["tau"] == 2.0
    assert overall["first_token_ms"] == 250.0 and overall["inter_token_ms"] == 12.5
    assert list(results["methods"]["eagle2"]["concurrency"]) == ["1", "4"]
    assert results["methods"]["eagle2"]["concurrency"]["4"]["speedup"] == 0.8
    assert list(results["methods"]["eagle2"]["categories"]) == ["maths", "<code>"]
    text = render(results, markdown=True)
    assert "1.00-2.00x" in text and "15%" in text
    assert ["|", "concurrency", "|", "eagle2", "speedup", "|"] in [line.split() for line in text.splitlines()]
    methods = results["methods"]
    asked = {k: [b | {"questions": [f"q{i}"]} for i in range(5) for b in m["batches"]] for k, m in methods.items()}
    wide = {**results, "methods": {k: m | {"batches": asked[k]} for k, m in methods.items()}}
    assert "1.33x (1.33-1.33)" in render(wide)
    row = next(line.split() for line in text.splitlines() if line.startswith("| eagle2"))
    assert row[5:8] == ["1.33x", "|", "1.00-2.00x"]  # two questions are too few for an interval
    assert row[9:12] == ["1.40x", "|", "17%"]  # after the first token (19 tokens a question), and the time until then
    assert "1.33x (1.00-2.00)" in text  # by concurrency, with the passes
    installed = results | {"provenance": results["provenance"] | {"commit": None}}  # a package has no commit
    assert "; commit unknown; " in render(installed)


def test_answers_of_one_token_have_no_speedup_after_it():
    methods = parse_methods("plain,eagle2")
    measured = {method.label: [made("a", "maths", 0.25, [1])] for method in methods}
    settings = {"questions": "q", "num_questions": 1, "dtype": "float32", "concurrency": "1", "max_tokens": 1}
    text = render(build_report(methods, measured, {"plain": 1, "eagle2": 1}, settings))
    assert "1.00x" in text and "after first token" not in text


def test_a_page_stands_alone_and_is_well_formed(results):
    text = report.build_page(report.Results([results], [CLAIM]))
    page = Page(text)
    assert not page.links and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "script" not in page.tags and "Not measured" not in text
    drawn = svgs(text)
    assert len(drawn) == 9  # Eight charts and a tree.
    assert page.tags.count("table") == 11
    for cell in ("1.33", "0.80", "0.60", "0.15", "12.00", "15%", "maths", "<code>", "dynamic", "1.9", "head", "29"):
        assert cell in page.cells, cell
    assert "takes 10.00 ms" in text and "4.62 against 4.24." in text
    assert "accepted: “&lt;root&gt; a”" in text


def test_a_bare_run_says_what_is_missing(results):
    for method in results["methods"].values():
        for key in ("stages", "trees", "calibration", "concurrency"):
            method.pop(key, None)
        method["overall"]["acceptance_by_depth"] = []
    results.pop("step_cost")
    text = report.build_page(report.Results([results]))
    Page(text)
    assert text.count("Not measured in this run") == 7
    assert "--look-inside" in text and "--concurrency" in text


PUBLISHED = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("*.json"))


def test_every_published_result_makes_a_page():
    for file in PUBLISHED:
        results = report.read_results([file])
        page = Page(report.build_page(results))
        assert len(page.cells) > 4, file
        assert bool(svgs(report.build_page(results))) == bool(results.benchmarks)
    assert len(report.read_results(PUBLISHED).benchmarks) > 5


def test_bars_are_as_high_as_their_values():
    [chart] = svgs(charts.bar_chart("t", ["x", "y"], {"a": [1.0, 2.0], "b": [None, 0.5]}, reference=1.0))
    heights = [float(e.get("height")) for e in chart if e.tag == "rect"]
    assert heights == pytest.approx([heights[1] / 2, heights[1], heights[1] / 4], abs=0.11)
    line = next(e for e in chart if e.get("class") == "reference").get("d").split()
    top = next(float(e.get("y")) for e in chart if e.tag == "rect")
    assert float(line[1].split("H")[0]) == pytest.approx(top, abs=0.11)


def test_lines_go_through_their_points():
    [chart] = svgs(charts.line_chart("t", {"a": [(1, 1), (2, 3), (4, 2)]}, "x", "y", log_x=True))
    spots = [(float(e.get("cx")), float(e.get("cy"))) for e in chart if e.tag == "circle"]
    (x1, y1), (x2, y2), (x4, y4) = spots
    assert x2 - x1 == pytest.approx(x4 - x2, abs=0.2)
    assert y1 - y4 == pytest.approx(y4 - y2, abs=0.2) and y2 < y4 < y1


def test_stacked_parts_add_up():
    [chart] = svgs(charts.stacked_bars("t", {"a": {"p": 1.0, "q": 3.0}, "b": {"p": 2.0, "q": 0.0}}))
    bars = [(float(e.get("x")), float(e.get("width"))) for e in chart if e.tag == "rect"]
    assert bars[1][0] == pytest.approx(sum(bars[0]), abs=0.11) and bars[1][1] == pytest.approx(3 * bars[0][1], abs=0.3)
    assert bars[2][1] == pytest.approx(2 * bars[0][1], abs=0.3)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.037), (0.8, 1.9), (5, 5), (0, 1234)])
def test_ticks_cover_the_range(low, high):
    marks = charts.ticks(low, high)
    steps = {round(b - a, 9) for a, b in zip(marks, marks[1:], strict=False)}
    assert marks[0] <= low and marks[-1] >= high and len(steps) == 1 and 2 <= len(marks) <= 8


def test_command(results, tmp_path, capsys):
    run, claims, out = tmp_path / "run.json", tmp_path / "claims.json", tmp_path / "page.html"
    run.write_text(json.dumps(results))
    claims.write_text(json.dumps({"reproductions": [CLAIM]}))
    assert cli.main(["report", str(run), str(claims), "--out", str(out)]) == 0
    assert "Dynamic against static" in out.read_text()
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": [{"ms": 7.25}]}))
    assert cli.main(["report", str(other), "--out", str(out)]) == 0
    assert "rows[0].ms" in out.read_text() and "7.25" in out.read_text()
    for content, said in ((None, "No such file"), ("{", "is not JSON"), ("[1]", "has no results")):
        file = tmp_path / f"bad{len(said)}.json"
        if content is not None:
            file.write_text(content)
        assert cli.main(["report", str(file), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert said in error and "Errno" not in error


def test_a_browser_shows_the_page(results, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    # The browser reports the width of the page's content in its title.
    probe = (
        "<script>document.title = document.documentElement.scrollWidth + '/' + innerWidth + ' ' "
        "+ document.querySelectorAll('svg').length</script>"
    )
    page.write_text(report.build_page(report.Results([results], [CLAIM])).replace("</body>", probe + "</body>"))
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [f"--screenshot={picture}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    title = shown.split("<title>")[1].split("</title>")[0]
    widths, count = title.split()
    content, window = map(int, widths.split("/"))
    assert content <= window and count == "9"
    assert picture.stat().st_size > 10_000
