"""Greedy answers in float32 are the same from every tier, and the engine says how many tokens were cached."""

from __future__ import annotations

from collections.abc import Callable

from engines import prompt, run_engine, second_turn

PAIR = [prompt(0), prompt(1)]
Tiers = Callable[..., str]


def test_the_host_gives_back_what_was_computed(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    again = [second_turn(seed, reference[seed]) for seed in range(2)]
    steps = [
        ["generate", PAIR],
        ["reset", False],
        ["generate", PAIR],
        ["reset", False],
        ["generate", again],  # with the blocks of the answer
        ["reset", True],
        ["generate", PAIR],
        ["state"],
        ["metrics"],
    ]
    cold, _, host, _, turn, reset, gone, state, metrics = run_engine(steps, model=model, tiers=tiers(disk=None))
    assert cold["tokens"] == host["tokens"] == gone["tokens"] == reference[:2]
    assert turn["tokens"] == reference[8:10]
    assert (cold["cached"], host["cached"], turn["cached"]) == ([0, 0], [992, 992], [1024, 1024])
    assert reset is True and gone["cached"] == [0, 0]
    assert state["open_jobs"] == state["pins"] == state["tracks"] == 0
    assert state["owned_pages"] == state["entries"] == 2 * 32
    assert metrics["vllm:external_prefix_cache_hits"] == 2 * (992 + 1024)


def test_a_restart_finds_the_disk(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    """The engine's core and its worker are processes of their own here."""
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    file = tiers()
    (cold,) = run_engine([["generate", PAIR]], env, model=model, tiers=file)
    turns = [second_turn(seed, reference[seed]) for seed in range(2)]
    steps = [["generate", PAIR], ["generate", turns], ["reset", True], ["generate", PAIR]]
    disk, turn, reset, cleared = run_engine(steps, env, model=model, tiers=file)
    (later,) = run_engine([["generate", PAIR]], env, model=model, tiers=file)
    assert cold["tokens"] == disk["tokens"] == cleared["tokens"] == later["tokens"] == reference[:2]
    assert turn["tokens"] == reference[8:10]
    assert (cold["cached"], disk["cached"], turn["cached"]) == ([0, 0], [992, 992], [1024, 1024])
    assert reset is True and cleared["cached"] == [0, 0]
    assert later["cached"] == [992, 992]  # written again after the reset


def test_a_reset_reaches_the_disk_of_an_engine_that_stops_then(model: str, tiers: Tiers) -> None:
    file = tiers()
    run_engine([["generate", PAIR], ["reset", True]], model=model, tiers=file)
    (later,) = run_engine([["generate", PAIR]], model=model, tiers=file)
    assert later["cached"] == [0, 0]


def test_a_small_host_is_backed_by_the_disk(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    """Eight prompts of 31 blocks pass a host of 40: what left it comes from disk, and the engine says so."""
    eight = [["generate", [prompt(seed)]] for seed in range(8)]
    steps = [*eight, ["reset", False], *eight, ["state"], ["metrics"]]
    *results, state, metrics = run_engine(steps, model=model, tiers=tiers(host="1280 tokens"))
    first, second = results[:8], results[9:]
    assert [one["tokens"][0] for one in first] == [one["tokens"][0] for one in second] == reference[:8]
    assert [one["cached"] for one in first] == [[0]] * 8
    assert [one["cached"] for one in second] == [[992]] * 8
    assert state["owned_pages"] == state["entries"] <= 40 and state["pins"] == state["open_jobs"] == 0
    assert state["counters"]["demoted_blocks"] > 0 and state["counters"]["fetched_blocks"] >= 7 * 31
    by_source = {name: value for name, value in metrics.items() if "source=" in name}
    assert any("disk" in name and value >= 7 * 992 for name, value in by_source.items()), metrics


def test_a_host_of_one_block_does_no_harm(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    steps = [["generate", PAIR], ["reset", False], ["generate", PAIR], ["state"]]
    cold, _, again, state = run_engine(steps, model=model, tiers=tiers(host="32 tokens"))
    assert cold["tokens"] == again["tokens"] == reference[:2]
    assert state["pins"] == state["open_jobs"] == 0 and state["owned_pages"] == state["entries"] <= 1


def test_preempted_requests_give_the_same_answers(model: str, tiers: Tiers) -> None:
    """Six requests that grow from 7 blocks to 10 each, in a pool of 44 blocks; vLLM counts its preemptions."""
    six = [prompt(seed, 200) for seed in range(6)]
    alone = [["generate", [one], {"max_tokens": 120}] for one in six]
    plain = run_engine(alone, model=model, engine={"enable_prefix_caching": False})
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "max_num_batched_tokens": 512}
    steps = [["generate", six, {"max_tokens": 120}]] * 2 + [["metrics"], ["state"]]
    cold, again, metrics, state = run_engine(steps, model=model, tiers=tiers(), engine=small)
    assert cold["tokens"] == again["tokens"] == [one["tokens"][0] for one in plain]
    assert metrics["vllm:num_preemptions"] > 0
    assert again["cached"] == [192] * 6
    assert state["pins"] == state["open_jobs"] == 0 and state["owned_pages"] == state["entries"]


def test_two_ranks_share_the_index_and_keep_pages_of_their_own(
    model: str, reference: list[list[int]], tiers: Tiers
) -> None:
    ranks = {"tensor_parallel_size": 2}
    file = tiers()
    steps = [["generate", PAIR[:1]], ["reset", False], ["generate", PAIR[:1]]]
    cold, _, host = run_engine(steps, model=model, tiers=file, engine=ranks)
    (disk,) = run_engine(steps[:1], model=model, tiers=file, engine=ranks)
    (alone,) = run_engine(steps[:1], model=model, tiers=file)  # no page of the ranks is one of the whole model
    assert cold["tokens"] == host["tokens"] == disk["tokens"] == alone["tokens"] == reference[:1]
    assert [one["cached"] for one in (cold, host, disk, alone)] == [[0], [992], [992], [0]]
