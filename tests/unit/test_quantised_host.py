"""A host tier that quantises: what comes back from it, from the disk behind it, and after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.build import build_cache, build_requests
from hicache.cache import HiCache
from hicache.config import CacheConfig, config_from_mapping
from hicache.errors import ConfigError
from hicache.kernels.base import Bytes2D
from hicache.layout import KVLayout
from hicache.requests import Admission, Request
from hicache.storage_backends.codecs import create_codec
from hicache.types import Tier

PAGE = 4
HOST_PAGES = 8
FIRST = list(range(1000, 1000 + 3 * PAGE + 1))
"""Three whole pages, and the token that is always computed."""


def config_of(host: str, dtype: str = "float16", /, **storage: object) -> CacheConfig:
    """Device of 4 pages, host of 8 with the codec `host`; with `storage`, a tier of these options."""
    model = {"name": "example/quantised", "layers": 3, "kv_heads": 2, "head_dim": 96, "dtype": dtype}
    tiers: list[dict[str, object]] = [
        {"tier": "device", "device": "cpu", "size": "4 pages"},
        {"tier": "host", "size": f"{HOST_PAGES} pages", "codec": host},
    ]
    if storage:
        prefetch = {"policy": "wait_complete", "deadline": "20s"}
        tiers.append({"tier": "storage", "size": "16MiB", "prefetch": prefetch, **storage})
    return config_from_mapping({"model": model, "page_size": PAGE, "poison": True, "tiers": tiers})


class Served:
    """A cache, and a model whose KV are normal values that depend on the tokens so far."""

    def __init__(self, config: CacheConfig) -> None:
        self.cache: HiCache = build_cache(config)
        self.requests = build_requests(self.cache)
        self.layout = self.cache.layout

    def serve(self, tokens: list[int]) -> tuple[Admission, list[np.ndarray]]:
        """A whole request. Returns what the tiers served of it, and those pages as the device has them."""
        request = Request("r", tokens)
        self.cache.prefetch("r", request.key())
        while not self.cache.prefetch_ready("r"):
            self.cache.poll()
        admission = self.requests.admit(request)
        while admission is None or not self.requests.extend(request, len(tokens)):
            if admission is not None:
                self.requests.retract(request)
            assert self.cache.drain(20)
            admission = self.requests.admit(request)
        assert self.cache.drain(20)
        pages = self.requests.pages(request)
        hits = [self._read(page) for page in pages[: admission.prefix_len // PAGE]]
        for number in range(len(hits), len(pages)):
            self._write(int(pages[number]), kv(self.layout, tokens, number))
        self.requests.commit(request, len(tokens))
        self.requests.cache_finished_req(request)
        self.cache.end_step(None)
        assert self.cache.drain(20)
        self.cache.check_integrity()
        return admission, hits

    def push_out(self, prompts: int) -> None:
        """Serve others, until the first ones have left."""
        for number in range(prompts):
            self.serve([7 + number] * len(FIRST))

    def _planes(self) -> list[Bytes2D]:
        planes = self.cache.tiers.device_pool.planes
        assert isinstance(planes, list)
        return planes

    def _read(self, page: int) -> np.ndarray:
        return np.concatenate([plane[page] for plane in self._planes()])

    def _write(self, page: int, data: np.ndarray) -> None:
        for plane, part in zip(self._planes(), data.reshape(self.layout.num_planes, -1)):
            plane[page] = part


def kv(layout: KVLayout, tokens: list[int], number: int) -> np.ndarray:
    """The page `number` of a prompt, page_bytes bytes."""
    random = np.random.default_rng(tokens[: (number + 1) * PAGE])
    values = random.normal(0, 1, layout.num_planes * PAGE * layout.num_kv_heads * layout.head_dim).astype(np.float32)
    if layout.dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(layout.dtype).view(np.uint8)


def lossy(layout: KVLayout, codec: str, tokens: list[int]) -> list[np.ndarray]:
    """The whole pages of a prompt after the codec."""
    coder = create_codec(codec, layout)
    assert coder is not None
    pages = []
    for number in range(len(tokens) // PAGE):
        out, page = bytearray(coder.slot_bytes[-1]), np.zeros(layout.page_bytes, np.uint8)
        length = coder.encode(kv(layout, tokens, number).data, memoryview(out))
        coder.decode(memoryview(out)[:length], page.data)
        assert not np.array_equal(page, kv(layout, tokens, number))
        pages.append(page)
    return pages


@pytest.fixture
def opened() -> Iterator[list[Served]]:
    caches: list[Served] = []
    yield caches
    for each in caches:
        each.cache.close()


codecs = pytest.mark.parametrize("codec", ["fp8", "int8"])


@codecs
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_hit_on_the_host_is_what_the_codec_gives_back(opened: list[Served], codec: str, dtype: str) -> None:
    served = Served(config_of(codec, dtype))
    opened.append(served)
    served.serve(FIRST)
    served.push_out(1)
    admission, hits = served.serve(FIRST)
    assert (admission.device_len, admission.host_len) == (0, 3 * PAGE)
    np.testing.assert_array_equal(hits, lossy(served.layout, codec, FIRST))
    host = served.cache.tiers.host
    assert host is not None
    assert host.pool.array.shape == (HOST_PAGES, host.pool.format.page_stride)
    moved = served.cache.stats().moved_bytes
    assert moved["host_device"] == 3 * host.pool.format.page_bytes < 3 * served.layout.page_bytes


@codecs
def test_pages_that_go_up_and_down_again_stay_what_they_are(opened: list[Served], codec: str) -> None:
    served = Served(config_of(codec))
    opened.append(served)
    served.serve(FIRST)
    for _ in range(3):
        served.push_out(1)
        admission, hits = served.serve(FIRST)
        assert admission.host_len == 3 * PAGE
        np.testing.assert_array_equal(hits, lossy(served.layout, codec, FIRST))
        assert served.cache.flush({Tier.HOST}, timeout=20).flushed  # the next copy is of quantised values


@codecs
@pytest.mark.parametrize("backend", ["lmdb", "inline", "memory"])
def test_a_hit_on_storage_is_what_the_codec_gives_back(
    opened: list[Served], tmp_path: Path, codec: str, backend: str
) -> None:
    lmdb = {"path": str(tmp_path / "store"), "values": "inline" if backend == "inline" else "slab"}
    served = Served(config_of(codec, **({"backend": "memory"} if backend == "memory" else lmdb)))
    opened.append(served)
    served.serve(FIRST)
    served.push_out(4)
    admission, hits = served.serve(FIRST)
    assert (admission.device_len, admission.host_len, admission.storage_len) == (0, 0, 3 * PAGE)
    np.testing.assert_array_equal(hits, lossy(served.layout, codec, FIRST))
    host = served.cache.tiers.host
    assert host is not None
    moved, stride = served.cache.stats().moved_bytes, host.pool.page_stride
    assert (moved["host_storage"], moved["storage_host"]) == (5 * 3 * stride, 3 * stride)


@codecs
@pytest.mark.parametrize("values", ["slab", "inline"])
@pytest.mark.parametrize("writer, reader", [("host", "host"), ("host", "disk"), ("disk", "host")])
def test_host_and_disk_codec_make_the_same_store(
    opened: list[Served], tmp_path: Path, codec: str, values: str, writer: str, reader: str
) -> None:
    """What one has written, the other reads after a restart: a host tier that quantises, or a disk tier that does."""
    path = str(tmp_path / "store")
    configs = {
        "host": config_of(codec, path=path, values=values),
        "disk": config_of("none", path=path, values=values, codec=codec),
    }
    assert configs["host"].identity() == configs["disk"].identity()
    first = Served(configs[writer])
    first.serve(FIRST)
    first.cache.close()
    second = Served(configs[reader])
    opened.append(second)
    admission, hits = second.serve(FIRST)
    assert admission.storage_len == 3 * PAGE
    np.testing.assert_array_equal(hits, lossy(second.layout, codec, FIRST))


@codecs
def test_a_damaged_page_is_a_miss(opened: list[Served], tmp_path: Path, codec: str) -> None:
    config = config_of(codec, path=str(tmp_path / "store"))
    first = Served(config)
    first.serve(FIRST)
    first.cache.close()
    slab = next(path for path in (tmp_path / "store").iterdir() if path.name.startswith("slab"))
    data = bytearray(slab.read_bytes())
    for start in range(0, len(data), config.host_format().page_stride):
        data[start + 100] ^= 1
    slab.write_bytes(data)
    second = Served(config)
    opened.append(second)
    admission, _ = second.serve(FIRST)
    assert admission.prefix_len == 0


def test_pages_that_are_not_quantised_are_another_store(opened: list[Served], tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = Served(config_of("none", path=path))
    first.serve(FIRST)
    first.cache.close()
    second = Served(config_of("fp8", path=path))
    opened.append(second)
    assert second.serve(FIRST)[0].prefix_len == 0


@pytest.mark.parametrize("stored", ["none", "zstd", "int8"])
def test_another_codec_on_the_disk_is_refused(tmp_path: Path, stored: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiers\[2\]\.codec: '{stored}' cannot be, the host tier has codec fp8"):
        config_of("fp8", path=str(tmp_path), codec=stored)


def test_the_same_codec_on_the_disk_may_be_written(tmp_path: Path) -> None:
    assert config_of("fp8", path=str(tmp_path), codec="fp8").stored_codec == "fp8"
    assert config_of("fp8", path=str(tmp_path)).stored_codec == "fp8"
    assert config_of("none", path=str(tmp_path), codec="zstd").stored_codec == "zstd"
    assert config_of("fp8").stored_codec == "fp8"


def test_values_of_one_byte_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.codec: .*int8 has one already: use none"):
        config_of("int8", "int8")


@codecs
@pytest.mark.parametrize("dtype, ratio", [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_the_same_bytes_hold_more_tokens(codec: str, dtype: str, ratio: int) -> None:
    model = {"name": "example/large", "layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": dtype}

    def tokens(**host: object) -> int:
        tiers = [{"tier": "device", "size": "1 pages"}, {"tier": "host", "size": "8GiB", **host}]
        capacity = config_from_mapping({"model": model, "page_size": 64, "tiers": tiers}).capacity(Tier.HOST)
        assert capacity is not None and capacity.nbytes <= capacity.budget_bytes == 8 << 30
        return capacity.tokens

    assert 0.99 * ratio < tokens(codec=codec) / tokens() < ratio
