"""A stand-in for the model: KV bytes that are a function of (namespace, token prefix, plane).

A wrong byte on the device is then known for wrong, and its plane, page and token can be named. Real
models have the same property, which is what makes prefix caching exact; only theirs costs a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from hicache.layout import KVLayout
from hicache.sim.prefix_hash import Hashes, random_words
from hicache.types import PageIndices

if TYPE_CHECKING:  # it imports torch
    from hicache.plane_access import PlaneAccess

PageMask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
"""2-D array of the widest unsigned words that divide a token's bytes in a plane; 64 bits for real models."""

_BLOCK_BYTES = 1 << 17
"""Bytes of one plane checked at a time, so that the passes over them stay in the cache."""

_WIDE_ROW = 16
"""Words in a row from which an inner loop over the row pays off."""

_WORD_SEED, _PLANE_SEED = 1, 2


class PagedPlanes(Protocol):
    """What the stand-in needs of a device pool."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def access(self) -> PlaneAccess: ...


class StandIn:
    """Writes and checks KV bytes in the planes of a device pool. Holds scratch memory: one thread at a time.

    The word w of a token's row in plane p is  hash(token's prefix) ^ word_salt[w] ^ plane_salt[p].
    """

    def __init__(self, layout: KVLayout, poison_byte: int) -> None:
        self._layout = layout
        self._poison_byte = poison_byte
        self._row_bytes = layout.plane_bytes // layout.page_size
        width = next(width for width in (8, 4, 2, 1) if self._row_bytes % width == 0)
        self._word = np.dtype(f"<u{width}")
        self._word_salts = random_words(0, -(-self._row_bytes // 8), _WORD_SEED)
        self._plane_salts = _distinct(layout.num_planes).astype(self._word)
        self._block_pages = max(1, _BLOCK_BYTES // layout.plane_bytes)
        shape = (self._block_pages, layout.plane_bytes // width)
        self._found = np.empty(shape, self._word)
        self._differs = np.empty(shape, np.bool_)

    def write(self, pool: PagedPlanes, pages: PageIndices, first_token: int, hashes: Hashes) -> None:
        """Write all planes of tokens first_token .. first_token + len(hashes) - 1 of a request.

        `pages` is the request's page table from its token 0 on; pages may be filled in part.
        """
        size = self._layout.page_size
        end = first_token + len(hashes)
        whole_from = min(self._layout.pages_of(first_token), self._layout.whole_pages(end))
        whole_to = max(self._layout.whole_pages(end), whole_from)
        for start, stop in _partial_spans(first_token, end, size):
            self._write_span(
                pool, int(pages[start // size]), start % size, hashes[start - first_token :][: stop - start]
            )
        for page in range(whole_from, whole_to, self._block_pages):
            block = pages[page : min(page + self._block_pages, whole_to)]
            start = page * size - first_token
            self._write_pages(pool, block, hashes[start : start + len(block) * size])

    def wrong_pages(self, pool: PagedPlanes, pages: PageIndices, hashes: Hashes, planes: Sequence[int]) -> PageMask:
        """Which of `pages` do not hold the bytes of `hashes` (one a token, whole pages) in all of `planes`."""
        wrong = np.zeros(len(pages), np.bool_)
        size = self._layout.page_size
        for start in range(0, len(pages), self._block_pages):
            block = pages[start : start + self._block_pages]
            base = self._rows(hashes[start * size : (start + len(block)) * size]).reshape(len(block), -1)
            for plane in planes:
                differs = self._difference(pool, block, base, plane)
                if differs.any():
                    wrong[start : start + len(block)] |= differs.any(axis=1)
        return wrong

    def count_wrong(self, pool: PagedPlanes, pages: PageIndices, hashes: Hashes, planes: Sequence[int]) -> int:
        """Number of wrong pages among `pages`, see `wrong_pages`."""
        return int(self.wrong_pages(pool, pages, hashes, planes).sum())

    def poisoned_pages(self, pool: PagedPlanes, pages: PageIndices, planes: Sequence[int]) -> PageMask:
        """Which of `pages` hold a token made of the poison pattern alone, in any of `planes`."""
        poisoned = np.zeros(len(pages), np.bool_)
        for plane in planes:
            rows = self._read(pool, plane, pages).reshape(len(pages), self._layout.page_size, self._row_bytes)
            poisoned |= (rows == self._poison_byte).all(axis=2).any(axis=1)
        return poisoned

    def explain(self, pool: PagedPlanes, pages: PageIndices, hashes: Hashes, planes: Sequence[int]) -> Iterator[str]:
        """One line for each wrong page and plane: where its first wrong token is and what lies there."""
        size = self._layout.page_size
        for number, page in enumerate(pages.tolist()):
            expected = self._rows(hashes[number * size : (number + 1) * size])
            for plane in planes:
                row = expected ^ self._plane_salts[plane]
                found = self._read(pool, plane, np.array([page], np.int32)).view(self._word).reshape(row.shape)
                if (bad := (row != found).any(axis=1)).any():
                    offset = int(bad.argmax())
                    what = self._describe(row[offset].tobytes(), found[offset].tobytes())
                    yield f"{self._plane_name(plane)}, page {page}, token {number * size + offset}: {what}"

    def _describe(self, expected: bytes, found: bytes) -> str:
        if found == bytes([self._poison_byte]) * len(found):
            return "poison: the page was freed or never written"
        return f"expected {expected[:8].hex()}, found {found[:8].hex()}"

    def _plane_name(self, plane: int) -> str:
        layer, part = divmod(plane, self._layout.planes_per_layer)
        return f"plane {plane} (layer {layer} {('K', 'V')[part] if self._layout.kind == 'mha' else 'latent'})"

    def _difference(self, pool: PagedPlanes, pages: PageIndices, base: Words, plane: int) -> PageMask:
        """Words of `pages` that are wrong in `plane`, (pages, words); a view on scratch memory."""
        found, differs = self._found[: len(pages)], self._differs[: len(pages)]
        pool.access.read(plane, pages, found.view(np.uint8))
        np.bitwise_xor(found, base, out=found)
        np.not_equal(found, self._plane_salts[plane], out=differs)
        return differs

    def _write_pages(self, pool: PagedPlanes, pages: PageIndices, hashes: Hashes) -> None:
        base = self._rows(hashes).reshape(len(pages), -1)
        values = self._found[: len(pages)]
        for plane, salt in enumerate(self._plane_salts):
            pool.access.write(plane, pages, np.bitwise_xor(base, salt, out=values).view(np.uint8))

    def _write_span(self, pool: PagedPlanes, page: int, offset: int, hashes: Hashes) -> None:
        base = self._rows(hashes)
        for plane, salt in enumerate(self._plane_salts):
            pool.access.write_part(plane, page, offset * self._row_bytes, np.bitwise_xor(base, salt).view(np.uint8))

    def _read(self, pool: PagedPlanes, plane: int, pages: PageIndices) -> npt.NDArray[np.uint8]:
        """Copies of `pages` of a plane, (pages, plane_bytes)."""
        rows = np.empty((len(pages), self._layout.plane_bytes), np.uint8)
        pool.access.read(plane, pages, rows)
        return rows

    def _rows(self, hashes: Hashes) -> Words:
        """Rows of the tokens before the plane's salt, (tokens, words of a row)."""
        rows = np.empty((len(hashes), len(self._word_salts)), np.uint64)
        if len(self._word_salts) < _WIDE_ROW:  # numpy's inner loop runs over the last axis
            for column, salt in enumerate(self._word_salts):
                np.bitwise_xor(hashes, salt, out=rows[:, column])
        else:
            np.bitwise_xor(hashes[:, None], self._word_salts, out=rows)
        if rows.shape[1] * 8 == self._row_bytes:
            return rows
        cut: Words = np.ascontiguousarray(rows.view(np.uint8)[:, : self._row_bytes]).view(self._word)
        return cut


def _distinct(count: int) -> Hashes:
    """Salts whose low 8 bits differ too for up to 255 planes, as narrow rows keep no more of them."""
    salts = np.arange(1, count + 1, dtype=np.uint64)
    salts *= np.uint64(0x9E3779B97F4A7C15)
    return salts


def _partial_spans(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Token ranges at both ends of first .. end-1 that do not fill their page."""
    head = min(-(-first // size) * size, end)
    if first < head:
        yield first, head
    tail = end // size * size
    if head <= tail < end:
        yield tail, end
