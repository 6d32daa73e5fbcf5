from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.layout import DTYPE_BYTES, KVLayout
from hicache.plane_access import HostPlanes
from hicache.sim.prefix_hash import Hashes, PrefixHasher
from hicache.sim.standin import StandIn

POISON = 0xDB
NUM_PAGES = 12
LAYOUTS = [
    KVLayout(2, 1, 8, 4, "float16"),
    KVLayout(3, 2, 40, 2, "bfloat16"),
    KVLayout(2, 1, 3, 4, "int8"),
    KVLayout(1, 1, 1, 1, "float8_e5m2"),
    KVLayout(2, 1, 18, 4, "float32", kind="mla"),
    KVLayout(2, 1, 5, 512, "float16", kind="mla"),
    *(KVLayout(1, 2, 6, 8, dtype) for dtype in DTYPE_BYTES),
]


@dataclass
class Pool:
    layout: KVLayout
    planes: list[npt.NDArray[np.uint8]] = field(init=False)

    def __post_init__(self) -> None:
        shape = (NUM_PAGES, self.layout.plane_bytes)
        self.planes = [np.full(shape, POISON, np.uint8) for _ in range(self.layout.num_planes)]

    @property
    def num_pages(self) -> int:
        return NUM_PAGES

    @property
    def access(self) -> HostPlanes:
        return HostPlanes(self.planes)


def hashes(count: int, namespace: bytes = b"", seed: int = 0) -> Hashes:
    tokens = np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)
    return PrefixHasher(namespace).extend(tokens)


def page_table() -> npt.NDArray[np.int32]:
    return np.random.default_rng(1).permutation(NUM_PAGES).astype(np.int32)[:5]


def filled(layout: KVLayout) -> tuple[Pool, StandIn, Hashes]:
    pool, standin, values = Pool(layout), StandIn(layout, POISON), hashes(5 * layout.page_size)
    standin.write(pool, page_table(), 0, values)
    return pool, standin, values


def all_planes(layout: KVLayout) -> range:
    return range(layout.num_planes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_written_is_right_and_nothing_else_is_touched(layout: KVLayout) -> None:
    pool, standin, values = filled(layout)
    assert standin.count_wrong(pool, page_table(), values, all_planes(layout)) == 0
    untouched = np.setdiff1d(np.arange(NUM_PAGES), page_table())
    assert all((plane[untouched] == POISON).all() for plane in pool.planes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_flipped_byte_is_found_and_named(layout: KVLayout) -> None:
    pool, standin, values = filled(layout)
    rng = np.random.default_rng(2)
    for _ in range(30):
        plane, number, byte = rng.integers(layout.num_planes), rng.integers(5), rng.integers(layout.plane_bytes)
        page = int(page_table()[number])
        pool.planes[plane][page, byte] ^= 1 << rng.integers(8)
        wrong = standin.wrong_pages(pool, page_table(), values, all_planes(layout))
        assert np.flatnonzero(wrong).tolist() == [number]
        others = [other for other in all_planes(layout) if other != plane]
        assert standin.count_wrong(pool, page_table(), values, others) == 0
        token = number * layout.page_size + byte * layout.page_size // layout.plane_bytes
        (line,) = standin.explain(pool, page_table(), values, all_planes(layout))
        assert line.startswith(f"plane {plane} ")
        assert f"page {page}, token {token}: " in line
        standin.write(pool, page_table(), 0, values)


def test_every_byte_of_a_page_counts() -> None:
    layout = LAYOUTS[0]
    pool, standin, values = filled(layout)
    for plane in pool.planes:
        for byte in range(layout.plane_bytes):
            plane[page_table()[3], byte] ^= 0x10
            assert standin.count_wrong(pool, page_table(), values, all_planes(layout)) == 1
            plane[page_table()[3], byte] ^= 0x10


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_planes_pages_and_tokens_differ(layout: KVLayout) -> None:
    pool, standin, values = filled(layout)
    blocks = [plane[page_table()[number]].tobytes() for plane in pool.planes for number in range(5)]
    if layout.plane_bytes > 4:
        assert len(set(blocks)) == len(blocks)
    exchanged = page_table()[[1, 0, 2, 3, 4]]
    assert standin.count_wrong(pool, exchanged, values, all_planes(layout)) == 2


def test_another_namespace_or_prefix_has_other_bytes() -> None:
    layout = LAYOUTS[0]
    pool, standin, _ = filled(layout)
    for other in (hashes(20, b"salt"), hashes(20, seed=9)):
        assert standin.count_wrong(pool, page_table(), other, all_planes(layout)) == 5


def test_exchanged_planes_are_wrong() -> None:
    pool, standin, values = filled(LAYOUTS[0])
    pool.planes[0], pool.planes[1] = pool.planes[1], pool.planes[0]
    assert standin.count_wrong(pool, page_table(), values, [0]) == 5
    assert standin.count_wrong(pool, page_table(), values, [2, 3]) == 0


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 37), max_size=8), layout=st.sampled_from(LAYOUTS[:5]))
def test_chunks_of_any_length_write_what_one_write_does(cuts: list[int], layout: KVLayout) -> None:
    end = min(37, 5 * layout.page_size)
    values, standin = hashes(end), StandIn(layout, POISON)
    whole, parts = Pool(layout), Pool(layout)
    standin.write(whole, page_table(), 0, values)
    bounds = [0, *sorted(min(cut, end) for cut in cuts), end]
    for start, stop in itertools.pairwise(bounds):
        standin.write(parts, page_table(), start, values[start:stop])
    assert all(np.array_equal(a, b) for a, b in zip(whole.planes, parts.planes, strict=True))


def test_a_long_page_table_is_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.sim.standin._BLOCK_BYTES", 2 * LAYOUTS[0].plane_bytes)
    pool, standin, values = filled(LAYOUTS[0])
    assert standin.count_wrong(pool, page_table(), values, [0, 1, 2, 3]) == 0
    for number in (1, 4):
        pool.planes[3][page_table()[number], -1] ^= 1
    wrong = standin.wrong_pages(pool, page_table(), values, [0, 1, 2, 3])
    assert np.flatnonzero(wrong).tolist() == [1, 4]


def test_poison_is_told_from_other_wrong_bytes() -> None:
    layout = LAYOUTS[0]
    pool, standin, values = filled(layout)
    pool.planes[2][page_table()[1]] = POISON
    pool.planes[0][page_table()[3], 5] ^= 1
    planes = all_planes(layout)
    assert standin.wrong_pages(pool, page_table(), values, planes).tolist() == [False, True, False, True, False]
    assert standin.poisoned_pages(pool, page_table(), planes).tolist() == [False, True, False, False, False]
    poisoned, flipped = standin.explain(pool, page_table(), values, planes)
    assert (
        poisoned == f"plane 2 (layer 1 K), page {page_table()[1]}, token 4: poison: the page was freed or never written"
    )
    assert "plane 0 (layer 0 K)" in flipped
    assert "expected" in flipped


def test_one_token_of_poison_poisons_a_page_and_one_byte_does_not() -> None:
    layout = LAYOUTS[1]
    pool, standin, _ = filled(layout)
    row = layout.plane_bytes // layout.page_size
    pool.planes[4][page_table()[2], row : 2 * row] = POISON
    pool.planes[4][page_table()[3], row : 2 * row - 1] = POISON
    assert standin.poisoned_pages(pool, page_table(), [4]).tolist() == [False, False, True, False, False]
