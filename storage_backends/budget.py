"""How a disk budget is split: so much for the LMDB map, so many pages. Both are limits that hold by construction."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.layout import KVLayout, round_up

MIB = 1 << 20

MIN_PAGES = 16
"""The least a store must hold: one batch."""

INDEX_BYTES_PER_PAGE = 512
"""Upper bound of what one page takes in the index: 265 to 400 bytes were measured, by how full its B-trees are."""

_OS_PAGE = 4096
_VALUE_HEADER = 16


@dataclass(frozen=True)
class Budget:
    """Limits of one store: `map_bytes` of LMDB map and `max_pages` stored pages."""

    map_bytes: int
    max_pages: int
    chunk_pages: int  # pages written in one transaction


def slab_budget(budget_bytes: int, layout: KVLayout, used_bytes: int = 0) -> Budget:
    """Index and slab side by side. An index that takes more (`used_bytes`) than usual takes it from the slab.

    Raises ConfigError if less than one batch fits.
    """
    base = _working_bytes(budget_bytes)
    pages = max(0, (budget_bytes - base) // (layout.page_stride + INDEX_BYTES_PER_PAGE))
    map_bytes = round_up(max(base + pages * INDEX_BYTES_PER_PAGE, used_bytes + base // 2), _OS_PAGE)
    pages = (budget_bytes - map_bytes - _file_system_bytes(budget_bytes)) // layout.page_stride
    _check(pages, budget_bytes, layout, map_bytes)
    return Budget(map_bytes, pages, _chunk(pages))


def inline_budget(budget_bytes: int, layout: KVLayout, used_bytes: int = 0, setbacks: int = 0) -> Budget:
    """Everything in the map.

    Room that a transaction frees is usable two commits later, hence two chunks are kept free. Each
    setback (the map was full) leaves an eighth of the pages out and adds to the map what was held
    back for it. Raises ConfigError if less than one batch fits.
    """
    if used_bytes > budget_bytes:
        raise ConfigError(
            f"the store takes {used_bytes / MIB:.1f} MiB, which is over its budget of {budget_bytes / MIB:.1f} MiB, "
            "and inline values cannot shrink: raise the budget or remove the store"
        )
    base = _working_bytes(budget_bytes)
    value = round_up(layout.page_bytes + _VALUE_HEADER, _OS_PAGE) + INDEX_BYTES_PER_PAGE
    room = (budget_bytes - 2 * base) // value
    pages = int((room - 2 * _chunk(room)) * 0.875**setbacks)
    _check(pages, budget_bytes, layout, 2 * base)
    held_back = base * max(0, 4 - setbacks) // 4
    return Budget((budget_bytes - held_back) // _OS_PAGE * _OS_PAGE, pages, _chunk(room))


def _working_bytes(budget_bytes: int) -> int:
    """What copy-on-write takes beside the live index: a few transactions' worth of dirty pages."""
    return min(max(budget_bytes // 32, MIB), 32 * MIB)


def _file_system_bytes(budget_bytes: int) -> int:
    """Extent blocks of the slab file, which count as its own."""
    return 64 * 1024 + budget_bytes // 65536


def _chunk(pages: int) -> int:
    return max(1, min(1024, pages // 8))


def _check(pages: int, budget_bytes: int, layout: KVLayout, index_bytes: int) -> None:
    if pages >= MIN_PAGES:
        return
    # Twice a batch: room for the pages, for copy-on-write and for what grows with the budget.
    least = 2 * MIN_PAGES * (layout.page_stride + _OS_PAGE) + index_bytes
    raise ConfigError(
        f"a storage budget of {budget_bytes / MIB:.1f} MiB does not hold one batch of {MIN_PAGES} pages of "
        f"{layout.page_stride} bytes beside its index: give it at least {least / MIB:.1f} MiB"
    )
