"""EAGLE-3 heads: the training-time test equals drafting row by row; training, resuming, the exported layout."""

import pytest
import torch

from tests.doubles.trained import DRAFT, HIDDEN, VOCAB, make_answers, make_features
from vllm_specplug.proposers.eagle2.checkpoint import load_head, validate_checkpoint
from vllm_specplug.proposers.eagle2.head import HeadConfig, rotary_table
from vllm_specplug.proposers.eagle3 import train as eagle3
from vllm_specplug.proposers.eagle3.head import Eagle3Head, layer_ids
from vllm_specplug.proposers.training import loop, trainer
from vllm_specplug.proposers.training.features import has_layer_features

LAYERS = (0, 1, 2)
IDS = torch.arange(DRAFT) + 5
ROWS = 8


def tiny_head() -> Eagle3Head:
    torch.manual_seed(0)
    return Eagle3Head(HeadConfig(HIDDEN, 24, 4, 2, 4), DRAFT)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return make_features(target, make_answers(), tmp_path_factory.mktemp("features"), LAYERS)


def train(target, data, out, **changes):
    stop = changes.pop("max_steps", None)
    settings = {"epochs": 1, "batch_tokens": 96, "draft_vocab_size": DRAFT, "align_steps": 3}
    options = eagle3.Eagle3Options(**(settings | changes))
    task = eagle3.Eagle3Task(target, IDS, options)
    return trainer.train(task, data, str(out), trainer.RunSettings(max_steps=stop, progress=False))


def drafted_alone(head, embeddings, features, start, steps):
    """The LM head's inputs of a drafter that reads rows 0..start and then drafts one row after the other."""
    layer, fused = head.midlayer, head.fuse(features)
    cos, sin = rotary_table(head.config, torch.arange(ROWS))
    keys, values, scored = [], [], []
    hidden = fused[:, : start + 1]
    for row in [slice(0, start + 1), *(slice(start + i, start + i + 1) for i in range(1, steps))]:
        query, key, value = layer.project(embeddings[:, row], hidden, cos[row], sin[row])
        keys.append(key)
        values.append(value)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, -1:], torch.cat(keys, 2), torch.cat(values, 2), enable_gqa=True
        )
        hidden = layer.finish(hidden[:, -1:], attended)
        scored.append(head.norm(hidden)[:, 0])
    return scored


def test_passes_equal_the_levels_of_a_draft_and_their_gradients():
    head = tiny_head()
    embeddings, features = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, 3 * HIDDEN)
    ours = head.aligned(embeddings, features, 4)
    for start in range(ROWS - 3):
        alone = drafted_alone(head, embeddings, features, start, 4)
        passes = [output[:, start + level] for level, output in enumerate(ours)]
        for a, b in zip(passes, alone, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        weights = [p for name, p in head.named_parameters() if name != "lm_head.weight"]
        for a, b in zip(
            torch.autograd.grad(sum(x.square().sum() for x in passes), weights, retain_graph=True),
            torch.autograd.grad(sum(x.square().sum() for x in alone), weights),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_loss_counts_the_rows_of_a_pass_that_have_a_past(target, data):
    task = eagle3.Eagle3Task(target, IDS, eagle3.Eagle3Options(align_steps=2, step_weight=0.5))
    task.prepare(data, fresh=True)
    batch = loop.make_batch(data, [0, 1, 2, 3])
    loss = task.losses(batch, 0, 1, torch.Generator())["ce"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = task.head.aligned(task.embedding[batch.next_ids].to(torch.bfloat16), batch.features, 2)
    known = batch.in_answer & torch.isin(batch.label_ids, IDS)
    expected = 0.0
    for index, output in enumerate(outputs):
        log_probs = (output.float() @ task.head.lm_head.weight.T).log_softmax(-1)
        probs = (batch.target_features.float() @ task.draft_head.float().T).softmax(-1)
        rows = -(probs * log_probs).sum(-1)
        counted = known.clone()
        counted[:, :index] = False
        expected += 0.5**index * (rows * counted).sum().item() / known.sum().item()
    assert loss.item() == pytest.approx(expected, rel=0.02)  # the loss is computed in bfloat16


def test_export_is_the_eagle3_layout(target, data, tmp_path):
    head = train(target, data, tmp_path)
    info = validate_checkpoint(tmp_path, HIDDEN, VOCAB, "eagle3")
    assert (info.draft_vocab_size, info.has_lm_head, info.has_d2t) == (DRAFT, True, True)
    config, state = load_head(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2] and config["tie_word_embeddings"] is False
    assert state["t2d"].nonzero()[:, 0].tolist() == IDS.tolist()
    again, ids = eagle3.load_trained(str(tmp_path))
    assert torch.equal(ids, IDS)
    x, y = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, 3 * HIDDEN)
    torch.testing.assert_close(again.aligned(x, y, 2)[1], head.aligned(x, y, 2)[1], atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_training_learns(target, data, tmp_path):
    def loss(head):
        task = eagle3.Eagle3Task(target, IDS, eagle3.Eagle3Options(align_steps=2))
        task.head = head
        return task.losses(loop.make_batch(data, list(range(8))), 0, 1, torch.Generator())["ce"].item()

    start = train(target, data, tmp_path / "a", max_steps=1)
    assert loss(train(target, data, tmp_path / "b", epochs=8, lr=3e-3)) < loss(start) - 0.005


def test_bad_input(target, data, tmp_path):
    with pytest.raises(ValueError, match="--align-steps must be at least 1"):
        eagle3.Eagle3Options(align_steps=0)
    plain = make_features(target, make_answers(3), tmp_path / "plain")
    with pytest.raises(ValueError, match="the data has none: use `specplug data --eagle3`"):
        train(target, plain, tmp_path / "out")
    assert not has_layer_features(tmp_path / "plain") and not has_layer_features(tmp_path / "nowhere")
    train(target, data, tmp_path / "head")
    options = eagle3.Eagle3Options()
    other = eagle3.Eagle3Task(target, IDS[:-1], options, str(tmp_path / "head"))
    with pytest.raises(ValueError, match="another draft vocabulary"):
        other.prepare(data, fresh=True)
    assert eagle3.Eagle3Task(target, IDS, options, str(tmp_path / "head")).head.lm_head.out_features == DRAFT


@pytest.mark.parametrize(("layers", "expected"), [(30, (2, 15, 27)), (6, (2, 3, 3)), (2, (0, 1, 2)), (4, (0, 2, 4))])
def test_layers_are_those_of_vllm(layers, expected):
    assert layer_ids({"num_hidden_layers": layers}) == expected


def test_resumed_training_is_bit_exact(target, data, tmp_path):
    straight = train(target, data, tmp_path / "a").state_dict()
    train(target, data, tmp_path / "b", max_steps=2)
    resumed = train(target, data, tmp_path / "b").state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
