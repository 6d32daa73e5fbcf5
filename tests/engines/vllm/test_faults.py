"""A copy that fails, a disk that dies: requests are computed, answers stay right, nothing wrong is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import prompt, run_engine

PAIR = [prompt(0), prompt(1)]
FAULTY = ["faulty", "FaultyConnector"]
Tiers = Callable[..., str]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_failed_load_is_computed_and_poisons_nothing(
    model: str, reference: list[list[int]], tiers: Tiers, processes: str
) -> None:
    """The load has written its first layer when it fails, and takes the one behind it along. What is computed and
    stored then must be right."""
    env = {"HICACHE_TEST_FAULTS": "loads=1", "VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    steps = [["generate", PAIR], ["reset", False], ["generate", PAIR], ["reset", False], ["generate", PAIR]]
    results = run_engine(steps, env, model=model, tiers=tiers(disk=None), connector=FAULTY)
    cold, failed, after = results[0], results[2], results[4]
    assert cold["tokens"] == failed["tokens"] == after["tokens"] == reference[:2]
    assert [set(one["reasons"]) for one in (cold, failed, after)] == [{"length"}] * 3
    assert after["cached"] == [992, 992]  # stored anew


def test_a_failed_store_is_a_miss(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    env = {"HICACHE_TEST_FAULTS": "stores=1"}
    steps = [["generate", [prompt(0)]], ["reset", False], ["generate", [prompt(0)]], ["state"]]
    cold, _, again, state = run_engine(steps, env, model=model, tiers=tiers(), connector=FAULTY)
    assert cold["tokens"] == again["tokens"] == reference[:1]
    assert again["cached"] == [0]
    assert state["counters"]["failed_stores"] == 1 and state["pins"] == state["open_jobs"] == 0


@pytest.mark.parametrize("disk", ["dead-disk=0", "dead-disk=2", "hanging-disk=0"])
def test_serving_goes_on_without_its_disk(model: str, reference: list[list[int]], tiers: Tiers, disk: str) -> None:
    file = tiers(more=", load_deadline: 1s, store_deadline: 1s")
    path = Path(file)
    path.write_text(path.read_text().replace("deadline: 10s", "deadline: 500ms"))
    steps = [["generate", PAIR], ["reset", False], ["generate", PAIR], ["generate", [prompt(2)]]]
    cold, _, host, other = run_engine(steps, {"HICACHE_TEST_FAULTS": disk}, model=model, tiers=file, connector=FAULTY)
    assert cold["tokens"] == host["tokens"] == reference[:2] and other["tokens"] == reference[2:3]
    assert host["cached"] == [992, 992]


def test_damaged_pages_are_misses(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    """Every slab loses some bytes in its middle: the answers are computed."""
    file = tiers()
    run_engine([["generate", PAIR]], model=model, tiers=file)
    store = Path(file).parent / "store"
    slabs = [one for one in store.rglob("*") if one.is_file() and one.stat().st_size > 1 << 20 and one.suffix != ".mdb"]
    assert slabs
    for slab in slabs:
        with slab.open("r+b") as stream:
            for offset in range(0, slab.stat().st_size, 4096):
                stream.seek(offset)
                byte = stream.read(1)
                stream.seek(offset)
                stream.write(bytes([byte[0] ^ 1]))
    (later,) = run_engine([["generate", PAIR]], model=model, tiers=file)
    assert later["tokens"] == reference[:2]
    assert later["cached"] == [0, 0]


def test_after_a_reset_nothing_of_a_store_that_was_removed_is_found(
    model: str, reference: list[list[int]], tiers: Tiers, tmp_path: Path
) -> None:
    """Its files are still open in the ranks: what they hold may be KV of weights that have changed since."""
    steps: list[list[object]] = [["generate", [prompt(0)]], ["state"], ["remove", str(tmp_path / "store")]]
    steps += [["reset", True], ["generate", [prompt(0)]], ["state"], ["reset", False], ["generate", [prompt(0)]]]
    cold, stored, _, reset, after, _, _, again = run_engine(steps, model=model, tiers=tiers())
    assert stored["counters"]["persisted_blocks"] > 0
    assert reset is True and after["cached"] == [0]
    assert again["cached"] == [992]  # computed again, and kept
    assert cold["tokens"] == after["tokens"] == again["tokens"] == reference[:1]
