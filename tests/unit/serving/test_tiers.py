"""Logits over KV that comes back from host and disk equal, bit for bit, those of a run without any cache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from serving_models import LLAMA, PAGE, QWEN3, STORIES, run, tokens_of

from hicache.build import build_cache, build_requests
from hicache.cache import HiCache
from hicache.config.loading import config_from_mapping
from hicache.device_pool import DevicePool
from hicache.requests import Admission, Request, RequestManager
from hicache.serving.blocks import Chunk
from hicache.serving.loaded import LoadedModel
from hicache.serving.model import Transformer
from hicache.serving.weights import load_model
from hicache.serving.weights_random import random_model
from hicache.types import Tier

PROMPT = 5 * PAGE + 3
DECODED = 2 * PAGE


def model_of(name: str) -> LoadedModel:
    if name == "stories" and not STORIES.exists():
        pytest.skip("needs the data beside the project")
    return load_model(STORIES) if name == "stories" else random_model({"llama": LLAMA, "qwen3": QWEN3}[name], seed=5)


def cache_of(loaded: LoadedModel, folder: Path, codec: str = "none") -> HiCache:
    """A device of 16 pages, a host of 32 with this codec, and a disk."""
    tiers = [
        {"tier": "device", "size": "16 pages"},
        {"tier": "host", "size": "32 pages", "codec": codec},
        {"tier": "storage", "size": "64MiB", "path": str(folder), "prefetch": {"policy": "wait_complete"}},
    ]
    mapping = {"model": loaded.model_section(), "page_size": PAGE, "poison": True, "tiers": tiers}
    return build_cache(config_from_mapping(mapping))


def serve(model: Transformer, requests: RequestManager, tokens: torch.Tensor) -> tuple[Admission, torch.Tensor]:
    """Serve one request of these tokens: the prompt by pages, then one by one. Logits of each step."""
    cache, request = requests.cache, Request("r", tokens.numpy())
    cache.prefetch("r", request.key())
    while not cache.prefetch_ready("r"):
        cache.poll()
        time.sleep(0.001)
    admission = requests.admit(request)
    assert admission is not None and request.row is not None

    def wait(layer: int) -> None:
        for load in admission.loads:
            load.layer_done(layer).synchronize()

    logits, start = [], admission.prefix_len
    while start < len(tokens):
        stop = min(start + PAGE, PROMPT) if start < PROMPT else start + 1
        assert requests.extend(request, stop)
        table = torch.from_numpy(requests.req_to_token_pool.token_slots(request.row, 0, stop))
        logits.append(model.forward([Chunk(tokens[start:stop], table)], cache.tiers.device_pool, wait)[0])
        requests.commit(request, stop)
        start = stop
    requests.cache_finished_req(request)
    cache.end_step(None)
    assert cache.drain(30)
    return admission, torch.stack(logits)


def plain_run(model: Transformer, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Logits after each of the last `count` tokens, computed without cache by pages and their beginnings."""
    layout, table = model.geometry.layout(PAGE), torch.arange(len(tokens))
    ends = range(len(tokens) - count + 1, len(tokens) + 1)
    rows = []
    for end in ends:
        pool = DevicePool(layout, layout.pages_of(end))
        sizes = [PAGE] * (end // PAGE) + [end % PAGE] * (end % PAGE > 0)
        rows.append(run(model, pool, tokens[:end], table, sizes)[-1])
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["llama", "qwen3", "stories"])
def test_hits_of_every_tier_change_no_bit(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loaded = model_of(name)
    model, tokens = Transformer(loaded.geometry, loaded.tensors), tokens_of(PROMPT + DECODED, loaded.geometry.vocab)
    expected = plain_run(model, tokens, 3)
    cache = cache_of(loaded, tmp_path)
    requests = build_requests(cache)
    hits = []
    for emptied in ((), (), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
        cache.flush(emptied, timeout=30)
        admission, logits = serve(model, requests, tokens)
        assert torch.equal(logits[-3:], expected)
        hits.append((admission.device_len, admission.host_len, admission.storage_len))
    cache.check_integrity()
    cache.close()
    whole = (PROMPT + DECODED - 1) // PAGE * PAGE
    assert hits == [(0, 0, 0), (whole, 0, 0), (0, whole, 0), (0, 0, whole)]


@pytest.mark.parametrize("codec, most", [("fp8", 0.2), ("int8", 0.05)])
def test_hits_of_a_host_that_quantises_are_near_and_alike(codec: str, most: float, tmp_path: Path) -> None:
    """`most`: the largest change of a logit, where they have a standard deviation of 1 or so."""
    torch.set_num_threads(1)
    loaded = model_of("llama")
    model, tokens = Transformer(loaded.geometry, loaded.tensors), tokens_of(PROMPT + DECODED, loaded.geometry.vocab)
    expected = plain_run(model, tokens, 3)
    cache = cache_of(loaded, tmp_path, codec)
    requests = build_requests(cache)
    hits, results = [], []
    for emptied in ((), (), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
        cache.flush(emptied, timeout=30)
        admission, logits = serve(model, requests, tokens)
        results.append(logits[-3:])
        hits.append((admission.device_len, admission.host_len, admission.storage_len))
    cache.close()
    whole = (PROMPT + DECODED - 1) // PAGE * PAGE
    assert hits == [(0, 0, 0), (whole, 0, 0), (0, whole, 0), (0, 0, whole)]
    computed, on_device, from_host, from_disk = results
    assert torch.equal(computed, expected) and torch.equal(on_device, expected)  # not quantised so far
    assert torch.equal(from_host, from_disk)
    change = (from_host - expected).abs().max() / expected.std()
    assert 0 < change < most
