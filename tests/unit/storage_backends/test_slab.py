from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import StoreUnavailableError
from hicache.storage_backends.slab import IOV_MAX, SlabFile
from hicache.testing.storage import IDENTITY, blank_pages, chain, filled_pages

LAYOUT = IDENTITY.layout


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[SlabFile]:
    slab = SlabFile(tmp_path / "slab", LAYOUT.page_stride)
    yield slab
    slab.close()


def read(slab: SlabFile, slots: Sequence[int]) -> list[bytes]:
    pages = blank_pages(LAYOUT, len(slots))
    slab.read(slots, pages)
    return [page.tobytes() for page in pages]


def test_more_slots_than_one_call_takes(slab: SlabFile) -> None:
    pages = filled_pages(LAYOUT, chain("a", IOV_MAX + 10))
    slab.write(range(3, 3 + len(pages)), pages)
    assert read(slab, range(3, 3 + len(pages))) == [page.tobytes() for page in pages]
    assert slab.slots == 3 + len(pages)


def test_scattered_slots_in_any_order(slab: SlabFile) -> None:
    pages = filled_pages(LAYOUT, chain("a", 6))
    slots = [9, 2, 3, 4, 0, 1]
    slab.write(slots, pages)
    assert read(slab, slots) == [page.tobytes() for page in pages]
    assert read(slab, [4, 3]) == [pages[3].tobytes(), pages[2].tobytes()]


def test_short_transfers_are_continued(slab: SlabFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may move fewer bytes than asked, ending within a page."""
    write, moved = os.pwritev, 3 * LAYOUT.page_stride // 2

    def pwritev(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)[:moved]
        return write(file, [data], offset)

    pages = filled_pages(LAYOUT, chain("a", 5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        slab.write(range(5), pages)
    assert read(slab, range(5)) == [page.tobytes() for page in pages]


def test_a_disk_that_takes_nothing_is_full(slab: SlabFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StoreUnavailableError, match="full") as raised:
        slab.write([0], filled_pages(LAYOUT, chain("a", 1)))
    assert raised.value.reason == "disk_full"


def test_without_direct_io_it_is_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def no_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    slab = SlabFile(tmp_path / "buffered", LAYOUT.page_stride)
    pages = filled_pages(LAYOUT, chain("a", 3))
    slab.write(range(3), pages)
    assert read(slab, range(3)) == [page.tobytes() for page in pages]
    slab.close()


def test_blocks_are_taken_and_given_back(slab: SlabFile) -> None:
    slab.reserve(range(64))
    assert slab.allocated_bytes >= 64 * LAYOUT.page_stride
    slab.release(range(16, 1 << 40))
    assert slab.allocated_bytes < 32 * LAYOUT.page_stride
    assert slab.slots == 64
    slab.resize(0)
    assert slab.allocated_bytes == 0


def test_pages_smaller_than_their_slots(tmp_path: Path) -> None:
    """A page of 4 KiB in slots of 12 KiB: what follows it in the slot is not another page's."""
    slab = SlabFile(tmp_path / "wide", 3 * LAYOUT.page_stride)
    pages = filled_pages(LAYOUT, chain("a", 5))
    slab.write([4, 0, 1, 2, 9], pages)
    assert read(slab, [4, 0, 1, 2, 9]) == [page.tobytes() for page in pages]
    assert slab.slots == 10
    slab.close()


def test_what_lies_beyond_the_end_of_the_file_is_no_error(slab: SlabFile) -> None:
    pages = filled_pages(LAYOUT, chain("a", 2))
    slab.write(range(2), pages)
    assert read(slab, range(4))[:2] == [page.tobytes() for page in pages]
    assert read(slab, [7, 1])[1] == pages[1].tobytes()


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN])
def test_other_errors_of_direct_io_are_not_hidden(slab: SlabFile, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Only EINVAL says that the memory is not aligned."""

    real, calls = os.preadv, []

    def refuse_once(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, "preadv", refuse_once)
    with pytest.raises(OSError, match=os.strerror(code)):
        slab.read([0], blank_pages(LAYOUT, 1))
