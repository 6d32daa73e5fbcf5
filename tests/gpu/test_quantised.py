"""A quantised host pool under a GPU: bit for bit what the codec of the disk tier makes on a CPU, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.device_pool import DevicePool
from hicache.host_pool.pool import HostPool
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.layout import KVLayout
from hicache.serving.geometry import ModelGeometry
from hicache.serving.outputs import GenerationRequest
from hicache.serving.setup import build_engine, serving_config
from hicache.serving.weights_random import random_model
from hicache.storage_backends.codecs import create_quantiser
from hicache.streams import record_compute
from hicache.transfer.copy_engine import CopyEngine
from hicache.types import PageIndices

DEVICE = "cuda"
LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, page_size=16)
"""32 KiB a plane of 16 bits, 256 KiB a page."""

PAGES = 32
HALF = PAGES // 2


class Pools:
    """Device pages of normal values, of another scale in each layer."""

    def __init__(self, codec: str, dtype: str = "float16", pinned: bool = True) -> None:
        self.layout = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, LAYOUT.page_size, dtype)
        self.device = DevicePool(self.layout, PAGES, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(1)
        for layer in range(self.layout.num_layers):
            for tensor in (self.device.k(layer), self.device.v(layer)):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE) * 4.0 ** (layer - 2))
        if DEVICE != "cpu":
            torch.cuda.current_stream().synchronize()  # copies go on other streams
        self.host = HostPool(self.layout, PAGES, pinned, codec=codec)
        self.codec = create_quantiser(codec, self.layout)
        self.engine = CopyEngine.between(self.device, self.host)

    def device_pages(self, pages: PageIndices) -> np.ndarray:
        """(pages, page_bytes): as the device has them."""
        out = np.empty((self.layout.num_planes, len(pages), self.layout.plane_bytes), np.uint8)
        for plane, rows in enumerate(out):
            self.device.access.read(plane, pages, rows)
        return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(len(pages), -1)

    def encoded(self, pages: np.ndarray) -> np.ndarray:
        out = np.zeros((len(pages), self.host.page_stride), np.uint8)
        for page, row in zip(pages, out):
            self.codec.encode(page.data, row.data)
        return out[:, : self.host.format.page_bytes]

    def on_host(self, pages: PageIndices) -> np.ndarray:
        return self.host.array[pages, : self.host.format.page_bytes]

    def decoded(self, pages: PageIndices) -> np.ndarray:
        """(pages, page_bytes): as the codec reads host pages."""
        out = np.zeros((len(pages), self.layout.page_bytes), np.uint8)
        for data, page in zip(self.on_host(pages), out):
            self.codec.decode(np.ascontiguousarray(data).data, page.data)
        return out

    def close(self) -> None:
        self.engine.close()
        self.host.close()


@pytest.fixture(params=["fp8 float16", "int8 bfloat16", "fp8 float32", "int8 float16 unpinned"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    codec, dtype, *unpinned = request.param.split()
    made = Pools(codec, dtype, pinned=not unpinned)
    yield made
    made.close()


def shuffled(seed: int) -> PageIndices:
    return np.random.default_rng(seed).permutation(PAGES).astype(np.int32)


def test_pages_go_down_and_come_back_as_the_codec_has_them(pools: Pools) -> None:
    there, on_host, back = shuffled(1)[:HALF], shuffled(2)[:HALF], shuffled(3)[:HALF]
    before = pools.device_pages(there)
    pools.engine.backup(there, on_host, record_compute(pools.device.device)).synchronize()
    np.testing.assert_array_equal(pools.on_host(on_host), pools.encoded(before))
    pools.engine.load_back(on_host, back).synchronize()
    np.testing.assert_array_equal(pools.device_pages(back), pools.decoded(on_host))


def test_a_page_that_went_down_once_stays_what_it_is(pools: Pools) -> None:
    pages = shuffled(4)[:8]
    pools.engine.backup(pages, pages).synchronize()
    pools.engine.load_back(pages, pages).synchronize()
    before, first = pools.device_pages(pages), pools.on_host(pages).copy()
    pools.engine.backup(pages, pages).synchronize()
    np.testing.assert_array_equal(pools.on_host(pages), first)
    pools.engine.load_back(pages, pages).synchronize()
    np.testing.assert_array_equal(pools.device_pages(pages), before)


def test_what_lies_between_pages_is_left_alone(pools: Pools) -> None:
    pools.host.array[:] = 0xA5
    pages = shuffled(5)
    pools.engine.backup(pages[:HALF], pages[:HALF]).synchronize()
    assert (pools.host.array[pages[HALF:]] == 0xA5).all()
    assert (pools.host.array[:, pools.host.format.page_bytes :] == 0xA5).all()


def test_a_layer_is_there_when_its_event_says_so(pools: Pools) -> None:
    """Several loads in flight; each layer is compared as soon as it may be read."""
    order = shuffled(6)
    pools.engine.backup(order, order).synchronize()
    wanted = pools.decoded(order).reshape(PAGES, pools.layout.num_planes, -1)
    pools.device.poison(order)
    loads = [pools.engine.load_back(part, part) for part in np.split(order, 4)]
    rows = np.empty((PAGES, pools.layout.plane_bytes), np.uint8)
    for layer in range(pools.layout.num_layers):
        for load in loads:
            load.layer_done(layer).synchronize()
        for plane in (2 * layer, 2 * layer + 1):
            pools.device.access.read(plane, order, rows)
            np.testing.assert_array_equal(rows, wanted[:, plane], f"plane {plane}")


def test_both_directions_beside_busy_compute(pools: Pools) -> None:
    matrix, order = torch.randn(1024, 1024, device=DEVICE), shuffled(7)
    up, down = order[:HALF], order[HALF:]
    pools.engine.backup(up, up).synchronize()
    for _ in range(3):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        load, backup = pools.engine.load_back(up, up), pools.engine.backup(down, down)
        load.synchronize()
        backup.synchronize()
        np.testing.assert_array_equal(pools.on_host(down), pools.encoded(pools.device_pages(down)))
        np.testing.assert_array_equal(pools.device_pages(up), pools.decoded(up))


def test_the_choice_measures_the_ways_down_and_changes_no_device_page() -> None:
    pools = Pools("fp8")
    every = np.arange(PAGES, dtype=np.int32)
    before = pools.device_pages(every)
    planes = pools.device.planes
    assert isinstance(planes, CudaPlanes)
    copier = CudaCopier(planes, pools.host.array, form=pools.host.format)
    assert set(copier.choice.gb_per_second) == {"down staged", "down kernel"}
    assert copier.choice.up.name == "kernel"
    np.testing.assert_array_equal(pools.device_pages(every), before)
    pools.close()


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_an_engine_serves_from_host_and_disk(tmp_path: Path, codec: str) -> None:
    """What was asked before comes from the host, after a restart from the disk: the same pages, the same answer."""
    geometry = ModelGeometry(
        layers=3, heads=8, kv_heads=2, head_dim=32, hidden=128, ffn=256, vocab=259, context=2048, tied=False
    )
    loaded = random_model(geometry, seed=11)
    tiers = [
        {"tier": "device", "device": DEVICE, "size": "24 pages"},
        {"tier": "host", "size": "128 pages", "codec": codec},
        {"tier": "storage", "size": "64MiB", "path": str(tmp_path / "store"), "prefetch": {"policy": "wait_complete"}},
    ]
    prompt, cached, answers = list(range(3, 200)), [], []
    for prompts in ((0, 1, 2, 0), (0,)):
        engine = build_engine(loaded, serving_config(loaded, tiers))
        for first in prompts:
            handle = engine.generate([GenerationRequest([first, *prompt], 8, ignore_eos=True)])[0]
            assert handle.metrics is not None
            cached.append(dict(handle.metrics.cached_tokens))
            answers.append(handle.token_ids)
        engine.close()
    nothing = {"device": 0, "host": 0, "storage": 0}
    assert cached == [nothing] * 3 + [nothing | {"host": 192}, nothing | {"storage": 192}]
    assert answers[3] == answers[4]
