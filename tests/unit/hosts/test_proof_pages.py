"""Where the proof's text lies: beyond the reach of windows, over the end of a page, within a request's length."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_specplug.vllm.proof.pages import LAST_READ, Pages, choose_places

ROOM = 20


def config(*sizes: int, num_blocks: int = 1000):
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks)


@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("windows", [[], [16], [64, 4096]])
def test_a_tree_crosses_a_page_behind_every_window(page, windows):
    places = choose_places(page, windows, 3, ROOM, 1 << 15)
    assert places.boundary % page == 0 and places.root + 3 == places.boundary
    assert places.root > max([LAST_READ - 1, *windows])
    assert places.reads[-1][1] == places.root and places.reads[0][0] == 0
    for window in windows:  # the keys at the window's edge are read
        edge = places.root - window
        assert any(first <= edge < last for first, last in places.reads)


def test_windows_that_no_request_reaches_are_left_out():
    assert choose_places(16, [4096], 3, ROOM, 256).root < 64


def test_a_short_request_has_no_boundary():
    places = choose_places(128, [], 3, ROOM, 64)
    assert places.boundary == 0 and places.root + ROOM <= 64
    assert choose_places(128, [], 3, ROOM, ROOM) is None


def test_pages_that_are_not_read_are_the_first_one_again():
    places = choose_places(16, [4096], 3, ROOM, 1 << 15)
    pages = Pages(config(16, 32), places)
    first, second = pages.table(places.root + ROOM)
    assert len(first) >= (places.root + ROOM) / 16 and len(set(first)) < 12
    read = [
        block for block in range(len(first)) if any(a < 16 * block + 16 and b > 16 * block for a, b in places.reads)
    ]
    assert len({first[block] for block in read}) == len(read)
    assert not set(first) & set(second)


def test_requests_share_the_context_only():
    places = choose_places(16, [], 3, ROOM, 256)
    pages = Pages(config(16), places)
    (one,), (other,) = pages.table(places.root + ROOM), pages.table(places.boundary + 2)
    shared = places.boundary // 16
    assert one[:shared] == other[:shared] and not set(one[shared:]) & set(other[shared:])


def test_a_cache_that_is_too_small_is_told():
    places = choose_places(16, [], 3, ROOM, 256)
    with pytest.raises(ValueError, match="too few blocks"):
        Pages(config(16, num_blocks=2), places).table(places.root + ROOM)
