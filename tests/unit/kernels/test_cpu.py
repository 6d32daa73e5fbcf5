"""The choice between slice copies and fancy indexing; the bytes themselves are checked by the conformance tests."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.kernels import cpu
from hicache.testing.kernels import CopyCase, check_gather, check_scatter, in_place


def _kinds(sources: list[int], targets: list[int], plane_bytes: int) -> list[type]:
    spans = cpu._spans(np.array(sources, np.int32), np.array(targets, np.int32), plane_bytes)
    return [type(span) for span, _ in spans]


def test_neighbours_on_both_sides_are_one_slice() -> None:
    assert _kinds([3, 4, 5, 9, 10], [0, 1, 2, 3, 4], cpu.LONG_RUN_BYTES) == [slice, slice]


def test_neighbours_on_one_side_only_are_no_run() -> None:
    assert _kinds([3, 4, 5], [2, 1, 0], cpu.LONG_RUN_BYTES) == [slice] * 3


def test_small_scattered_pages_go_in_few_calls() -> None:
    pages = list(range(0, 8000, 2))
    assert _kinds(pages, pages, 64) == [np.ndarray]


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 30])
def test_chunks_cover_every_page(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 8 * 16)
    order = np.random.default_rng(batch).permutation(40)[:batch].astype(np.int32)
    case = CopyCase(3, 16, 64, 40, 40, order, order[::-1].copy())
    check_gather(in_place(cpu.CpuCopier), case)
    check_scatter(in_place(cpu.CpuCopier), case, 1, 2)
