import re
import threading
from pathlib import Path

import pytest
import torch

from vllm_specplug.cpu.kernels import huge_pages
from vllm_specplug.cpu.kernels.huge_pages import HUGE_PAGE, empty_in_huge_pages


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1000, 700), (8192, 4097)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_like_any_other(shape, dtype):
    values = torch.randn(shape).to(dtype)
    tensor = empty_in_huge_pages(values.shape, dtype).copy_(values)
    assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    assert tensor.dtype == dtype and torch.equal(tensor, values)


def test_tensors_share_chunks_and_no_bytes():
    made, shapes = [], [torch.Size((n, 100)) for n in range(1, 200)]

    def fill():
        for number, shape in enumerate(shapes):
            made.append((empty_in_huge_pages(shape, torch.int32).fill_(number), number))

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tensor == number).all() for tensor, number in made)
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor, _ in made)
    assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_the_kernel_is_asked_for_huge_pages():
    place, flags, found = empty_in_huge_pages(torch.Size((100,)), torch.float32).data_ptr(), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16) <= place < int(match[2], 16)
        elif found and line.startswith("VmFlags:"):
            flags = line.split()
    assert "hg" in flags


def test_a_system_without_huge_pages(monkeypatch):
    class Refuses(huge_pages.mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refuses)
    tensor = empty_in_huge_pages(torch.Size((HUGE_PAGE, 40)), torch.uint8)
    assert tensor.fill_(3).sum() == 3 * tensor.numel()
