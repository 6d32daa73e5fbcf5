"""Pinned host arenas on a CUDA device: who sees them, where copies may go, and what a failure leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.errors import CapacityError
from hicache.host_pool import pinning as pinning_module
from hicache.host_pool.arena import Placement, allocate_aligned, huge_page_problem
from hicache.host_pool.numa import memory_nodes, resolve_numa
from hicache.host_pool.pinning import CudaRegistrar
from hicache.host_pool.pool import HostPool
from hicache.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=16)
PAGES_PER_PIECE = 4
NUM_PAGES = 10
DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several registrations in a small arena."""
    monkeypatch.setattr(pinning_module, "REGISTRATION_BYTES", PAGES_PER_PIECE * LAYOUT.page_stride)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(LAYOUT, NUM_PAGES, True, registrar=CudaRegistrar(DEVICE))
    yield pool
    torch.cuda.synchronize()
    pool.close()


def pinned_pages(pool: HostPool) -> list[bool]:
    return [torch.from_numpy(page).is_pinned() for page in pool.array]


class FailingRegistrar:
    """CUDA's, but for the piece number `refused`: its address is one where nothing is mapped."""

    def __init__(self, refused: int) -> None:
        self.cuda = CudaRegistrar(DEVICE)
        self.refused = refused
        self.count = 0

    def register(self, address: int, nbytes: int) -> None:
        self.count += 1
        self.cuda.register(address if self.count <= self.refused else 1 << 16, nbytes)

    def unregister(self, address: int) -> None:
        self.cuda.unregister(address)


def test_every_page_is_pinned_and_the_figures_say_so(pool: HostPool) -> None:
    assert torch.from_numpy(pool.array).is_pinned() and all(pinned_pages(pool))
    assert pool.pages_per_registration == PAGES_PER_PIECE
    assert pool.startup.pinned_bytes == pool.nbytes
    assert pool.startup.allocate_seconds > 0 and pool.startup.pin_seconds > 0


def test_an_unpinned_pool_is_not() -> None:
    pool = HostPool(LAYOUT, NUM_PAGES)
    assert not any(pinned_pages(pool)) and pool.startup.pinned_bytes == 0


def test_torch_and_cupy_share_the_memory(pool: HostPool) -> None:
    import cupy

    tensor = torch.from_numpy(pool.array)
    assert tensor.data_ptr() == pool.array.ctypes.data
    pool.array[:] = np.arange(pool.nbytes, dtype=np.uint8).reshape(pool.array.shape)
    # The device reads the host's own addresses: what a kernel does that is given the arena's pointer.
    memory = cupy.cuda.UnownedMemory(pool.array.ctypes.data, pool.nbytes, pool, 0)
    mapped = cupy.ndarray(pool.array.shape, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    assert mapped.data.ptr == pool.array.ctypes.data
    assert np.array_equal(cupy.asnumpy(mapped + cupy.uint8(1)), pool.array + np.uint8(1))


def test_torch_and_cupy_share_device_memory_both_ways() -> None:
    import cupy

    tensor = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    by_interface, by_dlpack = cupy.asarray(tensor), cupy.from_dlpack(tensor)
    assert by_interface.data.ptr == by_dlpack.data.ptr == tensor.data_ptr()
    back = torch.utils.dlpack.from_dlpack(by_interface)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.as_tensor(by_interface, device=DEVICE).data_ptr() == tensor.data_ptr()


def test_copies_reach_every_page_on_both_sides_of_a_border(pool: HostPool) -> None:
    """Each page and each run within a registration, both ways, in order on one stream."""
    host = torch.from_numpy(pool.array)
    source = torch.randint(0, 256, pool.array.shape, dtype=torch.uint8, device=DEVICE)
    runs = [(first, min(first + PAGES_PER_PIECE, NUM_PAGES)) for first in range(0, NUM_PAGES, PAGES_PER_PIECE)]
    borders = [(page, page + 1) for first, _ in runs[1:] for page in (first - 1, first)]
    for pieces in (runs, borders):
        back = torch.zeros_like(source)
        host.zero_()
        for first, last in pieces:
            host[first:last].copy_(source[first:last], non_blocking=True)
            back[first:last].copy_(host[first:last], non_blocking=True)
        torch.cuda.synchronize()
        for first, last in pieces:
            assert torch.equal(host[first:last], source[first:last].cpu())
            assert torch.equal(back[first:last], source[first:last])


def test_a_kernel_reads_and_writes_over_a_border(pool: HostPool) -> None:
    """Only copies are bound to one registration: a kernel sees one range of addresses."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pool.array.ctypes.data, pool.nbytes, pool, 0)
    mapped = cupy.ndarray(pool.array.shape, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    mapped += cupy.uint8(3)
    cupy.cuda.get_current_stream().synchronize()
    assert (pool.array == 3).all()


def test_close_unpins_once() -> None:
    pool = HostPool(LAYOUT, NUM_PAGES, True, registrar=CudaRegistrar(DEVICE))
    array = pool.array
    pool.close()
    pool.close()
    assert not any(torch.from_numpy(page).is_pinned() for page in array)
    CudaRegistrar(DEVICE).unregister(array.ctypes.data)  # what the driver no longer knows is no error


def test_a_pool_that_is_forgotten_is_unpinned() -> None:
    pool = HostPool(LAYOUT, NUM_PAGES, True, registrar=CudaRegistrar(DEVICE))
    array = pool.array
    del pool
    assert not any(torch.from_numpy(page).is_pinned() for page in array)


def test_a_pool_that_is_open_at_exit_ends_without_a_word() -> None:
    script = f"""
import torch
from hicache.host_pool.pool import HostPool
from hicache.layout import KVLayout

pool = HostPool(KVLayout(1, 1, 8, 16), 4, True)
print(torch.from_numpy(pool.array).is_pinned(), torch.ones(4, device="{DEVICE}").sum().item())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True 4.0\n", "")


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_refusal_names_cudas_error_and_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    arenas: list[npt.NDArray[np.uint8]] = []

    def allocate(nbytes: int, placement: Placement, fork: bool) -> npt.NDArray[np.uint8]:
        arenas.append(allocate_aligned(nbytes, placement, fork))
        return arenas[-1]

    monkeypatch.setattr("hicache.host_pool.pool.allocate_aligned", allocate)
    with pytest.raises(CapacityError, match=r"were when CUDA refused: cudaError\w+: .*memlock limit"):
        HostPool(LAYOUT, NUM_PAGES, True, registrar=FailingRegistrar(refused))
    pages = arenas[0].reshape(NUM_PAGES, LAYOUT.page_stride)
    assert not any(torch.from_numpy(page).is_pinned() for page in pages)
    # The refused call left no error behind that the next launch would report as its own.
    assert int(torch.ones(8, device=DEVICE).sum()) == 8


def test_an_arena_that_is_pinned_already_is_refused(pool: HostPool) -> None:
    with pytest.raises(CapacityError, match="AlreadyRegistered"):
        CudaRegistrar(DEVICE).register(pool.array.ctypes.data, LAYOUT.page_stride)


def test_huge_pages_on_the_node_of_the_gpu() -> None:
    node = resolve_numa("auto", DEVICE)
    assert node is None or node in memory_nodes()
    placement = Placement(huge_pages=huge_page_problem() is None, numa_node=node)
    pool = HostPool(LAYOUT, 512, True, placement, CudaRegistrar(DEVICE))
    assert all(pinned_pages(pool)) and not pool.array.any()
    assert (pool.startup.huge_pages, pool.startup.numa_node) == (placement.huge_pages, node)
    pool.close()
