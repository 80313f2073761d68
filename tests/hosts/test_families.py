"""Each kind of drafter on targets of other families than Llama, whose heads are trained for seconds.

MTP layers of four families are in ``test_mtp.py``; EAGLE-1 heads of many in ``test_architectures.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.families import DRAFTERS, FAMILIES
from tests.hosts.conftest import WHOLE, answers_of, check_prefix_cache_hits
from tests.hosts.same_as_plain import PARAMS, PROMPTS, SCARCE, SETTINGS, check_as_plain
from tests.hosts.test_draft_tree import TREE

#: In ``make test`` other files have each drafter, and each kind of layer of these targets.
pytestmark = pytest.mark.wide
GROWN = {"num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3, **WHOLE}
TREES = {
    "eagle2": {"method": "eagle2", **GROWN},
    "dflash_tree": {"method": "dflash_tree", "num_speculative_tokens": 12, "budget": "fixed", "min_node_value": 0.0},
    "draft_tree": TREE,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, engine, checkpoints, tmp_path_factory) -> tuple[str, Any, list[Any]]:
    """Name of the target, plain engine, and its greedy answers: heads know them."""
    name = request.param
    checkpoints[name] = tmp_path_factory.mktemp("family") / "target"
    FAMILIES[name](checkpoints[name])
    plain = engine(target=name, **SETTINGS)
    greedy = list(zip(PROMPTS, answers_of(plain, PROMPTS, PARAMS), strict=True))[::2]
    return name, plain, [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in greedy]


@pytest.mark.parametrize("method", TREES)
def test_same_as_plain(engine, checkpoints, tmp_path, family, method):
    """Greedy and seeded; too few KV blocks, chunked prefill, then prompts that continue answers."""
    name, plain, texts = family
    drafter = f"{name} {method}"
    checkpoints[drafter] = DRAFTERS[method](tmp_path / "drafter", checkpoints[name], texts)
    llm = engine(drafter, TREES[method], target=name, **SCARCE, **SETTINGS)
    assert check_as_plain(plain, llm) > 1.2
    check_prefix_cache_hits(plain, llm, PROMPTS[:2])
