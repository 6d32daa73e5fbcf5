"""Batches that are read in pieces, while the pages that are there are checked."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.errors import StoreUnavailableError
from hicache.storage_backends import read_ahead as module
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.read_ahead import Piece, read_ahead
from hicache.testing.storage import IDENTITY, blank_pages, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
KEYS = chain("a", 20)


class Reads:
    """Counts reads: which were begun, and how many are under way."""

    def __init__(self) -> None:
        self.begun: list[Piece] = []
        self.under_way = 0
        self._lock = threading.Lock()

    def __call__(self, piece: Piece) -> None:
        with self._lock:
            self.begun.append(piece)
            self.under_way += 1
        time.sleep(0.002)
        with self._lock:
            self.under_way -= 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 3 * LAYOUT.page_stride)


def test_pieces_hold_what_fits_and_at_least_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 10)
    found = [(piece.start, piece.stop) for piece in read_ahead([4, 4, 4, 12, 1, 9, 1], Reads())]
    assert found == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert list(read_ahead([12, 1], Reads())) == [slice(0, 1), slice(1, 2)]
    assert list(read_ahead([], Reads())) == []


def test_one_piece_is_read_by_the_caller() -> None:
    threads = []
    for _ in read_ahead([1, 1], lambda piece: threads.append(threading.current_thread())):
        pass
    assert threads == [threading.current_thread()]


def test_the_next_piece_is_read_while_one_is_looked_at() -> None:
    begun = threading.Event()

    def read(piece: Piece) -> None:
        if piece.start:
            begun.set()

    pieces = read_ahead([LAYOUT.page_stride * 3] * 2, read)
    next(pieces)
    assert begun.wait(30)
    pieces.close()


def test_whoever_stops_finds_nothing_under_way() -> None:
    reads = Reads()
    pieces = read_ahead([LAYOUT.page_stride * 3] * 100, reads)
    next(pieces)
    pieces.close()
    assert reads.under_way == 0
    assert 1 <= len(reads.begun) < 100


def test_a_read_that_fails_is_the_last() -> None:
    reads = Reads()

    def read(piece: Piece) -> None:
        reads(piece)
        if piece.start == 2:
            raise OSError(errno.EIO, "no")

    looked_at = []
    with pytest.raises(OSError, match="no"):
        for piece in read_ahead([LAYOUT.page_stride * 3] * 100, read):
            looked_at.append(piece.start)
    assert looked_at == [0, 1]
    assert reads.under_way == 0
    assert len(reads.begun) < 100


@pytest.fixture(params=["none", "zstd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbBackend]:
    store = LmdbBackend(tmp_path / "s", replace(IDENTITY, codec=request.param), 4 << 20, durability="none")
    assert store.write([run_of(LAYOUT, KEYS)]) == [20]
    yield store
    store.close()


def test_all_pieces_arrive(store: LmdbBackend) -> None:
    assert read_checked(store, LAYOUT, KEYS) == 20


@pytest.mark.parametrize("damaged", [0, 3, 13, 19])
def test_a_damaged_page_ends_it_in_any_piece(store: LmdbBackend, damaged: int) -> None:
    assert store.flip_byte(KEYS[damaged])
    assert read_checked(store, LAYOUT, KEYS) == damaged
    assert store.damaged_pages == 1
    assert store.contains_prefix(KEYS) == damaged


def test_a_piece_that_cannot_be_read_is_an_error(store: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def fail_later(file: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_later)
        with pytest.raises(StoreUnavailableError):
            store.read_into(KEYS, blank_pages(LAYOUT, len(KEYS)))
    assert store.damaged_pages == 0
    assert read_checked(store, LAYOUT, KEYS) == 20
