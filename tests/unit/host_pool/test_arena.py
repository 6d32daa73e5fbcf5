from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hicache.errors import CapacityError, ConfigError
from hicache.host_pool import arena as arena_module
from hicache.host_pool.arena import HUGE_PAGE, Placement, allocate_aligned, huge_page_problem, prefault
from hicache.host_pool.numa import node_problem
from hicache.layout import HOST_ALIGNMENT

MIB = 1 << 20


def mapping(array: npt.NDArray[np.uint8], listing: str) -> str:
    """What a listing of /proc/self says of the mapping that `array` lies in, alone or with its neighbours."""
    blocks = re.split(r"^(?=[0-9a-f]+[- ])", Path("/proc/self", listing).read_text(), flags=re.MULTILINE)
    starts = {int(re.split("[- ]", block)[0], 16): block for block in blocks if block}
    return starts[max(start for start in starts if start <= array.ctypes.data)]


def flags(array: npt.NDArray[np.uint8]) -> list[str]:
    try:
        found = re.search(r"^VmFlags: (.*)$", mapping(array, "smaps"), re.MULTILINE)
    except OSError as error:
        pytest.skip(f"this system does not show its mappings: {error}")
    if found is None:
        pytest.skip("this kernel does not show the flags of a mapping")
    return found.group(1).split()


def present_pages(array: npt.NDArray[np.uint8]) -> int:
    """Pages of `array` that are in memory, as mincore counts them."""
    count = -(-array.nbytes // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), seen) == 0
    return sum(page & 1 for page in seen)


@pytest.fixture
def thp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the kernel's switch of transparent huge pages."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(arena_module, "_THP", file)
    return file


def needs_huge_pages() -> None:
    try:
        allocate_aligned(HUGE_PAGE, Placement(huge_pages=True))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("nbytes", [1, HOST_ALIGNMENT, HOST_ALIGNMENT + 1, 3 * MIB])
def test_an_arena_is_aligned_zeroed_and_as_long_as_asked(nbytes: int) -> None:
    array = allocate_aligned(nbytes)
    assert array.shape == (nbytes,) and array.ctypes.data % HOST_ALIGNMENT == 0
    assert not array.any() and array.flags.writeable


@pytest.mark.parametrize("nbytes", [1, HUGE_PAGE, 5 * MIB + 4096])
def test_huge_pages_start_at_a_huge_page(nbytes: int) -> None:
    needs_huge_pages()
    arrays = [allocate_aligned(nbytes, Placement(huge_pages=True)) for _ in range(3)]
    for array in arrays:
        assert array.shape == (nbytes,) and array.ctypes.data % HUGE_PAGE == 0
        array[:] = 7


def test_huge_pages_are_asked_for() -> None:
    needs_huge_pages()
    assert "hg" in flags(allocate_aligned(4 * MIB, Placement(huge_pages=True)))
    assert "hg" not in flags(allocate_aligned(4 * MIB))


def test_huge_pages_that_are_off_are_refused(thp: Path) -> None:
    assert huge_page_problem() is None
    thp.write_text("always madvise [never]\n")
    with pytest.raises(ConfigError, match=r"^transparent huge pages are off: set .*enabled to madvise, or use"):
        allocate_aligned(MIB, Placement(huge_pages=True))
    thp.unlink()
    assert huge_page_problem() is None, "a system that does not tell is asked"


def test_an_arena_on_a_node() -> None:
    if problem := node_problem(0):
        pytest.skip(problem)
    array = allocate_aligned(MIB, Placement(numa_node=0))
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel does not show where mappings lie")
    assert mapping(array, "numa_maps").split()[1] == "prefer:0"
    assert mapping(allocate_aligned(MIB), "numa_maps").split()[1] == "default"


def test_huge_pages_on_a_node() -> None:
    needs_huge_pages()
    if problem := node_problem(0):
        pytest.skip(problem)
    array = allocate_aligned(4 * MIB, Placement(True, 0))
    assert "hg" in flags(array) and mapping(array, "numa_maps").split()[1] == "prefer:0"


def test_a_node_that_the_kernel_refuses() -> None:
    with pytest.raises(ConfigError, match=r"^node 1023: .*use numa: null$"):
        allocate_aligned(MIB, Placement(numa_node=1023))


def test_a_fork_may_be_left_without_the_memory() -> None:
    assert "dc" in flags(allocate_aligned(MIB, fork=False))
    assert "dc" not in flags(allocate_aligned(MIB))


def test_more_than_can_be_mapped() -> None:
    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(CapacityError, match=rf"^{nbytes} bytes of host memory cannot be mapped: .*smaller size$"):
            allocate_aligned(nbytes)


@pytest.mark.parametrize("piece", [256 * MIB, 3 * MIB])
def test_prefault_makes_every_page_present(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(arena_module, "_PREFAULT_BYTES", piece)
    array = allocate_aligned(10 * MIB + 1)
    assert present_pages(array) == 0
    prefault(array)
    assert present_pages(array) == -(-array.nbytes // mmap.PAGESIZE)
    assert not array.any()


def test_prefault_on_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_madvise", lambda address, nbytes, advice: errno.EINVAL)
    array = allocate_aligned(2 * MIB)
    prefault(array)
    assert present_pages(array) == array.nbytes // mmap.PAGESIZE


@pytest.mark.parametrize("piece", [256 * MIB, MIB])
def test_prefault_without_memory(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(arena_module, "_PREFAULT_BYTES", piece)
    monkeypatch.setattr(arena_module, "_madvise", lambda address, nbytes, advice: errno.ENOMEM)
    with pytest.raises(CapacityError, match=f"bytes of host memory are not to be had: {os.strerror(errno.ENOMEM)}"):
        prefault(allocate_aligned(2 * MIB))


def test_prefault_of_nothing() -> None:
    prefault(allocate_aligned(0))


def test_an_arena_is_unmapped_with_its_last_view(is_mapped: Callable[[int], bool]) -> None:
    array = allocate_aligned(MIB)
    view, address = array[5:], array.ctypes.data
    del array
    assert is_mapped(address)
    view[0] = 1
    del view
    assert not is_mapped(address)
