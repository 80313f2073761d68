"""Heads that predict all positions in one forward, on the V2 model runner: DFlash, DFlash 2, DSpark, P-EAGLE."""

from __future__ import annotations

import pytest
import torch

from tests.doubles import dflash
from tests.hosts.conftest import acceptance_length
from tests.v2.conftest import (
    ENGINE,
    SAMPLED,
    SCARCE,
    answers,
    check_preemption,
    check_prefix_cache_hits,
    same,
    watch_rounds,
)
from vllm_specplug.core import draft_sampling
from vllm_specplug.core.growth import TORCH_STATIC
from vllm_specplug.gpu.kernels import growth
from vllm_specplug.proposers.dflash.drafting import WIDTH, grow_block

PROVEN = True
TREE = {"method": "dflash_tree", "num_speculative_tokens": 9, "budget": "fixed", "min_node_value": 0.0}


@pytest.mark.interpreted
def test_growth_by_kernels():
    """By logits that depend on the token before."""
    torch.manual_seed(0)
    base, pairs, roots = torch.randn(2, 3, 40), torch.randn(40, 40), torch.tensor([1, 4])

    def grown(likeliest, ops):
        def children(position, token_ids, top_k):
            return likeliest((base[:, position, None] + pairs[token_ids]).flatten(0, 1), top_k)

        return grow_block(roots, children, num_positions=3, num_nodes=9, width=WIDTH, ops=ops)

    expected, found = grown(draft_sampling.likeliest, TORCH_STATIC), grown(growth.likeliest, growth.KERNELS)
    assert torch.equal(found.tree.token_ids, expected.tree.token_ids)
    assert torch.equal(found.tree.parents, expected.tree.parents)
    assert torch.allclose(found.log_values, expected.log_values, atol=1e-5)


def write_head(checkpoints, prompts, path, form=dflash.PLAIN):
    """A head that knows the answers by heart."""
    known = [one["prompt_token_ids"] for one in prompts]
    checkpoints[path.name] = dflash.write_head(path, checkpoints["target"], known, 16, form=form)
    return path.name


def test_dflash(engine, prompts, plain, plainly, checkpoints, tmp_path, monkeypatch):
    """Then with too few blocks and with prompts in chunks, without a look at the device."""
    head = write_head(checkpoints, prompts, tmp_path / "dflash")
    llm = engine(head, TREE, **ENGINE)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 2
    assert same(answers(llm, prompts, SAMPLED), plainly(prompts, SAMPLED))
    check_prefix_cache_hits(plainly, llm, prompts)
    scarce = engine(head, TREE, **SCARCE)
    rounds = watch_rounds(scarce, monkeypatch)
    check_preemption(scarce, prompts, plain)
    assert len(rounds) > 4


@pytest.mark.wide
@pytest.mark.parametrize("form", dflash.FORMS)
def test_other_forms(engine, prompts, plain, checkpoints, tmp_path, form):
    llm = engine(write_head(checkpoints, prompts, tmp_path / form, dflash.FORMS[form]), TREE, **ENGINE)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 2
