"""Conversions between the oracle's lists and tensors, shared by the unit tests."""

import torch

from vllm_specplug.core.tree import from_flat
from vllm_specplug.types import PADDING

torch.set_num_threads(1)  # The tensors are tiny: more threads only wait for each other.


def to_tree(trees, width=None):
    """A ``TokenTree`` of the oracle's trees; what stands behind the valid rows is hostile before padding."""
    width = width or max(map(len, trees))
    garbage = (7, 3)
    padded = [rows + [garbage] * (width - len(rows)) for rows in trees]
    token_ids = torch.tensor([[token for token, _ in rows] for rows in padded])
    parents = torch.tensor([[min(parent, width - 1) for _, parent in rows] for rows in padded])
    return from_flat(token_ids, parents, torch.tensor([len(rows) for rows in trees]))


def to_rows(tree, request):
    """The oracle's form of one request's tree, after checking its padding."""
    size = int(tree.num_rows[request])
    assert (tree.token_ids[request, size:] == PADDING).all()
    assert (tree.parents[request, size:] == PADDING).all()
    assert (tree.depths[request, size:] == 0).all()
    return list(zip(tree.token_ids[request, :size].tolist(), tree.parents[request, :size].tolist(), strict=True))


def emitted(walk, request):
    """(tokens, path rows) of one request, after checking the padding."""
    size = int(walk.num_emitted[request])
    assert (walk.output_token_ids[request, size:] == PADDING).all()
    assert (walk.path_rows[request, max(size, 1) :] == PADDING).all()
    return walk.output_token_ids[request, :size].tolist(), walk.path_rows[request, :size].tolist()
