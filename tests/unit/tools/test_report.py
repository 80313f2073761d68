import pytest

from vllm_specplug.bench.methods import parse_methods
from vllm_specplug.bench.results import build_report, interval_of, render
from vllm_specplug.bench.workers import Measurement


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
    found["methods"]["eagle2"]["stages"] = stages
    return found


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
    assert "1.33x (1.33-1.33) " in render(wide) and "1.33x (1.33-1.33), passes 1.00-2.00" in render(wide)
    row = next(line.split() for line in text.splitlines() if line.startswith("| eagle2"))
    assert row[5:8] == ["1.33x", "|", "1.00-2.00x"]  # two questions are too few for an interval
    assert row[9:12] == ["1.40x", "|", "17%"]  # after the first token (19 tokens a question), and the time until then
    assert "1.33x, passes 1.00-2.00" in text  # by concurrency; brackets are for intervals only
    installed = results | {"provenance": results["provenance"] | {"commit": None}}  # a package has no commit
    assert "; commit unknown; " in render(installed)


def test_answers_of_one_token_have_no_speedup_after_it():
    methods = parse_methods("plain,eagle2")
    measured = {method.label: [made("a", "maths", 0.25, [1])] for method in methods}
    settings = {"questions": "q", "num_questions": 1, "dtype": "float32", "concurrency": "1", "max_tokens": 1}
    text = render(build_report(methods, measured, {"plain": 1, "eagle2": 1}, settings))
    assert "1.00x" in text and "after first token" not in text


def test_an_interval_of_five_questions(results):
    methods, seconds = results["methods"], (1.0, 1.5, 2.0, 1.2, 1.8)
    for method in methods.values():  # of one category and concurrency
        one = next(b for b in method["batches"] if b["category"] == "maths")
        method["batches"] = [one | {"questions": [f"q{i}"], "tokens": 20, "seconds": s} for i, s in enumerate(seconds)]
        method["categories"] = {"maths": method["overall"]}
    for batch in methods["plain"]["batches"]:
        batch["seconds"] = 2.0
    low, high = interval_of(results, "eagle2")
    assert low < high and render(results).count(f"({low:.2f}-{high:.2f})") == 2  # overall and by concurrency
