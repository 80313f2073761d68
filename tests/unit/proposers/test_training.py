"""Training on a tiny random target: exact resume, the loss's gradient, HASS alignment, offline acceptance."""

import os
import signal

import pytest
import torch
from torch.nn import functional as F

from tests.doubles.trained import DRAFT, HIDDEN, VOCAB, make_answers
from vllm_specplug.proposers.eagle2.checkpoint import load_head, save_head, validate_checkpoint
from vllm_specplug.proposers.eagle2.head import EagleHead, HeadConfig
from vllm_specplug.proposers.training import answers as answer_files
from vllm_specplug.proposers.training import command, eagle, features, loop, losses, trainer
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.trees import tree_tau


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return make_answers()


def small(**changes) -> eagle.EagleOptions:
    settings = {"epochs": 1, "batch_tokens": 96, "draft_vocab_size": DRAFT, "lr": 1e-3}
    return eagle.EagleOptions(**(settings | changes))


def train(target, data, out, **changes):
    stop = changes.pop("max_steps", None)
    task = eagle.EagleTask(target, torch.arange(DRAFT), small(**changes))
    return trainer.train(task, data, str(out), trainer.RunSettings(max_steps=stop, progress=False))


# ---- answers and features


def test_draft_vocabulary_prefers_answers_and_keeps_the_end_token():
    rows = [Answer("a", [5, 5, 5, 6], [9, 9, 3])]
    assert answer_files.select_draft_vocabulary(rows, 3, 20).tolist() == [3, 5, 9]
    assert answer_files.select_draft_vocabulary(rows, 3, 20, keep=[2]).tolist() == [2, 3, 9]
    assert answer_files.select_draft_vocabulary(rows, 20, 20).tolist() == list(range(20))


def test_features_are_the_targets_hidden_states_after_its_final_norm(target, answers, data):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    start, count = int(data.starts[3]), int(data.lengths[3])
    with torch.no_grad():
        logits = model(torch.tensor([answers[3].ids])).logits[0]
        ours = data.features[start : start + count] @ model.lm_head.weight.T
    assert data.ids[start : start + count].tolist() == answers[3].ids
    torch.testing.assert_close(ours, logits, atol=0.02, rtol=0.02)


def test_features_are_computed_once_and_again_when_the_answers_change(target, answers, tmp_path, monkeypatch):
    (file,) = features.extract(target, answers[:4], tmp_path, progress=False)
    written = file.stat().st_mtime_ns
    features.extract(target, answers[:4], tmp_path, progress=False)
    assert file.stat().st_mtime_ns == written
    features.extract(target, answers[:5], tmp_path, progress=False)
    assert len(features.load_features([file])) == 5


# ---- batches, schedule


def test_batch_rows_pair_the_next_token_with_the_feature_before_it(data):
    batch = loop.make_batch(data, [0, 1])
    start, count = int(data.starts[1]), int(data.lengths[1])
    ids = data.ids[start : start + count]
    assert batch.next_ids[1, : count - 2].tolist() == ids[1:-1].tolist()
    assert batch.label_ids[1, : count - 2].tolist() == ids[2:].tolist()
    assert torch.equal(batch.features[1, : count - 2], data.features[start : start + count - 2])
    assert torch.equal(batch.target_features[1, : count - 2], data.features[start + 1 : start + count - 1])
    answer = int(data.lengths[1] - data.prompt_lengths[1])
    assert int(batch.in_answer[1].sum()) == answer  # each answer token is the label of one row
    assert (batch.label_ids[1, count - 2 :] == -1).all()


# ---- losses


@pytest.mark.parametrize("topk_weight", [0.0, 0.7])
def test_chunked_loss_and_gradient_equal_autograd(monkeypatch, topk_weight):
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(0)
    target, head, weights = torch.randn(10, HIDDEN), torch.randn(DRAFT, HIDDEN), torch.rand(10)
    ours = torch.randn(10, HIDDEN, requires_grad=True)
    plain = ours.detach().clone().requires_grad_()
    loss = losses.distillation_loss(ours, target, head, weights, 5, topk_weight)
    loss.backward()
    target_probs = (target @ head.T).softmax(-1)
    top, top_ids = target_probs.topk(5)
    log_probs = (plain @ head.T).log_softmax(-1)
    expected = -(target_probs * log_probs).sum(-1) - topk_weight * (top * log_probs.gather(-1, top_ids)).sum(-1)
    expected = (expected * weights).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_drafters_own_lm_head_gets_its_gradient(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(0)
    target, target_head, weights = torch.randn(10, 16), torch.randn(30, 16), torch.rand(10)
    grads = []
    for chunked in (True, False):
        generator = torch.Generator().manual_seed(1)
        predicted, own = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (10, 30))
        if chunked:
            loss = losses.distillation_loss(predicted, target, own, weights, target_head=target_head)
        else:
            rows = (target @ target_head.T).softmax(-1) * (predicted @ own.T).log_softmax(-1)
            loss = -(rows.sum(-1) * weights).sum()
        (3 * loss).backward()
        grads.append((loss, predicted.grad, own.grad))
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("own_head", [False, True])
def test_sparse_labels_loss_and_gradients_equal_autograd(monkeypatch, own_head):
    monkeypatch.setattr(losses, "SPARSE_CHUNK", 4)
    torch.manual_seed(0)
    target, head, weights = torch.randn(10, HIDDEN), torch.randn(DRAFT, HIDDEN), torch.rand(10)
    ids, probs = losses.likeliest(target, head, 5)
    top = (target @ head.T).topk(5)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(probs, top.values.softmax(-1))
    ours, ours_head = torch.randn(10, HIDDEN, requires_grad=True), head.clone().requires_grad_(own_head)
    plain, plain_head = ours.detach().clone().requires_grad_(), head.clone().requires_grad_()
    loss = losses.sparse_distillation_loss(ours, ids, probs, ours_head, weights)
    expected = -(((plain @ plain_head.T).log_softmax(-1).gather(-1, ids) * probs).sum(-1) * weights).sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    if own_head:
        torch.testing.assert_close(ours_head.grad, plain_head.grad)


