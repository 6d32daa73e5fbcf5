"""How a page of one of SGLang's host pools lies in memory, and how it is cut for the store.

A *part* is what is stored under one key. Where a pool keeps each page in a few runs of equal length that O_DIRECT
can read and write in place (MHA in a page-first layout: the K half and the V half), a part is such a run and nothing
is copied. Everywhere else a page is one part, which passes through aligned memory of ours.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError
from hicache.host_pool.arena import Placement, allocate_aligned, huge_page_problem
from hicache.layout import HOST_ALIGNMENT, round_up

Bytes: TypeAlias = npt.NDArray[np.uint8]

MAX_PARTS = 4
"""Pages in more runs are copied: many small transfers cost more than a copy."""

SCRATCH_BYTES = 32 << 20
"""Aligned memory that each thread which moves pages keeps for those that are copied; at least one page."""


@dataclass(frozen=True)
class PageForm:
    """A page is `parts` parts of `part_bytes` bytes. `in_place`: they are transferred from and to the pool itself.
    `in_view`: the pool's own pages are views of its memory, not copies. `dtype`: of its flat pages."""

    parts: int
    part_bytes: int
    in_place: bool
    in_view: bool
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.parts * self.part_bytes


def form_of(pool: Any, name: str) -> PageForm:
    """The form of the pages of a host pool (a HostKVCache). Raises ConfigError for one whose pages cannot be stored."""
    try:
        page = pool.get_data_page(0, flat=False)
    except _NO_SUCH_PAGES as error:
        raise ConfigError(f"pool {name!r} in layout {pool.layout} gives no pages to store: {error}") from error
    if page is None or not page.numel():
        raise ConfigError(f"pool {name!r} holds no KV of its own: this model needs another storage backend")
    pointers, sizes = _runs(pool)
    if _can_be_in_place(page, pointers, sizes):
        return PageForm(len(pointers), sizes[0], True, True, page.dtype)
    in_view = page.data_ptr() == pool.get_data_page(0, flat=False).data_ptr()
    return PageForm(1, page.nbytes, False, in_view, page.dtype)


_NO_SUCH_PAGES = (AttributeError, NotImplementedError, TypeError, ValueError)
"""How SGLang's pools say that they have no pages in this way, or no memory."""


def _runs(pool: Any) -> tuple[list[int], list[int]]:
    """Addresses and lengths of the runs of page 0; none for a pool that does not tell them."""
    try:
        found = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except _NO_SUCH_PAGES:
        return [], []
    return (list(found[0]), list(found[1])) if found else ([], [])


def _can_be_in_place(page: torch.Tensor, pointers: list[int], sizes: list[int]) -> bool:
    """Are the runs of equal length, aligned, few, and in the order in which a flat page has them?"""
    aligned = all(number % HOST_ALIGNMENT == 0 for number in (*pointers, *sizes))
    if not aligned or not 1 <= len(pointers) <= MAX_PARTS or len(set(sizes)) != 1:
        return False
    pieces = [page] if len(pointers) == 1 else list(page)
    found = [(piece.data_ptr(), piece.nbytes) for piece in pieces if piece.is_contiguous()]
    return found == list(zip(pointers, sizes))


