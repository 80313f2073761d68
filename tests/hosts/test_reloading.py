"""Published versions of a drafter are taken between two steps: no request is lost, the tokens stay the same."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.doubles import tiny
from tests.hosts.conftest import (
    ENGINE,
    TREE,
    answers_of,
    counters,
    make_prompts,
    needs_bytes,
    record_drafts,
    runner_of,
)
from vllm_specplug.cpu import reloading, row_linear
from vllm_specplug.proposers.eagle2.checkpoint import WEIGHTS_NAME, save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads
from vllm_specplug.utils.published import publish

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MEDUSA = {"method": "medusa", "num_speculative_tokens": 8}
#: A request's key/value of an older version must not be read again.
OPTIONS = {**ENGINE, "enable_prefix_caching": False}


def write_medusa(path: Path, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    heads = MedusaHeads(3, 1, tiny.HIDDEN)
    state = {name: 0.3 * torch.randn_like(tensor) for name, tensor in heads.checkpoint_state().items()}
    save_head(path, {}, state)
    return path


WRITERS = {
    "eagle": tiny.write_drafter,
    "reduced": lambda path, seed=1: tiny.write_drafter(path, seed, draft_vocab=96, bias=True),
    "eagle3": tiny.write_eagle3_drafter,
    "medusa": write_medusa,
}
#: Kind of drafter, and its configuration.
CASES = {
    "by vLLM": ("reduced", {**TREE, "linear_rows": 0}),
    "by our operator": ("eagle3", {**TREE, "linear_rows": "all"}),
    "medusa": ("medusa", MEDUSA),
    "int8": ("reduced", {**TREE, "draft_int8": True}),
}


def published(head: Path, kind: str, seed: int = 1, change=lambda folder: None) -> int:
    """Publish a version; return its number."""

    def write(folder: Path) -> None:
        WRITERS[kind](folder, seed=seed)
        change(folder)

    return publish(head, write, {}).version


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_EVERY", 0.02)


@pytest.fixture(scope="module")
def start(engine, checkpoints):
    """``start(head, speculative, **options)``: an engine that follows the published folder."""
    engine()

    def make(head, speculative, **options):
        config = {**speculative, "model": str(head), "reload": True}
        if speculative["method"] == "union":
            sources = [{"model": str(head), **speculative["sources"][0]}, *speculative["sources"][1:]]
            config = {**speculative, "sources": sources, "reload": True}
        llm = LLM(str(checkpoints["target"]), speculative_config=config, **{**OPTIONS, **options})
        engine.kept.append(llm)
        return llm

    return make


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, seed=3)


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return answers_of(engine(), prompts, GREEDY)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def found_by(llm, version):
    """Wait until the engine's thread has found a version; the next steps take it."""
    followed = runner_of(llm).reloading
    wait_for(lambda: version in followed._pointer._seen)
    return followed


def taken(llm, version):
    """Let an engine without requests take a version; the one before need not be compared to the end."""
    followed = found_by(llm, version)
    followed._end_comparison()

    def ready():
        followed.before_step()
        return followed.version == version or (followed._reading is None and followed._pointer._found is None)

    wait_for(ready)
    assert followed.version == version


def drafts_of(llm, monkeypatch, prompts):
    """The drafts of some short answers."""
    with monkeypatch.context() as patch:
        if runner_of(llm).speculative_config.specplug.method == "medusa":
            found, heads = [], runner_of(llm).drafter.heads
            honest = heads.draft

            def draft(*args, **kwargs):
                drafted = honest(*args, **kwargs)
                found.append(drafted.tree.token_ids.tolist())
                return drafted

            patch.setattr(heads, "draft", draft)
        else:
            found = record_drafts(patch)
        llm.generate(prompts[:8], SHORT, use_tqdm=False)
        return found


