"""Copies between a device pool and a pinned host pool, as the copy engine orders them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hicache.device_pool import DevicePool
from hicache.errors import TransferError
from hicache.host_pool.pool import HostPool
from hicache.kernels.base import PageCopier, PageCopy
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.layout import KVLayout
from hicache.serving.faults import FaultyCopier
from hicache.streams import create_stream, record_compute
from hicache.transfer.copy_engine import CopyEngine
from hicache.types import PageIndices

LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, page_size=16)
"""32 KiB a plane, 512 KiB a page."""

PAGES = 256
LONG = 200_000_000
"""Clock cycles of the GPU, some 0.1 s."""


class Pools:
    def __init__(self, layout: KVLayout = LAYOUT, num_pages: int = PAGES, pinned: bool = True) -> None:
        self.device = DevicePool(layout, num_pages, "cuda")
        self.host = HostPool(layout, num_pages, pinned)
        self.engine = CopyEngine.between(self.device, self.host)

    def fill_host(self, seed: int = 0) -> None:
        self.host.array[:] = np.random.default_rng(seed).integers(0, 256, self.host.array.shape, np.uint8)

    def expect(self, device_pages: PageIndices, host_pages: PageIndices) -> None:
        """The pages of both pools hold the same bytes, in all planes."""
        size = self.device.layout.plane_bytes
        out = np.empty((len(device_pages), size), np.uint8)
        for plane in range(self.device.layout.num_planes):
            self.device.access.read(plane, device_pages, out)
            wanted = self.host.array[host_pages, plane * size : (plane + 1) * size]
            np.testing.assert_array_equal(out, wanted, f"plane {plane}")

    def close(self) -> None:
        self.engine.close()
        self.host.close()


@pytest.fixture(params=[True, False], ids=["pinned", "unpinned"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    made = Pools(pinned=request.param)
    yield made
    made.close()


@pytest.fixture
def pinned_pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def shuffled(seed: int, count: int = PAGES) -> PageIndices:
    return np.random.default_rng(seed).permutation(PAGES)[:count].astype(np.int32)


def test_pages_come_back_as_they_were(pools: Pools) -> None:
    pools.fill_host()
    before, there, back = shuffled(1), shuffled(2), shuffled(3)
    pools.engine.load_back(before, there).synchronize()
    pools.expect(there, before)
    pools.host.array[:] = 0
    pools.engine.backup(there, back).synchronize()
    pools.expect(there, back)
    original = np.random.default_rng(0).integers(0, 256, pools.host.array.shape, np.uint8)
    np.testing.assert_array_equal(pools.host.array[back], original[before])


def test_a_copy_of_no_pages_completes(pools: Pools) -> None:
    none = np.empty(0, np.int32)
    pools.engine.backup(none, none).synchronize()
    pools.engine.load_back(none, none).synchronize()


def test_calls_return_while_the_gpu_is_busy_and_copies_wait_for_their_event(pinned_pools: Pools) -> None:
    pools, pages = pinned_pools, shuffled(1)
    pools.fill_host()
    torch.cuda._sleep(LONG)
    after = record_compute(pools.device.device)
    load = pools.engine.load_back(pages, pages, after)
    backup = pools.engine.backup(shuffled(2, 1), shuffled(2, 1), after)
    assert after is not None and not after.query() and not load.query() and not backup.query()
    assert not load.layer_done(0).query()
    load.synchronize()
    assert after.query() and load.query()
    backup.synchronize()
    pools.engine.load_back(pages, pages).synchronize()


def test_a_backup_takes_what_the_compute_before_its_event_has_written(pinned_pools: Pools) -> None:
    pools, pages = pinned_pools, shuffled(4)
    torch.cuda._sleep(LONG)
    for layer in range(LAYOUT.num_layers):
        pools.device.k(layer).fill_(layer + 1)
        pools.device.v(layer).fill_(-layer - 1)
    backup = pools.engine.backup(pages, pages, record_compute(pools.device.device))
    backup.synchronize()
    pools.expect(pages, pages)
    first = pools.host.array[0].view(np.float16)
    assert (first[0], first[LAYOUT.plane_bytes // 2]) == (1, -1)


def test_a_layer_can_be_read_before_the_next_ones_are_there(pinned_pools: Pools) -> None:
    """Several loads in flight, compute that waits for layers, and never for more than it reads."""
    pools = pinned_pools
    pools.fill_host(5)
    pools.engine.wrap_copier(_SlowLayers)
    pools.device.k(0).view(torch.int16).to(torch.int64).sum()  # loading kernels takes its time
    parts = np.split(shuffled(6), 4)
    loads = [pools.engine.load_back(part, part) for part in parts]
    sums, early = [], 0
    for layer in range(LAYOUT.num_layers):
        for load in loads:
            load.layer_done(layer).gate()
        sums.append(pools.device.k(layer).view(torch.int16).to(torch.int64).sum())
        done = record_compute(pools.device.device)
        assert done is not None
        done.synchronize()
        early += not loads[-1].query()
    assert early == LAYOUT.num_layers - 1, "a layer was waited for longer than it took"
    for layer, total in enumerate(sums):
        plane = 2 * layer
        size = LAYOUT.plane_bytes
        words = np.ascontiguousarray(pools.host.array[:, plane * size : (plane + 1) * size]).view(np.int16)
        assert int(total) == int(words.astype(np.int64).sum())


@dataclass(frozen=True)
class _SlowLayers:
    """Each layer but the first comes long after the one before."""

    inner: PageCopier

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> _SlowLayers.Copy:
        return _SlowLayers.Copy(self.inner.copy(device_pages, host_pages))

    @dataclass(frozen=True)
    class Copy:
        inner: PageCopy

        def gather(self) -> None:
            self.inner.gather()

        def scatter(self, first_plane: int, count: int) -> None:
            if first_plane:
                torch.cuda._sleep(LONG // 10)
            self.inner.scatter(first_plane, count)


def test_copies_beside_busy_compute_move_the_right_bytes(pinned_pools: Pools) -> None:
    pools = pinned_pools
    pools.fill_host(7)
    matrix = torch.randn(2048, 2048, device="cuda")
    order = shuffled(8)
    up, down = order[:128], order[128:]
    pools.engine.load_back(down, down).synchronize()
    for _ in range(4):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        load = pools.engine.load_back(up, up)
        backup = pools.engine.backup(down, down)
        load.synchronize()
        backup.synchronize()
        pools.expect(up, up)
        pools.expect(down, down)


def test_a_failed_copy_is_a_failed_ticket_and_the_next_one_works(pinned_pools: Pools) -> None:
    pools, pages = pinned_pools, shuffled(9)
    pools.fill_host()
    copier = pools.engine.wrap_copier(lambda inner: FaultyCopier(inner, 1.0, 0))
    load = pools.engine.load_back(pages, pages)
    with pytest.raises(TransferError, match="injected"):
        load.synchronize()
    assert copier.injected == 1, "what comes after a failure does not run"
    pools.engine.wrap_copier(lambda _: CudaCopier(_planes(pools), pools.host.array, "kernel"))
    pools.engine.recover()
    pools.engine.load_back(pages, pages).synchronize()
    pools.expect(pages, pages)


def test_the_choice_is_made_from_measurements(pinned_pools: Pools) -> None:
    copier = CudaCopier(_planes(pinned_pools), pinned_pools.host.array)
    speeds = copier.choice.gb_per_second
    assert set(speeds) == {"down direct", "down staged", "down kernel", "up direct", "up kernel"}
    assert all(speed > 0 for speed in speeds.values())
    fastest = max(speed for name, speed in speeds.items() if name.startswith("down"))
    assert speeds[f"down {copier.choice.down.name}"] >= 0.9 * fastest


def test_measuring_leaves_device_pages_as_they_are() -> None:
    device, host = DevicePool(LAYOUT, PAGES, "cuda"), HostPool(LAYOUT, PAGES, pinned=True)
    for layer in range(LAYOUT.num_layers):
        device.k(layer).normal_()
        device.v(layer).normal_()
    torch.cuda.current_stream().synchronize()
    before = [device.k(layer).clone() for layer in range(LAYOUT.num_layers)]
    CudaCopier(_planes_of(device), host.array)
    assert all(torch.equal(device.k(layer), kept) for layer, kept in enumerate(before))
    host.close()


@pytest.mark.parametrize("path", ["kernel", "direct", "staged"])
def test_pages_beyond_four_gib_are_reached(path: str) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1 << 16, page_size=16, kind="mla")  # 2 MiB a page
    count = 2560  # 5 GiB
    device, host = DevicePool(layout, count, "cuda"), HostPool(layout, count, pinned=True)
    pages = np.array([count - 1, 2100, 3, 2048], np.int32)
    stream = create_stream("cuda", "test")
    copy = CudaCopier(_planes_of(device), host.array, path).copy(pages, pages[::-1].copy())
    host.array[pages] = np.random.default_rng(0).integers(0, 256, (len(pages), layout.page_stride), np.uint8)
    wanted = host.array[pages[::-1]].copy()
    stream.submit(lambda: copy.scatter(0, 1))
    stream.synchronize()
    out = np.empty_like(wanted)
    device.access.read(0, pages, out)
    np.testing.assert_array_equal(out, wanted)
    host.array[pages] = 0
    stream.submit(copy.gather)
    stream.synchronize()
    np.testing.assert_array_equal(host.array[pages[::-1]], wanted)
    host.close()


def test_an_mla_pool_goes_there_and_back() -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=1, head_dim=576, page_size=16, dtype="bfloat16", kind="mla")
    pools = Pools(layout)
    pools.fill_host()
    pools.engine.load_back(shuffled(1), shuffled(2)).synchronize()
    pools.expect(shuffled(2), shuffled(1))
    pools.close()


def _planes(pools: Pools) -> CudaPlanes:
    return _planes_of(pools.device)


def _planes_of(device: DevicePool) -> CudaPlanes:
    assert isinstance(device.planes, CudaPlanes)
    return device.planes
