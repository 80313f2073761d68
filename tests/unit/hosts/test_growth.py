"""Which recorded graph of tree growth serves a batch; recording itself needs a GPU (tests/v2, test_cuda_graphs)."""

import torch

from vllm_specplug.hosts.v2.growth import Growth


def test_the_smallest_graph_that_fits_is_replayed():
    eager, replayed = [], []

    def grow(num_reqs, block_table):
        eager.append(num_reqs)
        return torch.zeros(num_reqs, 3), torch.zeros(num_reqs, 3)

    class Graph:
        def __init__(self, size):
            self.size = size

        def replay(self):
            replayed.append((self.size, own[: self.size].clone()))

    growth = Growth(grow, 6)
    assert growth(2, torch.ones(2, 4))[0].shape == (2, 3) and eager == [2]
    own = torch.zeros(6, 5)
    growth._inputs = (own,)
    growth._recorded = {size: (Graph(size), (torch.ones(size, 3), torch.ones(size, 3))) for size in (1, 4)}
    token_ids, parents = growth(3, torch.ones(3, 4))
    assert token_ids.shape == parents.shape == (3, 3)
    size, table = replayed[0]
    assert size == 4 and table[:3, :4].all() and not table[3:].any() and not table[:, 4:].any()
    growth(5, torch.ones(5, 4))  # no graph is large enough
    growth(1, torch.ones(1, 6))  # nor wide enough
    assert eager == [2, 5, 1] and len(replayed) == 1
