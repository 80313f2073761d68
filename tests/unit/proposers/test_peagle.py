"""P-EAGLE heads: the passes equal the positions of a draft; training, starting from a head, the exported layout."""

import pytest
import torch

from tests.doubles.trained import DRAFT, HIDDEN, VOCAB, make_answers, make_features
from vllm_specplug.cli.inspection import inspect
from vllm_specplug.config import parse_options
from vllm_specplug.proposer import TargetInfo, find_method
from vllm_specplug.proposers.dflash import train as peagle
from vllm_specplug.proposers.dflash.peagle import PEagleHead
from vllm_specplug.proposers.eagle2.checkpoint import validate_parallel
from vllm_specplug.proposers.eagle2.head import HeadConfig, rotary_table
from vllm_specplug.proposers.training import loop, trainer
from vllm_specplug.proposers.training.features import target_head

LAYERS = (0, 1, 2)
IDS = torch.arange(DRAFT) + 5
ROWS = 8


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return make_features(target, make_answers(), tmp_path_factory.mktemp("features"), LAYERS)


def task_of(target, init_from=None, **changes):
    settings = {"epochs": 1, "batch_tokens": 96, "draft_vocab_size": DRAFT, "align_steps": 3}
    return peagle.PEagleTask(target, IDS, peagle.PEagleOptions(**(settings | changes)), init_from)


def train(target, data, out, init_from=None, max_steps=None, **changes):
    settings = trainer.RunSettings(max_steps=max_steps, progress=False)
    return trainer.train(task_of(target, init_from, **changes), data, str(out), settings)


def predicted_alone(head, embeddings, features, start, steps):
    """The LM head's inputs of a drafter that reads rows 0..start and then as many masks, in one causal forward."""
    masks = head.mask_embedding.expand(1, steps - 1, -1)
    embeddings = torch.cat([embeddings[:, : start + 1], masks], dim=1)
    hidden = head.fuse(torch.cat([features[:, : start + 1], head.mask_hidden.expand(1, steps - 1, -1)], dim=1))
    cos, sin = rotary_table(head.config, torch.arange(start + steps))
    for layer in (head.midlayer, *head.layers.values()):
        inputs = (embeddings, hidden) if layer is head.midlayer else (hidden,)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *layer.project(*inputs, cos, sin), is_causal=True, enable_gqa=True
        )
        hidden = layer.finish(hidden, attended)
    return head.norm(hidden)[:, start:]


def test_passes_equal_the_positions_of_a_draft():
    torch.manual_seed(0)
    head = PEagleHead(HeadConfig(HIDDEN, 24, 4, 2, 4), DRAFT, num_layers=3)
    torch.nn.init.normal_(head.mask_hidden)
    torch.nn.init.normal_(head.mask_embedding)
    embeddings, features = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, 3 * HIDDEN)
    passes = head.aligned(embeddings, features, 4)
    for start in range(ROWS - 3):
        ours = torch.stack([output[:, start + position] for position, output in enumerate(passes)], dim=1)
        torch.testing.assert_close(ours, predicted_alone(head, embeddings, features, start, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_training_learns(target, data, tmp_path):
    def loss(head):
        task = task_of(target)
        task.prepare(data, fresh=True)
        task.head = head
        return task.losses(loop.make_batch(data, list(range(8))), 0, 1, torch.Generator())["ce"].item()

    start = train(target, data, tmp_path / "a", max_steps=1)
    assert loss(train(target, data, tmp_path / "b", epochs=20, lr=3e-3)) < loss(start) - 0.002


def test_a_checkpoint_has_the_speculators_format(target, data, tmp_path):
    head = train(target, data, tmp_path / "head", num_layers=3)
    info = validate_parallel(tmp_path / "head", HIDDEN, VOCAB, 2)
    assert (info.num_layers, info.draft_vocab_size, info.aux_layers) == (3, DRAFT, LAYERS)
    options = parse_options({"method": "dflash_tree", "model": str(tmp_path / "head")})
    config = find_method("dflash_tree").model.configure(options, TargetInfo(HIDDEN, VOCAB, 2, torch.float32))
    assert (config.options.draft_depth, config.config_entries["ptd_token_id"]) == (3, 2)  # Llama's end token
    found = inspect(str(tmp_path / "head"))
    assert (found.kind, found.problem, found.trained_as) == ("peagle", None, "P-EAGLE, 3 positions")
    again, ids = peagle.load_trained(str(tmp_path / "head"), target_head(target)[1])
    assert torch.equal(ids, IDS)
    x, y = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, 3 * HIDDEN)
    torch.testing.assert_close(again.aligned(x, y, 2)[1], head.aligned(x, y, 2)[1], atol=0.05, rtol=0.05)


def test_training_starts_from_a_head(target, data, tmp_path):
    train(target, data, tmp_path / "head")
    task = task_of(target, str(tmp_path / "head"))
    task.prepare(data, fresh=True)
    again, _ = peagle.load_trained(str(tmp_path / "head"), task.embedding)
    for name, tensor in task.head.folded_state().items():
        torch.testing.assert_close(tensor, again.state_dict()[name])
    with pytest.raises(ValueError, match="has 2 layers: train with --num-layers 2"):
        task_of(target, str(tmp_path / "head"), num_layers=1)
