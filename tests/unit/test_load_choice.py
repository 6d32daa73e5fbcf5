from __future__ import annotations

from hicache.costs import Costs, Link, PrefillCost
from hicache.load_choice import LoadChoice, PageSizes, StorageLoad

PAGES = PageSizes(tokens=16, host=16_000, stored=16_000)
QUIET = StorageLoad(reads=1, waiting=1)


def choice(to_device: float = 1e9, disk: float = 1e9, hysteresis: float = 0.1, pairs: float = 0.0) -> LoadChoice:
    """A token takes 1 ms to compute, and 1,000 bytes: bandwidths of 1 MB/s are as fast as that."""
    costs = Costs(PrefillCost(1e-3, pairs), to_device=Link(to_device), disk_read=Link(disk))
    return LoadChoice("auto", costs, PAGES, hysteresis, overlap=64)


def test_always_and_never_speak_for_themselves() -> None:
    always, never = LoadChoice(), LoadChoice("never")
    assert always.from_host(0, 320, 400).tokens == 320 and never.from_host(0, 320, 400).tokens == 0
    assert always.from_storage(0, 20, QUIET) == 20 and never.from_storage(0, 20, QUIET) == 0
    assert always.waits_for(0, 20, QUIET) and never.waits_for(0, 20, QUIET)
    never.taken(never.from_host(0, 320, 400))
    assert not never.counts.choices


def test_what_is_faster_to_load_is_loaded_and_counted_when_it_is_taken() -> None:
    fast = choice(to_device=2e6)
    load = fast.from_host(0, 320, 400)
    assert load.tokens == 320 and not fast.counts.choices
    fast.taken(load)
    assert fast.counts.choices == {"host_loaded": 1} and fast.counts.declined_tokens == {"host": 0}


def test_of_what_is_slower_the_head_is_loaded_that_the_next_chunk_hides() -> None:
    slow = choice(to_device=0.5e6)  # 2 ms a token; 64 tokens of compute, 64 ms, hide 32 tokens
    load = slow.from_host(0, 320, 400)
    assert load.tokens == 32
    slow.taken(load)
    assert slow.counts.choices == {"host_split": 1} and slow.counts.declined_tokens == {"host": 288}
    assert abs(slow.counts.saved_seconds - (320 * 2e-3 - 288 * 1e-3)) < 1e-9
    hopeless = choice(to_device=1e3).from_host(0, 320, 400)
    assert hopeless.tokens == 0


def test_attention_makes_the_end_of_a_long_prompt_worth_loading() -> None:
    deep = choice(to_device=0.5e6, pairs=1e-5)  # at token 1,000 a token takes 11 ms to compute
    assert deep.from_host(0, 96, 400).tokens < 96
    assert choice(to_device=0.5e6, pairs=1e-5).from_host(1000, 320, 1400).tokens == 320


def test_near_the_point_of_equality_the_choice_stays_what_it_was() -> None:
    slower, faster = 0.95e6, 1.05e6
    loading = choice(to_device=slower)
    assert loading.from_host(0, 320, 400).tokens == 320  # 5 % slower is not worth a change
    assert choice(to_device=slower, hysteresis=0.0).from_host(0, 320, 400).tokens < 320
    computing = choice(to_device=faster)
    computing._loads["host"] = False
    assert computing.from_host(0, 320, 400).tokens < 320  # nor is 5 % faster
    computing = choice(to_device=1.2e6)
    computing._loads["host"] = False
    assert computing.from_host(0, 320, 400).tokens == 320


def test_reads_that_take_turns_are_slower_and_who_waits_makes_computing_dear() -> None:
    disk = 1.5e6
    assert choice(disk=disk).from_storage(0, 20, StorageLoad(1, 1)) == 20
    assert choice(disk=disk).from_storage(0, 20, StorageLoad(4, 1)) == 0
    assert choice(disk=disk).from_storage(0, 20, StorageLoad(4, 8)) == 20
    assert choice(disk=disk).waits_for(0, 20, StorageLoad(1, 1))
    assert not choice(disk=disk).waits_for(0, 20, StorageLoad(4, 1))
    assert choice(disk=disk).waits_for(0, 20, StorageLoad(4, 8))


def test_from_a_slow_disk_the_head_is_read_that_arrives_while_the_request_waits_anyway() -> None:
    slow = choice(disk=0.5e6)  # 32 ms a page
    assert slow.from_storage(0, 20, QUIET) == 0
    for _ in range(50):
        slow.measured_wait(0.17)
    assert slow.from_storage(0, 20, QUIET) == 5
    assert slow.counts.choices == {"storage_recomputed": 1, "storage_split": 1}
    assert slow.counts.declined_tokens == {"storage": (20 + 15) * 16}


def test_storage_is_believed_by_what_it_does_and_not_by_what_the_configuration_says() -> None:
    fast = choice(disk=100e6)
    assert fast.waits_for(0, 20, QUIET)
    for _ in range(30):
        fast.measured_read(10, 10 * 0.1)  # 100 ms a page, to compute one takes 16
    assert not fast.waits_for(0, 20, QUIET)
    assert fast.counts.choices == {"storage_cut": 1} and fast.counts.declined_tokens == {"storage": 320}
    assert fast.counts.saved_seconds > 1.0
    fast.measured_read(0, 0.0)
