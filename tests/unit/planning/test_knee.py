from __future__ import annotations

from hicache.planning.knee import knee


def test_the_corner_of_two_lines() -> None:
    assert knee([0, 1, 2, 3, 4, 5], [0, 40, 80, 85, 90, 95]) == 2


def test_sizes_count_and_not_positions() -> None:
    assert knee([1, 2, 4, 8, 100], [0, 30, 60, 90, 100]) == 3


def test_a_line_and_a_curve_that_bends_up_have_none() -> None:
    assert knee([0, 1, 2, 3], [0, 1, 2, 3]) is None
    assert knee([0, 1, 2, 3], [0, 1, 4, 9]) is None
    assert knee([0, 1, 2], [5, 5, 5]) is None
