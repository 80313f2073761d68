"""Multi-pass attention equals the paper's pseudo-code (HASS, appendix A.1), values and gradients, plain and flex."""

import math

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from vllm_specplug.proposers.eagle2 import alignment
from vllm_specplug.proposers.eagle2.head import EagleHead, HeadConfig, rotary_table, rotate

HIDDEN, ROWS = 16, 9


def make_head(seed=0) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(HeadConfig(HIDDEN, 24, 4, 2, 4))


def paper_attention(head, target_inputs, draft_inputs):
    """`attention` of appendix A.1 line by line, on the inputs x that the layer's projections read."""
    attention = head.layers[0].self_attn
    cos, sin = rotary_table(head.config, torch.arange(ROWS))

    def heads(projection, x, turn=True):
        x = projection(x).unflatten(-1, (-1, head.config.head_dim)).transpose(1, 2)
        x = x.repeat_interleave(4 // x.shape[1], dim=1)
        return rotate(x, cos, sin) if turn else x

    query = heads(attention.q_proj, draft_inputs[-1] if draft_inputs else target_inputs)
    key_t, value_t = heads(attention.k_proj, target_inputs), heads(attention.v_proj, target_inputs, False)
    causal = torch.full((ROWS, ROWS), -math.inf).triu(1)
    weights = query @ key_t.transpose(2, 3) / math.sqrt(query.shape[-1]) + causal
    indices = torch.arange(ROWS)
    for i, inputs in enumerate(draft_inputs[::-1]):
        ind_q, ind_k = indices[i:], indices[: ROWS - i]
        own = query @ heads(attention.k_proj, inputs).transpose(2, 3) / math.sqrt(query.shape[-1])
        weights = weights.index_put((torch.tensor(0), torch.arange(4)[:, None], ind_q, ind_k), own[0, :, ind_q, ind_k])
    normed = weights.softmax(-1)
    output = normed @ value_t
    for i, inputs in enumerate(draft_inputs[::-1]):
        ind_q, ind_k = indices[i:], indices[: ROWS - i]
        change = heads(attention.v_proj, inputs, False)[:, :, ind_k] - value_t[:, :, ind_k]
        added = torch.zeros_like(output)
        added[:, :, ind_q] = normed[:, :, ind_q, ind_k][..., None] * change
        output = output + added
    return output


def paper_passes(head, embeddings, target, steps):
    """`train_batch` of appendix A.1: the predictions of all passes."""
    layer, drafts, predictions = head.layers[0], [], []
    target_inputs = head.combine(embeddings, target)
    for _ in range(steps):
        draft_inputs = [head.combine(embeddings, draft) for draft in drafts]
        x = draft_inputs[-1] if drafts else target_inputs
        predictions.append(layer.finish(x, paper_attention(head, target_inputs, draft_inputs)))
        drafts.append(torch.cat([target[:, :1], predictions[-1][:, :-1]], dim=1).detach())
    return predictions


def gradients(head, outputs):
    loss = sum((i + 1) * output.square().mean() for i, output in enumerate(outputs))
    return torch.autograd.grad(loss, list(head.parameters()))


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Flex attention with gradients on a CPU: torch refuses it compiled, so this is the uncompiled one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    return alignment.FlexAlignedAttention(compile=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", ["plain", "flex"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_passes_equal_the_papers_pseudo_code(form, steps, flex_on_cpu):
    head = make_head()
    head.attend = alignment.aligned_attention if form == "plain" else flex_on_cpu
    embeddings, target = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, HIDDEN)
    ours, papers = head.aligned(embeddings, target, steps), paper_passes(head, embeddings, target, steps)
    for a, b in zip((*ours, *gradients(head, ours)), (*papers, *gradients(head, papers)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_choose_attention():
    cpu = torch.device("cpu")
    assert alignment.choose_attention("auto", cpu) is alignment.aligned_attention
    assert alignment.choose_attention("plain", torch.device("cuda")) is alignment.aligned_attention
    with pytest.raises(ValueError, match="does not work on cpu .*backward on CPU.*choose attention plain"):
        alignment.choose_attention("flex", cpu)
    with pytest.raises(ValueError, match="'fast' is unknown"):
        alignment.choose_attention("fast", cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_compiles_on_cuda():
    assert alignment._failure(alignment.FlexAlignedAttention(), torch.device("cuda")) is None


def test_a_wrong_diagonal_shows():
    """With the two newest passes swapped, the third pass differs: the comparison above can fail."""
    head = make_head()
    head.attend = lambda query, keys, values: alignment.aligned_attention(
        query, [keys[0], *keys[:0:-1]], [values[0], *values[:0:-1]]
    )
    embeddings, target = torch.randn(1, ROWS, HIDDEN), torch.randn(1, ROWS, HIDDEN)
    ours, papers = head.aligned(embeddings, target, 3), paper_passes(head, embeddings, target, 3)
    torch.testing.assert_close(ours[1], papers[1])
    assert (ours[2] - papers[2]).abs().max() > 1e-3
