from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from hicache.sim.report import bytes_moved, to_json, to_table
from hicache.sim.result import ReplayResult
from hicache.sim.waiting import Skipped

RESULT = ReplayResult(
    requests=20,
    prompt_tokens=1000,
    output_tokens=300,
    hit_tokens={"device": 500, "host": 200, "storage": 50},
    computed_tokens=250,
    recomputed_tokens=32,
    retractions=2,
    failed_loads=1,
    skipped=(Skipped("7", 250, 260, 200),),
    demoted_pages={"device_host": 12, "host_storage": 3},
    dropped_pages={"host_full": 4},
    moved_bytes={"device_host": 3 * 2**20},
    failures={"store_disk_full": 3},
    storage_loads="on",
    storage_stores="off",
    checked_pages=90,
    wrong_pages=0,
    poisoned_pages=0,
    wrong_examples=(),
    seconds=2.0,
)


def show(result: ReplayResult, verified: bool = True) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(to_table(result, verified))
    return out.getvalue()


def test_json_has_the_documented_keys_and_plain_values() -> None:
    document = json.loads(json.dumps(to_json(RESULT)))
    assert document["requests"] == 20
    assert document["prompt_tokens"] == 1000
    assert document["hit_tokens"] == {"device": 500, "host": 200, "storage": 50}
    assert document["computed_tokens"] == 250
    assert document["demoted_pages"] == {"device_host": 12, "host_storage": 3}
    assert document["dropped_pages"] == {"host_full": 4}
    assert document["failures"] == {"store_disk_full": 3}
    assert (document["storage_loads"], document["storage_stores"]) == ("on", "off")
    assert document["wrong_pages"] == 0
    assert document["seconds"] == 2.0


def test_the_table_shows_tiers_edges_reasons_and_the_verdict() -> None:
    text = show(RESULT)
    for expected in (
        "hit on device", "40.0%", "hit on storage", "4.0%", "computed", "too long to run", "1,250",
        "pages demoted: device to host", "12",
        "pages dropped: host_full", "bytes moved: device to host", "3.0 MiB", "20 requests in 2.0 s, 500 prompt",
        "2 retracted", "1 failed loads", "32 tokens recomputed", "1 skipped",
        "failures: store_disk_full", "stores to storage: off",
        "wrong pages = 0 of 90 checked", "request 7 takes 260 tokens",
    ):  # fmt: skip
        assert expected in text
    assert "loads from storage" not in text


def test_wrong_pages_are_shown_with_their_place() -> None:
    text = show(replace(RESULT, wrong_pages=3, poisoned_pages=1, wrong_examples=("request 4: plane 1, page 9",)))
    assert "wrong pages = 3 of 90 checked, 1 of them poisoned" in text
    assert "request 4: plane 1, page 9" in text


def test_an_unverified_run_claims_nothing() -> None:
    text = show(RESULT, verified=False)
    assert "wrong pages" not in text
    assert "not checked" in text


def test_an_empty_run_divides_by_nothing() -> None:
    empty = replace(
        RESULT, requests=0, prompt_tokens=0, computed_tokens=0, dropped_pages={}, seconds=0.0,
        hit_tokens={"device": 0, "host": 0, "storage": 0},
    )  # fmt: skip
    assert empty.hit_rate == 0
    assert "0.0%" in show(empty)


def test_bytes_are_shown_in_their_unit() -> None:
    assert [bytes_moved(value) for value in (0, 1023, 1024, 5 * 2**30, 2**51)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 GiB", "2048.0 TiB",
    ]  # fmt: skip
