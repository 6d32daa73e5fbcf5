from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hicache.errors import CapacityError, ConfigError, ProtocolError
from hicache.host_pool import pinning as pinning_module
from hicache.host_pool import pool as pool_module
from hicache.host_pool.arena import Placement, allocate_aligned
from hicache.host_pool.pool import POISON_BYTE, HostPool
from hicache.layout import HOST_ALIGNMENT, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4)


class FakeRegistrar:
    """Has room for `room` bytes, and calls `seen` before each registration and its end."""

    def __init__(self, seen: Callable[[], object] = lambda: None, room: int = 1 << 40) -> None:
        self.seen = seen
        self.room = room
        self.pieces: dict[int, int] = {}
        self.calls: list[str] = []

    def register(self, address: int, nbytes: int) -> None:
        self.seen()
        self.calls.append("register")
        if sum(self.pieces.values()) + nbytes > self.room:
            raise CapacityError("cudaErrorMemoryAllocation: out of memory")
        self.pieces[address] = nbytes

    def unregister(self, address: int) -> None:
        self.seen()
        self.calls.append("unregister")
        del self.pieces[address]


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


def test_an_unpinned_pool_says_so() -> None:
    pool = HostPool(LAYOUT, 5)
    assert (pool.pages_per_registration, pool.startup.pinned_bytes) == (5, 0)
    assert (pool.startup.huge_pages, pool.startup.numa_node) == (False, None)


def test_a_pinned_pool_is_registered_in_pieces_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning_module, "REGISTRATION_BYTES", 2 * LAYOUT.page_stride)
    registrar = FakeRegistrar()
    pool = HostPool(LAYOUT, 5, True, registrar=registrar)
    assert pool.pages_per_registration == 2 and pool.startup.pinned_bytes == pool.nbytes
    assert registrar.pieces == {
        _address(pool.page(first)): count * LAYOUT.page_stride for first, count in ((0, 2), (2, 2), (4, 1))
    }
    pool.close()
    pool.close()
    assert registrar.pieces == {} and registrar.calls == ["register"] * 3 + ["unregister"] * 3


def test_pinned_memory_is_there_before_it_is_registered_and_not_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, object]] = []

    def allocate(nbytes: int, placement: Placement, fork: bool) -> npt.NDArray[np.uint8]:
        done.append(("fork", fork))
        return allocate_aligned(nbytes, placement, fork)

    registrar = FakeRegistrar(lambda: done.append(("register", None)))
    monkeypatch.setattr(pool_module, "allocate_aligned", allocate)
    monkeypatch.setattr(pool_module, "prefault", lambda array: done.append(("prefault", array.nbytes)))
    pool = HostPool(LAYOUT, 2, True, registrar=registrar)
    assert done == [("fork", False), ("prefault", pool.nbytes), ("register", None)]
    done.clear()
    HostPool(LAYOUT, 2)
    assert done == [("fork", True)], "unpinned memory is taken when it is first used"
    HostPool(LAYOUT, 2, placement=Placement(populate=True))
    assert done[1:] == [("fork", True), ("prefault", pool.nbytes)], "unless it was asked for"


def test_a_pool_that_is_not_closed_is_unpinned_before_its_memory_goes(is_mapped: Callable[[int], bool]) -> None:
    registrar = FakeRegistrar()
    pool = HostPool(LAYOUT, 2, True, registrar=registrar)
    address = pool.array.ctypes.data
    mapped: list[bool] = []
    registrar.seen = lambda: mapped.append(is_mapped(address))
    del pool
    gc.collect()
    assert registrar.pieces == {} and mapped == [True]
    assert not is_mapped(address)


def test_a_pool_that_is_open_at_exit_is_unpinned() -> None:
    script = """
import sys
from hicache.host_pool.pool import HostPool
from hicache.layout import KVLayout

class Registrar:
    def register(self, address, nbytes):
        print("register")
    def unregister(self, address):
        print("unregister")

pool = HostPool(KVLayout(1, 1, 8, 16), 1, True, registrar=Registrar())
"""
    root = str(Path(__file__).parents[3])
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, text=True, capture_output=True
    )
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, ["register", "unregister"], "")


def test_a_pool_that_cannot_be_pinned_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning_module, "REGISTRATION_BYTES", LAYOUT.page_stride)
    registrar = FakeRegistrar(room=2 * LAYOUT.page_stride)
    with pytest.raises(CapacityError, match="were when CUDA refused: cudaErrorMemoryAllocation"):
        HostPool(LAYOUT, 3, True, registrar=registrar)
    assert registrar.pieces == {} and registrar.calls == ["register"] * 3 + ["unregister"] * 2


def test_the_placement_reaches_the_arena() -> None:
    with pytest.raises(ConfigError, match="node 1023"):
        HostPool(LAYOUT, 1, placement=Placement(numa_node=1023))


def test_too_much_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int, placement: Placement, fork: bool) -> None:
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


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pool_may_be_empty(pinned: bool) -> None:
    registrar = FakeRegistrar()
    pool = HostPool(LAYOUT, 0, pinned, registrar=registrar)
    assert pool.array.shape == (0, LAYOUT.page_stride) and pool.pages_per_registration > 0
    pool.close()
    assert registrar.calls == []


def test_a_quantised_pool_holds_shorter_pages() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, dtype="float32")
    pool = HostPool(layout, 3, codec="fp8")
    assert pool.page_stride == pool.format.page_stride == 12288 < layout.page_stride == 32768
    assert (pool.nbytes, pool.array.shape, pool.page(2).nbytes) == (3 * 12288, (3, 12288), 12288)
    with pytest.raises(ConfigError, match="one already"):
        HostPool(KVLayout(1, 1, 8, 4, "int8"), 1, codec="fp8")
