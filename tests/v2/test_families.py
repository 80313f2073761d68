"""Each kind of drafter on targets of other families than Llama, on the V2 model runner (``pytest -m wide``).

Heads are trained for seconds.  Greedy and seeded, with prefix hits, then with too few blocks and prompts in chunks.
"""

from __future__ import annotations

import pytest

from tests.doubles import mtp
from tests.doubles.families import DRAFTERS, FAMILIES
from tests.hosts.conftest import acceptance_length, expert_group  # noqa: F401
from tests.v2.conftest import (
    ENGINE,
    PLAIN,
    SAMPLED,
    SCARCE,
    answers,
    asked_once,
    check_preemption,
    check_prefix_cache_hits,
    same,
)
from tests.v2.test_dflash import TREE as BLOCK_TREE
from tests.v2.test_heads import TREE

PROVEN = True
pytestmark = pytest.mark.wide

TREES = {"eagle2": TREE, "dflash_tree": BLOCK_TREE, "draft_tree": {**TREE, "method": "draft_tree"}}


def check(engine, target, prompts, plainly, drafter=None, **tree):
    """Compare with plain vLLM's answers; return tau."""
    if drafter is None:
        tree = {"speculative_config": tree["tree"]}
    llm = engine(drafter, target=target, **tree, **ENGINE)
    assert same(answers(llm, prompts), plainly(prompts))
    tau = acceptance_length(llm)
    assert same(answers(llm, prompts, SAMPLED), plainly(prompts, SAMPLED))
    check_prefix_cache_hits(plainly, llm, prompts)
    check_preemption(engine(drafter, target=target, **tree, **SCARCE), prompts, plainly(prompts))
    return tau


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, engine, checkpoints, prompts, tmp_path_factory):
    """Name of the target, plain answers, and the texts that heads know."""
    name = request.param
    checkpoints[name] = tmp_path_factory.mktemp("family") / "target"
    FAMILIES[name](checkpoints[name])
    plainly = asked_once(lambda: engine(target=name, **PLAIN))
    texts = [(one["prompt_token_ids"], out[0]) for one, out in zip(prompts, plainly(prompts)[0], strict=True)]
    return name, plainly, texts


@pytest.mark.parametrize("method", TREES)
def test_same_as_plain(engine, checkpoints, prompts, tmp_path, family, method):
    name, plainly, texts = family
    drafter = f"{name} {method}"
    checkpoints[drafter] = DRAFTERS[method](tmp_path / "drafter", checkpoints[name], texts)
    assert check(engine, name, prompts, plainly, drafter, tree=TREES[method]) > 1.2


@pytest.mark.parametrize("name", ["MiMo", "GLM-4 MoE", "ERNIE"])
def test_mtp_layers(engine, checkpoints, prompts, tmp_path, expert_group, name):  # noqa: F811
    checkpoints[name] = mtp.write_with_mtp(tmp_path / "target", name)
    plainly = asked_once(lambda: engine(target=name, **PLAIN))
    assert check(engine, name, prompts, plainly, tree={**TREE, "method": "mtp_tree"}) > 1.2