@pytest.mark.parametrize("bounds", [(0, 1 << 30), (1 << 30, 0)], ids=["by vLLM", "by our operator"])
def test_new_weights_are_computed_as_the_old_ones(start, tmp_path, monkeypatch, prompts, plain, bounds):
    """`linear_rows` has a bound: each layer of a new version is packed as the one in use, whatever is left of it."""
    at_start, then = bounds
    monkeypatch.setattr(row_linear, "MOST_KEPT_TWICE", at_start)
    published(tmp_path / "head", "reduced")
    llm = start(tmp_path / "head", {**TREE, "linear_rows": 16})
    monkeypatch.setattr(row_linear, "MOST_KEPT_TWICE", then)
    version = published(tmp_path / "head", "reduced", seed=2)
    taken(llm, version)
    assert answers_of(llm, prompts, GREEDY) == plain


@pytest.mark.parametrize("case", [pytest.param(name, marks=needs_bytes) if name == "int8" else name for name in CASES])
def test_the_new_weights_draft(start, tmp_path, monkeypatch, prompts, plain, case):
    """Drafts are those of an engine that started with the version, and the old ones when its weights come back."""
    kind, speculative = CASES[case]
    head = tmp_path / "head"
    published(head, kind)
    llm = start(head, speculative, dtype="bfloat16") if case == "int8" else start(head, speculative)
    first = drafts_of(llm, monkeypatch, prompts)
    taken(llm, published(head, kind, seed=5))
    second = drafts_of(llm, monkeypatch, prompts)
    if case != "int8":
        assert answers_of(llm, prompts, GREEDY) == plain
    other = start(head, speculative, dtype="bfloat16") if case == "int8" else start(head, speculative)
    assert runner_of(other).reloading.version == 2
    expected = drafts_of(other, monkeypatch, prompts)
    assert second == expected != first
    taken(llm, published(head, kind, seed=1))
    assert drafts_of(llm, monkeypatch, prompts) == first


def damage(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors["layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / WEIGHTS_NAME)


def test_requests_run_while_versions_change(start, tmp_path, monkeypatch, engine, caplog):
    """Eight requests at once, preempted, some sampled: three versions of a drafter are taken, a damaged one is not."""
    head = tmp_path / "head"
    published(head, "reduced")
    source = {key: value for key, value in TREE.items() if key != "budget"}
    union = {"method": "union", "sources": [source, {"method": "lookup"}], "num_speculative_tokens": 16}
    small = {"kv_cache_memory_bytes": 1 << 19, "block_size": 32}
    llm = start(head, union, **small)
    prompts = make_prompts(24, seed=8)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=100, ignore_eos=True) for i in range(len(prompts))
    ]
    expected = answers_of(engine(), prompts, params)
    followed, steps, taken_at = runner_of(llm).reloading, [0], []
    honest = followed.before_step

    def before_step():
        steps[0] += 1
        if steps[0] in (10, 20, 30, 40):
            change = damage if steps[0] == 20 else lambda folder: None
            found_by(llm, published(head, "reduced", steps[0], change))
        version = followed.version
        if followed._reading is not None:
            wait_for(lambda: followed._reading.has_ended)
        honest()
        if followed.version != version:
            taken_at.append((followed.version, len(runner_of(llm).requests)))
        if followed._comparison is not None:  # the next version does not wait for it
            followed._comparison._looks.clear()

    monkeypatch.setattr(followed, "before_step", before_step)
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        assert answers_of(llm, prompts, params) == expected
    assert [version for version, _ in taken_at] == [2, 4, 5]
    (warning,) = (one.getMessage() for one in caplog.records if "drafter" in one.getMessage())
    assert "version 3 of the drafter is not taken" in warning and "down_proj.weight has values" in warning
    assert all(running > 1 for _, running in taken_at)
    assert counters(llm)["preemptions"] > 0


def test_what_is_no_published_folder_is_refused(checkpoints, tmp_path):
    shutil.copytree(checkpoints["eagle"], tmp_path / "drafter")
    for speculative in ({**TREE, "model": str(tmp_path / "drafter")}, {"method": "lookup"}):
        with pytest.raises(ValueError, match="reload=true needs a drafter in a folder that `specplug learn` publishes"):
            LLM(str(checkpoints["target"]), speculative_config={**speculative, "reload": True}, **OPTIONS)
