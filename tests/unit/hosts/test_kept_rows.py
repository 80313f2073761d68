"""Memory for the key/value of a step's tree rows."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_specplug.cpu.kv import SHARED_ROWS, KeptRows
from vllm_specplug.vllm.kv_groups import AlikeLayers


def layers_of(group, names, heads, size, reads_latents=False, dtype=torch.bfloat16):
    impl = SimpleNamespace(num_kv_heads=heads, head_size=size, reads_latents=reads_latents)
    kv_cache = torch.zeros(1, dtype=dtype)
    return AlikeLayers(group, {name: SimpleNamespace(impl=impl, kv_cache=kv_cache) for name in names})


@pytest.fixture
def rooms():
    layers = [layers_of(0, ["a", "b", "c"], 2, 16), layers_of(1, ["d"], 1, 32, dtype=torch.uint8)]
    return KeptRows([*layers, layers_of(1, ["e"], 1, 48, reads_latents=True)])


@pytest.mark.parametrize("num_rows", [1, 9, SHARED_ROWS, SHARED_ROWS + 1])
def test_each_layer_has_its_own_rows(rooms, num_rows):
    kept, kept_of = rooms.of(num_rows)
    assert [room.shape for room in kept] == [(3, 2, num_rows, 2, 16), (1, 2, num_rows, 1, 32), (1, 1, num_rows, 1, 48)]
    assert all(room.is_contiguous() for room in kept)
    assert [room.dtype for room in kept] == [torch.bfloat16, torch.uint8, torch.bfloat16]
    for number, part in enumerate(kept_of.values()):
        part.fill_(number)
    assert list(kept_of) == ["a", "b", "c", "d", "e"]
    assert [[float(part.unique()) for part in room] for room in kept] == [[0.0, 1.0, 2.0], [3.0], [4.0]]


def test_steps_use_the_same_memory_up_to_a_bound(rooms):
    first, again, longer = rooms.of(5), rooms.of(5), rooms.of(SHARED_ROWS)
    assert again is first
    assert [room.data_ptr() for room in longer[0]] == [room.data_ptr() for room in first[0]]
    large = rooms.of(SHARED_ROWS + 1)
    assert rooms.of(SHARED_ROWS + 1)[0][0].data_ptr() != large[0][0].data_ptr()
