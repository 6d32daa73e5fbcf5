"""Pages read in pieces, so that those that are there are looked at while others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

PIECE_BYTES = 8 << 20
"""A piece has at most so many bytes, or is one page: from here on a disk gains little from larger reads."""

READERS = 2
"""Pieces that are read at a time: the next one is under way when one ends."""

Piece: TypeAlias = slice
"""Consecutive pages of a batch."""


def read_ahead(sizes: Sequence[int], read: Callable[[Piece], None]) -> Generator[Piece]:
    """The pieces of a batch of pages of these sizes in bytes, in order, each as soon as `read` has read it.

    `read` is called from several threads where there are several pieces. Raises what it raises. When this
    iterator is over or closed, nothing is being read any more: the pages' memory is the caller's again.
    """
    pieces = list(_pieces(sizes))
    if len(pieces) < 2:
        for piece in pieces:
            read(piece)
            yield piece
        return
    # Threads of this call alone: one that hangs with a read holds up no other call.
    with ThreadPoolExecutor(READERS, "slab-reader") as readers:
        futures = [readers.submit(read, piece) for piece in pieces]
        try:
            for piece, future in zip(pieces, futures):
                future.result()
                yield piece
        finally:
            readers.shutdown(cancel_futures=True)


def _pieces(sizes: Sequence[int]) -> Iterator[Piece]:
    start, nbytes = 0, 0
    for number, size in enumerate(sizes):
        if number > start and nbytes + size > PIECE_BYTES:
            yield slice(start, number)
            start, nbytes = number, 0
        nbytes += size
    if sizes:
        yield slice(start, len(sizes))