# ---- the head


def tiny_head(seed=0) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(HeadConfig(HIDDEN, 24, 4, 2, 4))


def test_aligned_passes_equal_attention_over_a_spelled_out_context():
    """Pass j at row t equals plain attention over the inputs that HASS prescribes for its keys."""
    head, rows = tiny_head(), 7
    embeddings, feats = torch.randn(1, rows, HIDDEN), torch.randn(1, rows, HIDDEN)
    with torch.no_grad():
        outputs = head.aligned(embeddings, feats, 3)
        inputs = [feats] + [torch.cat([feats[:, :1], out[:, :-1]], dim=1) for out in outputs[:-1]]
        for step in range(3):
            for t in range(rows):
                context = feats[:, : t + 1].clone()
                for back in range(min(step, t + 1)):
                    context[:, t - back] = inputs[step - back][:, t - back]
                expected = head(embeddings[:, : t + 1], context)[:, -1]
                torch.testing.assert_close(outputs[step][:, t], expected, atol=1e-5, rtol=1e-4)


def test_folding_the_input_scale_keeps_the_function():
    head, plain = tiny_head(), tiny_head(1)
    head.input_scale.uniform_(0.5, 2.0)
    plain.load_state_dict(head.folded_state())
    x, y = torch.randn(2, 3, HIDDEN), torch.randn(2, 3, HIDDEN)
    torch.testing.assert_close(head(x, y), plain(x, y))


# ---- training


