"""The reference engine on a GPU: in exact mode hits of any tier change no bit, whatever fails or is evicted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hicache.serving.blocks import Mode
from hicache.serving.conversations import ConversationOptions
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.faults import break_copies
from hicache.serving.geometry import ModelGeometry
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import GenerationRequest
from hicache.serving.sampling import SamplingParams
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.serving.stress import StressOptions, check, run_stress
from hicache.serving.weights_random import random_model
from hicache.types import Tier

DEVICE, PAGE = "cuda", 16
FLOAT32 = ModelGeometry(
    layers=3, heads=8, kv_heads=2, head_dim=32, hidden=128, ffn=256, vocab=259, context=2048, tied=False
)
GEOMETRIES = {
    "float32": FLOAT32,
    "bfloat16": replace(FLOAT32, dtype="bfloat16"),
    "qwen3": replace(FLOAT32, qk_norm=True, rope_theta=1e6),
}
SMALL_STEPS = SchedulerOptions(step_tokens=64, chunk_tokens=40, reserve=0.0, patience=4)

Logits = dict[tuple[str, int], torch.Tensor]


def model_of(name: str) -> LoadedModel:
    return random_model(GEOMETRIES[name], seed=11)


def conversations(count: int, turns: int, tokens: int, answer: int) -> list[list[GenerationRequest]]:
    """Rounds of requests: round t has turn t of every conversation. All share a beginning, half are sampled."""
    draw = random.Random(1)
    system, rounds = _words(draw, 2 * PAGE + 3), []
    histories = [system + _words(draw, tokens) for _ in range(count)]
    for turn in range(turns):
        rounds.append([])
        for number, history in enumerate(histories):
            sampling = SamplingParams(0.7 * (number % 2), seed=number)
            rounds[-1].append(GenerationRequest(list(history), answer, sampling, f"{number}.{turn}", ignore_eos=True))
            history += _words(draw, tokens)
    return rounds


def _words(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, FLOAT32.vocab) for _ in range(length)]


def recorded(logits: Logits) -> Surroundings:
    return Surroundings(on_logits=lambda rid, position, row: logits.update({(rid, position): row.clone()}))


def reference(loaded: LoadedModel, rounds: Sequence[Sequence[GenerationRequest]], mode: Mode = "exact") -> Logits:
    """Each request alone, on an engine without cache on the same device."""
    logits: Logits = {}
    engine = plain_engine(loaded, 1024, mode=mode, surroundings=recorded(logits), device=DEVICE)
    for request in [request for requests in rounds for request in requests]:
        engine.generate([request])
    engine.close()
    return logits


def tokens_of(loaded: LoadedModel, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Answers of an engine without cache."""
    engine = plain_engine(loaded, 2048, device=DEVICE)
    answers = [engine.generate([request])[0].token_ids for request in requests]
    engine.close()
    return answers


def tiers(device: int, host: int, disk: Path | None = None, write: str = "write_through") -> list[dict[str, object]]:
    """Sizes in pages."""
    sections: list[dict[str, object]] = [
        {"tier": "device", "device": DEVICE, "size": f"{device} pages"},
        {"tier": "host", "size": f"{host} pages", "write": write},
    ]
    if disk is not None:
        prefetch = {"policy": "wait_complete", "deadline": "20s"}
        sections.append({"tier": "storage", "size": "256MiB", "path": str(disk), "prefetch": prefetch})
    return sections


def serve(engine: Engine, rounds: Sequence[Sequence[GenerationRequest]], emptied: Sequence[Tier] = ()) -> Counter[str]:
    """Round by round, with these tiers empty after each; hits by tier."""
    for requests in rounds:
        engine.generate(requests)
        engine.settle()
        assert engine.cache.flush(emptied).flushed
    hits = engine.metrics.reused_tokens
    engine.close()
    return hits


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_hits_of_any_tier_change_no_bit_of_any_logit(name: str, tmp_path: Path) -> None:
    """Device and host are too small; between both runs the cache restarts on the same disk."""
    loaded, rounds = model_of(name), conversations(5, 4, 25, 6)
    expected, hits, device = reference(loaded, rounds), Counter[str](), 16
    for host, emptied in ((100, [Tier.DEVICE]), (device + 4, [])):
        logits: Logits = {}
        config = serving_config(loaded, tiers(device, host, tmp_path), PAGE, poison=True)
        hits += serve(build_engine(loaded, config, SMALL_STEPS, surroundings=recorded(logits)), rounds, emptied)
        assert logits.keys() == expected.keys()
        assert [place for place, row in expected.items() if not torch.equal(logits[place], row)] == []
    assert all(hits[tier] > 0 for tier in ("device", "host", "storage")), hits


def test_a_restart_finds_on_disk_what_was_computed_before_it(tmp_path: Path) -> None:
    loaded, rounds = model_of("bfloat16"), conversations(2, 1, 3 * PAGE, 2)
    expected, found = reference(loaded, rounds), Counter[str]()
    for run in range(2):
        logits: Logits = {}
        config = serving_config(loaded, tiers(32, 32, tmp_path), PAGE, poison=True)
        found = serve(build_engine(loaded, config, surroundings=recorded(logits)), rounds)
        assert all(torch.equal(logits[place], row) for place, row in expected.items()), run
    assert found["storage"] >= 4 * PAGE, found