class Scratch:
    """Page-aligned memory of the calling thread, in huge pages where the machine has them: disks move larger pieces."""

    def __init__(self, page_bytes: int) -> None:
        self.stride = round_up(page_bytes, HOST_ALIGNMENT)
        self.pages = max(1, SCRATCH_BYTES // self.stride)
        self._local = threading.local()

    def page(self, index: int) -> memoryview:
        arena = getattr(self._local, "arena", None)
        if arena is None:
            placement = Placement(huge_pages=huge_page_problem() is None)
            arena = self._local.arena = allocate_aligned(self.pages * self.stride, placement).data
        return arena[index * self.stride : (index + 1) * self.stride]


class PageBatch(ABC):
    """The pages of one call. Their parts follow each other, page by page. At most `step` pages are moved at a time."""

    step: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sources(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of pages start .. stop-1."""

    @abstractmethod
    def targets(self, start: int, stop: int) -> list[memoryview]:
        """Where the bytes of pages start .. stop-1 are to be read to; call `landed` afterwards."""

    @abstractmethod
    def landed(self, start: int, stop: int) -> None:
        """The targets of these pages hold their bytes now."""


class InPlacePages(PageBatch):
    """Pages in the memory of the pool. `indices`: their token slots."""

    def __init__(self, pool: Any, form: PageForm, indices: torch.Tensor) -> None:
        self._pool = pool  # keeps the memory
        self._count = len(indices) // int(pool.page_size)
        self.step = max(1, self._count)
        self._parts = form.parts
        pointers, _ = pool.get_page_buffer_meta(indices)
        whole = ctypes.c_char * form.part_bytes
        self._views = [memoryview(whole.from_address(pointer)).cast("B") for pointer in pointers]

    def __len__(self) -> int:
        return self._count

    def sources(self, start: int, stop: int) -> list[memoryview]:
        return self._views[start * self._parts : stop * self._parts]

    def targets(self, start: int, stop: int) -> list[memoryview]:
        return self.sources(start, stop)

    def landed(self, start: int, stop: int) -> None:
        """Nothing: they are where they belong."""


class CopiedPages(PageBatch):
    """Pages that pass through scratch. `pull(i)` gives the bytes of page i in any shape, `push(i, flat)` takes them.

    Copies are numpy's: those of torch wake all its threads for each page, and those compete with the engine's.
    """

    def __init__(
        self,
        form: PageForm,
        scratch: Scratch,
        count: int,
        pull: Callable[[int], Bytes],
        push: Callable[[int, Bytes], None],
    ) -> None:
        self.step = scratch.pages
        self._form, self._scratch, self._count = form, scratch, count
        self._pull, self._push = pull, push

    def __len__(self) -> int:
        return self._count

    def sources(self, start: int, stop: int) -> list[memoryview]:
        for index in range(start, stop):
            page = self._pull(index)
            np.copyto(self._flat(index - start).reshape(page.shape), page)
        return self._buffers(stop - start)

    def targets(self, start: int, stop: int) -> list[memoryview]:
        return self._buffers(stop - start)

    def landed(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            self._push(index, self._flat(index - start))

    def _buffers(self, count: int) -> list[memoryview]:
        """A part takes the rest of its slot along, so that its length suits O_DIRECT."""
        size = round_up(self._form.part_bytes, HOST_ALIGNMENT)
        starts = range(0, self._form.parts * size, size)
        return [self._scratch.page(index)[start : start + size] for index in range(count) for start in starts]

    def _flat(self, index: int) -> Bytes:
        """The bytes of a page in scratch."""
        return np.frombuffer(self._scratch.page(index)[: self._form.page_bytes], np.uint8)


def pages_at(pool: Any, form: PageForm, scratch: Scratch, indices: torch.Tensor) -> PageBatch:
    """The pages of `pool` at `indices`, token slots: page_size of them in a row for each page."""
    if form.in_place:
        return InPlacePages(pool, form, indices)
    slots = [int(slot) for slot in indices[:: pool.page_size]]

    def pull(index: int) -> Bytes:
        return _bytes_of(pool.get_data_page(slots[index], flat=False))

    def push(index: int, flat: Bytes) -> None:
        if form.in_view:
            page = pull(index)
            np.copyto(page, flat.reshape(page.shape))
        else:
            pool.set_from_flat_data_page(slots[index], torch.from_numpy(flat).view(form.dtype))

    return CopiedPages(form, scratch, len(slots), pull, push)


def flat_pages(form: PageForm, scratch: Scratch, tensors: Sequence[torch.Tensor]) -> PageBatch:
    """Pages in tensors of their own, in the order of their parts."""

    def pull(index: int) -> Bytes:
        return _bytes_of(tensors[index].reshape(-1))

    def push(index: int, flat: Bytes) -> None:
        np.copyto(_bytes_of(tensors[index].view(-1)), flat)

    return CopiedPages(form, scratch, len(tensors), pull, push)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """A view of the tensor's bytes; its last dimension must be contiguous."""
    return tensor.view(torch.uint8).numpy()
