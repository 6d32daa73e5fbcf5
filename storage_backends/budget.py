"""How a disk budget is split: so much for the LMDB map, so much for pages. Both limits hold by construction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hicache.errors import ConfigError
from hicache.layout import KVLayout, round_up
from hicache.storage_backends.codecs import create_codec

ValuesMode: TypeAlias = Literal["slab", "inline"]

MIB = 1 << 20

MIN_PAGES = 16
"""The least a store must hold: one batch."""

INDEX_BYTES_PER_PAGE = 512
"""Upper bound of what one page takes in the index: 300 to 450 bytes were measured, by how full its B-trees are."""

MAX_CHUNK_PAGES, MAX_CHUNK_BYTES = 1024, 128 << 20
"""Most pages written, or evicted, in one transaction, and most bytes written: encoded pages are held so long."""

_OS_PAGE = 4096
_VALUE_HEADER = 16


def inline_cost(length: int) -> int:
    """Bytes of the map that a value of `length` bytes takes: LMDB gives large values whole pages."""
    return round_up(length + _VALUE_HEADER, _OS_PAGE)


def page_cost(layout: KVLayout, codec: str, values: ValuesMode) -> int:
    """Most bytes that an encoded page takes outside the index: a slot, or a value. Raises ConfigError."""
    encoder = create_codec(codec, layout)
    slot_bytes = encoder.slot_bytes[-1] if encoder is not None else layout.page_stride
    return slot_bytes if values == "slab" else inline_cost(max(layout.page_bytes, slot_bytes - _OS_PAGE))


@dataclass(frozen=True)
class Budget:
    """Limits of one store: bytes of LMDB map, and bytes of slots (slab) or of values in the map (inline)."""

    map_bytes: int
    data_bytes: int

    def chunk_pages(self, page_cost: int) -> int:
        """Pages of `page_cost` bytes to be written in one transaction."""
        return max(1, min(MAX_CHUNK_PAGES, MAX_CHUNK_BYTES // page_cost, self.data_bytes // page_cost // 8))


@dataclass(frozen=True)
class BudgetPlan:
    """A store of `budget_bytes` bytes, begun for pages that take `page_cost` bytes outside the index."""

    values: ValuesMode
    budget_bytes: int
    page_cost: int

    @classmethod
    def for_pages(cls, values: ValuesMode, pages: int, page_cost: int) -> BudgetPlan:
        """The least budget, to a page, that holds `pages` pages."""
        plan = cls(values, pages * page_cost, page_cost)
        while (short := pages - plan.pages) > 0:
            plan = replace(plan, budget_bytes=plan.budget_bytes + short * page_cost)
        return plan

    @property
    def pages(self) -> int:
        """Pages that the store holds at least; 0 if the budget is too small for a store."""
        try:
            return self.split().data_bytes // self.page_cost
        except ConfigError:
            return 0

    @property
    def file_bytes(self) -> int:
        """What the largest file of the store may come to. Raises ConfigError as `split`."""
        budget = self.split()
        return max(budget.map_bytes, 0 if self.values == "inline" else budget.data_bytes)

    def split(self, used_bytes: int = 0, setbacks: int = 0) -> Budget:
        """The limits, given that the map takes `used_bytes` and was found full `setbacks` times.

        Raises ConfigError if less than one batch fits.
        """
        budget = self._inline(setbacks) if self.values == "inline" else self._slab(used_bytes)
        if budget.data_bytes < MIN_PAGES * self.page_cost:
            raise ConfigError(self._too_small())
        return budget

    def _slab(self, used_bytes: int) -> Budget:
        """Index and slabs side by side. An index that takes more than usual takes it from the slabs."""
        base = self._working_bytes
        pages = max(0, (self.budget_bytes - base) // (self.page_cost + INDEX_BYTES_PER_PAGE))
        map_bytes = round_up(max(base + pages * INDEX_BYTES_PER_PAGE, used_bytes + base // 2), _OS_PAGE)
        # Extent blocks of a slab file count as its own.
        return Budget(map_bytes, self.budget_bytes - map_bytes - 64 * 1024 - self.budget_bytes // 65536)

    def _inline(self, setbacks: int) -> Budget:
        """Everything in the map.

        Room that a transaction frees is usable two commits later, hence two chunks are kept free. Each
        setback leaves an eighth of the pages out and adds to the map what was held back for it.
        """
        base = self._working_bytes
        value = self.page_cost + INDEX_BYTES_PER_PAGE
        room = max(0, (self.budget_bytes - 2 * base) // value)
        chunk = max(1, min(MAX_CHUNK_PAGES, room // 8))
        pages = int((room - 2 * chunk) * 0.875**setbacks)
        held_back = base * max(0, 4 - setbacks) // 4
        map_bytes = (self.budget_bytes - held_back) // _OS_PAGE * _OS_PAGE
        return Budget(map_bytes, pages * self.page_cost)

    @property
    def _working_bytes(self) -> int:
        """What copy-on-write takes beside the live index: a few transactions' worth of dirty pages."""
        return min(max(self.budget_bytes // 32, MIB), 32 * MIB)

    def _too_small(self) -> str:
        index_bytes = 2 * self._working_bytes
        # Twice a batch: room for the pages, for copy-on-write and for what grows with the budget.
        least = 2 * MIN_PAGES * (self.page_cost + _OS_PAGE) + index_bytes
        return (
            f"a storage budget of {self.budget_bytes / MIB:.1f} MiB does not hold one batch of {MIN_PAGES} pages of "
            f"{self.page_cost} bytes beside its index: give it at least {least / MIB:.1f} MiB"
        )