@pytest.mark.parametrize("align_steps", [1, 2])
def test_resumed_training_is_bit_exact(target, data, tmp_path, align_steps):
    straight = train(target, data, tmp_path / "a", align_steps=align_steps).state_dict()
    train(target, data, tmp_path / "b", align_steps=align_steps, max_steps=3)
    assert not (tmp_path / "b" / "config.json").exists()
    resumed = train(target, data, tmp_path / "b", align_steps=align_steps).state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_keeps_its_last_step(target, data, tmp_path, monkeypatch, number):
    straight = train(target, data, tmp_path / "a").state_dict()
    honest = eagle.EagleTask.losses

    def interrupted(self, batch, step, *args):
        if step == 2:  # in the middle of a step: it is made to its end
            os.kill(os.getpid(), number)
        return honest(self, batch, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(eagle.EagleTask, "losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(target, data, tmp_path / "b")
    state = torch.load(tmp_path / "b" / trainer.STATE_NAME, weights_only=True)
    assert state["step"] == 3
    resumed = train(target, data, tmp_path / "b").state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_state_of_other_settings_is_refused(target, data, tmp_path):
    train(target, data, tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="other lr, noise; give the same settings"):
        train(target, data, tmp_path, lr=0.5, noise=0.0)


def test_exported_checkpoint_is_valid_and_small_and_has_its_provenance(target, data, tmp_path):
    head = train(target, data, tmp_path, bias=True)
    info = validate_checkpoint(tmp_path, HIDDEN, VOCAB)
    assert (info.kind, info.draft_vocab_size, info.has_bias, info.has_embed_tokens) == ("eagle", DRAFT, True, False)
    assert not info.has_lm_head
    config, state = load_head(tmp_path)
    assert {"target", "command", "commit", "versions", "options", "steps"} <= config["specplug"].keys()
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in state.items() if name != "d2t")
    again, ids = eagle.load_trained(tmp_path)
    assert torch.equal(ids, torch.arange(DRAFT))
    torch.testing.assert_close(again.fc.weight, head.folded_state()["fc.weight"], atol=1e-2, rtol=1e-2)


# ---- offline acceptance


class Oracle(EagleHead):
    """Always predicts the target's own next feature, so it drafts the answer's tokens, if it can propose them."""

    def __init__(self, lookup):
        super().__init__(HeadConfig(HIDDEN, 24, 4, 2, 4))
        self.lookup = lookup

    def aligned(self, embeddings, feats, steps):
        return [self.lookup] * steps


def greedy_data() -> tuple[features.FeatureSet, torch.Tensor]:
    """One sequence whose token t+1 is the arg-max of feature t under an identity LM head."""
    ids = torch.tensor([1, 4, 2, 7, 3, 5, 0, 6, 2, 1])
    feats = F.one_hot(ids.roll(-1), HIDDEN).bfloat16()
    return features.FeatureSet(feats, ids, torch.tensor([10]), torch.tensor([3])), torch.eye(HIDDEN).bfloat16()


def test_chain_acceptance_of_a_perfect_and_of_a_useless_head():
    data, lm_head = greedy_data()
    perfect = Oracle(loop.make_batch(data, [0]).target_features)
    embedding = torch.zeros(HIDDEN, HIDDEN)
    result = chain_acceptance(perfect, data, embedding, lm_head, torch.arange(HIDDEN), depth=2)
    # rows 2..7 draft 6 tokens in cycles of 2: 3 tokens a cycle
    assert result.alphas == [1.0, 1.0] and result.tau == 3.0
    useless = Oracle(torch.zeros_like(perfect.lookup))
    result = chain_acceptance(useless, data, embedding, lm_head, torch.full((HIDDEN,), 15), depth=2)
    assert result.alphas[0] == 0.0 and result.tau == 1.0


def self_drafted(head: EagleHead, embedding: torch.Tensor, lm_head: torch.Tensor) -> features.FeatureSet:
    """A text of random features in which drafts from rows 3, 6, 9, ... are right for two levels and random beyond."""
    torch.manual_seed(2)
    rows = 33
    feats, ids = torch.randn(rows + 2, HIDDEN), torch.randint(0, VOCAB, (rows + 2,))
    for t in range(3, rows):
        if t % 3 < 2:
            with torch.no_grad():
                passes = head.aligned(embedding[ids[None, 1 : t + 2]], feats[None, : t + 1], 2)
            ids[t + 2] = (passes[t % 3][0, t] @ lm_head.T).argmax()
    return features.FeatureSet(feats, ids, torch.tensor([rows + 2]), torch.tensor([4]))


def test_trees_and_chains_accept_what_the_head_drafts():
    head = tiny_head(5)
    embedding, lm_head, ids = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.arange(VOCAB)
    text = self_drafted(head, embedding, lm_head)
    assert chain_acceptance(head, text, embedding, lm_head, ids, depth=2).tau == 3.0
    assert tree_tau(head, text, embedding, lm_head, ids, nodes=2, depth=2, beam=1) == [(30, 10)]
    ((tokens, cycles),) = tree_tau(head, text, embedding, lm_head, ids, nodes=30, depth=3, beam=6)
    assert tokens / cycles >= 3.0
    wide = tree_tau(head, text, embedding, lm_head, ids, nodes=VOCAB, depth=1, beam=VOCAB)
    assert wide == [(30, 15)]  # one level that holds every token: always accepted, never more


def test_further_training_keeps_the_draft_vocabulary(tmp_path):
    """Where there is room; that of a head with its own LM head stays as it is."""
    answers, config = [Answer("", [1, 2], [30, 31])], {"vocab_size": 40, "eos_token_id": 0}
    ids = torch.arange(10, 18)
    for name, more in (("shared", {}), ("own", {"lm_head.weight": torch.zeros(8, 4)})):
        save_head(tmp_path / name, {}, {"d2t": ids - torch.arange(8), **more})
    new = command._draft_vocabulary(answers, 8, config, None)
    assert {0, 30, 31} <= set(new.tolist()) and len(new) == 8
    kept = command._draft_vocabulary(answers, 8, config, str(tmp_path / "shared"))
    assert kept.tolist() == [0, 10, 11, 12, 13, 14, 30, 31]
    assert torch.equal(command._draft_vocabulary(answers, 8, config, str(tmp_path / "own")), ids)
    assert torch.equal(command._draft_vocabulary(answers, 8, config, str(tmp_path)), new)  # refused later
    assert len(command._draft_vocabulary(answers, 6, config, str(tmp_path / "shared"))) == 6


def test_every_sequence_is_in_every_epoch_once():
    lengths = [3 + 7 * i % 40 for i in range(50)] + [2]
    for epoch in range(2):
        batches = loop.epoch_batches(lengths, 100, seed=3, epoch=epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(50))
        assert all(len(batch) * max(lengths[i] for i in batch) <= 100 for batch in batches)
    assert loop.epoch_batches(lengths, 100, 3, 0) != loop.epoch_batches(lengths, 100, 3, 1)


def test_learning_rate_warms_up_then_falls_to_the_floor():
    rates = [loop.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] < rates[2] == max(rates) and rates[-1] < 0.02
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_aligned_passes_send_no_gradient_through_fed_back_features():
    head = tiny_head()
    embeddings, feats = torch.randn(1, 5, HIDDEN), torch.randn(1, 5, HIDDEN, requires_grad=True)
    head.aligned(embeddings, feats, 2)[1][:, 1].sum().backward()
    # Pass 2 at row 1 reads target feature 0 as a key; its own input is a detached prediction.
    assert feats.grad[:, 0].abs().sum() > 0 and feats.grad[:, 1:].abs().sum() == 0
