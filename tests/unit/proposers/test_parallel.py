"""Parallel EAGLE heads: mask rows equal drafting them in one forward; training, resuming, checkpoints, trees."""

import pytest
import torch
from torch.nn import functional as F

from tests.doubles.trained import DRAFT, HIDDEN, VOCAB, make_answers, make_features
from vllm_specplug.proposers.eagle2.checkpoint import load_head, validate_checkpoint
from vllm_specplug.proposers.eagle2.head import HeadConfig, rotary_table
from vllm_specplug.proposers.eagle2.parallel import ParallelHead
from vllm_specplug.proposers.training import eagle, features, loop, parallel, trainer
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.trees import tree_tau

IDS = torch.arange(DRAFT)
ROWS, LEVELS = 9, 4


def tiny_head(rank: int = 8) -> ParallelHead:
    torch.manual_seed(0)
    head = ParallelHead(HeadConfig(HIDDEN, 24, 4, 2, 4), torch.randn(HIDDEN), rank)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    head.input_scale.uniform_(0.5, 2.0)
    return head


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return make_features(target, make_answers(), tmp_path_factory.mktemp("features"))


def train(target, data, out, init_from=None, **changes):
    stop = changes.pop("max_steps", None)
    settings = {"epochs": 1, "batch_tokens": 96, "draft_vocab_size": DRAFT, "align_steps": 3, "rank": 8}
    task = parallel.ParallelTask(target, IDS, parallel.ParallelOptions(**(settings | changes)), init_from)
    return trainer.train(task, data, str(out), trainer.RunSettings(max_steps=stop, progress=False))


@torch.no_grad()
@pytest.mark.parametrize("rank", [0, 8])
def test_passes_equal_one_forward_over_mask_rows(rank):
    head = tiny_head(rank)
    embeddings, feats = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, HIDDEN)
    passes, layer = head.aligned(embeddings, feats, LEVELS), head.layers[0]
    for root in range(ROWS - LEVELS + 1):
        read = head.combine(embeddings[:, : root + 1], feats[:, : root + 1])
        x = torch.cat([read, head.mask_input().expand(1, LEVELS - 1, -1)], dim=1)
        query, key, value = layer.self_attn.project(x, *rotary_table(head.config, torch.arange(x.shape[1])))
        rows = layer.finish(x, F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        torch.testing.assert_close(passes[0][:, root], rows[:, root], atol=1e-4, rtol=1e-4)
        for level in range(1, LEVELS):
            row = root + level
            expected = head.follows(rows[:, row], embeddings[:, row])
            torch.testing.assert_close(passes[level][:, row], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_folding_the_input_scale_keeps_the_function():
    head = tiny_head()
    plain = ParallelHead(head.config, head.mask_embedding, 8)
    plain.load_state_dict(head.folded_state())
    x, y = torch.randn(2, 3, HIDDEN), torch.randn(2, 3, HIDDEN)
    for one, other in zip(plain.aligned(x, y, 3), head.aligned(x, y, 3), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_resumed_training_is_bit_exact(target, data, tmp_path):
    straight = train(target, data, tmp_path / "a").state_dict()
    train(target, data, tmp_path / "b", max_steps=2)
    resumed = train(target, data, tmp_path / "b").state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_training_learns_the_mask_rows(target, data, tmp_path):
    def loss(head):
        options = parallel.ParallelOptions(align_steps=3, rank=8)
        task = parallel.ParallelTask(target, IDS, options)
        task.head = head
        batch = loop.make_batch(data, list(range(8)))
        with torch.no_grad():
            return sum(one.item() for one in task.losses(batch, 0, 1, torch.Generator().manual_seed(0)).values())

    start = train(target, data, tmp_path / "a", max_steps=1)
    begin = {name: weight.clone() for name, weight in start.state_dict().items()}
    end = train(target, data, tmp_path / "b", epochs=6, lr=3e-3)
    assert loss(end) < loss(start) - 0.005
    for name in ("mask_hidden", "follow.down.weight", "follow.up.weight"):
        assert not torch.equal(begin[name], end.state_dict()[name])


@pytest.mark.parametrize("rank", [0, 8])
def test_a_checkpoint_keeps_what_the_head_computes(target, data, tmp_path, rank):
    head = train(target, data, tmp_path, rank=rank)
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB).kind == "eagle"
    config, state = load_head(tmp_path)
    assert (config["ptd_token_id"], config["follow_rank"]) == (2, rank)
    assert state["mask_hidden"].shape == (HIDDEN,) and ("follow.up.weight" in state) == bool(rank)
    again, ids = eagle.load_trained(tmp_path, features.target_head(target)[1])
    assert torch.equal(ids, IDS)
    x, y = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, HIDDEN)
    for one, other in zip(again.aligned(x, y, 3), head.aligned(x, y, 3), strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def test_training_starts_from_an_eagle_head_and_goes_on_from_a_parallel_one(target, data, tmp_path):
    options = eagle.EagleOptions(epochs=1, batch_tokens=96, draft_vocab_size=DRAFT)
    quiet = trainer.RunSettings(progress=False)
    first = trainer.train(eagle.EagleTask(target, IDS, options), data, str(tmp_path / "eagle"), quiet)
    second = train(target, data, tmp_path / "b", str(tmp_path / "eagle"), lr=1e-9)
    torch.testing.assert_close(second.fc.weight, first.fc.weight, atol=0.02, rtol=0.02)
    third = train(target, data, tmp_path / "c", str(tmp_path / "b"), lr=1e-9)
    for name, weight in second.state_dict().items():
        torch.testing.assert_close(third.state_dict()[name], weight, atol=0.02, rtol=0.02)
    with pytest.raises(ValueError, match="rank 8, not 2 and 4: train with --rank 8"):
        train(target, data, tmp_path / "d", str(tmp_path / "b"), rank=4)


@torch.no_grad()
def test_a_chain_is_a_tree_of_width_one(target, data):
    """The trees' own computation of a draft against that of the passes."""
    head, (_, embedding, lm_head) = tiny_head(), features.target_head(target)
    lm_head = lm_head[:DRAFT].float()
    chain = chain_acceptance(head, data, embedding, lm_head, IDS, depth=3).by_answer
    tree = tree_tau(head, data, embedding, lm_head, IDS, nodes=3, depth=3, beam=1)
    assert tree == chain and sum(cycles for _, cycles in chain) < sum(tokens for tokens, _ in chain)
