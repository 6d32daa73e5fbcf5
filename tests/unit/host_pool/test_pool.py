from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import CapacityError, ConfigError, ProtocolError
from hicache.host_pool import pool as pool_module
from hicache.host_pool.pool import POISON_BYTE, HostPool
from hicache.layout import HOST_ALIGNMENT, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4)


def _address(view: object) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)  # type: ignore[call-overload]


def test_every_page_is_aligned_and_whole() -> None:
    pool = HostPool(LAYOUT, 5)
    assert pool.array.shape == (5, LAYOUT.page_stride) and pool.nbytes == 5 * LAYOUT.page_stride
    for index in range(5):
        page = pool.page(index)
        assert len(page) == LAYOUT.page_stride and _address(page) % HOST_ALIGNMENT == 0


def test_a_page_is_a_view() -> None:
    pool = HostPool(LAYOUT, 2)
    pool.page(1)[0] = 7
    assert pool.array[1, 0] == 7 and not pool.array[0].any()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_page_outside_the_pool_is_refused(index: int) -> None:
    with pytest.raises(ProtocolError, match=r"outside 0 \.\. 1"):
        HostPool(LAYOUT, 2).page(index)


def test_poison_touches_only_its_pages() -> None:
    pool = HostPool(LAYOUT, 3)
    pool.poison(np.array([0, 2], np.int32))
    assert (pool.array[[0, 2]] == POISON_BYTE).all() and not pool.array[1].any()


def test_the_allocator_hands_out_the_pool() -> None:
    pool = HostPool(LAYOUT, 2)
    pages = pool.allocator.alloc(2)
    assert pages is not None and pool.allocator.alloc(1) is None
    pool.allocator.free(pages)
    with pytest.raises(ProtocolError):
        pool.allocator.free(pages)


def test_pinned_needs_cuda() -> None:
    with pytest.raises(ConfigError, match="use pinned: auto"):
        HostPool(LAYOUT, 1, pinned=True)


def test_too_much_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int) -> None:
        pytest.fail("allocated although the budget refused")

    def refuse(nbytes: int) -> None:
        raise CapacityError(f"no {nbytes} bytes")

    monkeypatch.setattr(pool_module, "allocate_aligned", allocate)
    monkeypatch.setattr(pool_module, "check_host_budget", refuse)
    with pytest.raises(CapacityError, match=f"no {3 * LAYOUT.page_stride} bytes"):
        HostPool(LAYOUT, 3)


def test_close_is_idempotent_and_leaves_views_readable() -> None:
    pool = HostPool(LAYOUT, 1)
    pool.page(0)[0] = 9
    view = pool.array
    pool.close()
    pool.close()
    assert view[0, 0] == 9
    with pytest.raises(ProtocolError, match="closed"):
        pool.page(0)


def test_a_pool_may_be_empty() -> None:
    assert HostPool(LAYOUT, 0).array.shape == (0, LAYOUT.page_stride)