def test_the_store_of_a_gpu_is_not_that_of_a_cpu(tmp_path: Path) -> None:
    """Their last bits differ."""
    loaded, rounds = model_of("float32"), conversations(1, 1, 3 * PAGE, 1)
    sections = tiers(32, 32, tmp_path)
    serve(build_engine(loaded, serving_config(loaded, sections, PAGE)), rounds)
    sections[0]["device"] = "cpu"
    hits = serve(build_engine(loaded, serving_config(loaded, sections, PAGE)), rounds)
    assert not +hits, hits


@pytest.mark.parametrize("name, tolerance", [("float32", 1e-3), ("bfloat16", 0.25)])
def test_fast_mode_is_near(name: str, tolerance: float, tmp_path: Path) -> None:
    """To exact mode, and to itself over KV that went down to the disk and back."""
    loaded, rounds = model_of(name), conversations(4, 3, 40, 1)
    exact, fast = reference(loaded, rounds), reference(loaded, rounds, "fast")
    logits: Logits = {}
    config = serving_config(loaded, tiers(20, 24, tmp_path), PAGE, "fast", poison=True)
    hits = serve(build_engine(loaded, config, SMALL_STEPS, "fast", recorded(logits)), rounds, [Tier.DEVICE])
    assert hits["host"] + hits["storage"] > 0
    for place, row in exact.items():
        torch.testing.assert_close(fast[place], row, atol=tolerance, rtol=0.0)
        torch.testing.assert_close(logits[place], row, atol=tolerance, rtol=0.0)


def test_the_gpu_computes_what_the_cpu_does() -> None:
    loaded, (requests,) = model_of("float32"), conversations(2, 1, 60, 1)
    expected: Logits = {}
    engine = plain_engine(loaded, 1024, surroundings=recorded(expected), device="cpu")
    engine.generate(requests)
    engine.close()
    for place, row in reference(loaded, [requests]).items():
        assert row.device.type == "cpu"
        torch.testing.assert_close(row, expected[place], atol=1e-3, rtol=0.0)


def test_the_report_names_the_device() -> None:
    engine = plain_engine(model_of("float32"), 64, device=DEVICE)
    named = engine.report()["evidence"]["device"]
    engine.close()
    assert named == f"cuda:{torch.cuda.current_device()}, {torch.cuda.get_device_name()}"


# ---- trouble ------------------------------------------------------------------------------------


def test_a_load_that_fails_is_computed_anew() -> None:
    loaded, rounds = model_of("float32"), conversations(6, 5, 25, 3)
    config = serving_config(loaded, tiers(24, 200), PAGE, poison=True)
    engine = build_engine(loaded, config, SMALL_STEPS)
    faults = break_copies(engine.cache, 0.08, 1)
    answers = []
    for requests in rounds:
        answers += [handle.token_ids for handle in engine.generate(requests)]
        engine.settle()
        engine.cache.flush([Tier.DEVICE])
    failed = engine.metrics.failed_loads
    engine.close()
    assert faults.injected > 0 and failed > 0
    assert answers == tokens_of(loaded, [request for requests in rounds for request in requests])


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_evictions_race_loads_and_no_token_changes(write: str, tmp_path: Path) -> None:
    """Many requests over a device of a few pages: what one loads another one's eviction frees."""
    loaded, rounds = model_of("float32"), conversations(12, 4, 30, 8)
    requests = [request for turns in rounds for request in turns]  # a turn comes long after the one before
    config = serving_config(loaded, tiers(26, 60, tmp_path, write), PAGE, poison=True)
    options = replace(SMALL_STEPS, max_running=8, share_prefills=False)
    engine = build_engine(loaded, config, options)
    answers = [handle.token_ids for handle in engine.generate(requests)]
    engine.settle()
    hits, stats = engine.metrics.reused_tokens, engine.cache.stats()
    engine.close()
    assert answers == tokens_of(loaded, requests)
    assert hits["host"] > 0 and stats.moved_bytes["host_device"] > 0 and not stats.failures, (hits, stats)


@pytest.mark.parametrize("loaded", [None, random_model(replace(FLOAT32, layers=2), seed=3)], ids=["stand-in", "model"])
def test_chats_while_everything_fails_that_can(loaded: LoadedModel | None, tmp_path: Path) -> None:
    """The stand-in checks every byte of KV that is used."""
    options = StressOptions(
        seconds=5.0,
        sessions=2,
        session_requests=60,
        concurrent=12,
        device_tokens=1024,
        host_tokens=4096,
        device=DEVICE,
        copy_faults=0.01,
        talk=ConversationOptions(conversations=20, context=512, system_tokens=64, tool_tokens=96),
    )
    report = run_stress(tmp_path / "disk", options, loaded, print)
    check(report)
    assert report.compared > 0 and report.sessions >= 2
    assert report.metrics.reused_tokens["host"] + report.metrics.reused_tokens["storage"] > 0
