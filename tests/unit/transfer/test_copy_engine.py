from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from hicache.device_pool import DevicePool
from hicache.errors import ProtocolError, TransferError
from hicache.host_pool.pool import HostPool
from hicache.kernels.dispatch import bind
from hicache.layout import KVLayout
from hicache.testing.stepped import SteppedStream, drain
from hicache.transfer.copy_engine import CopyEngine
from hicache.types import PageIndices

MHA = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4)
MLA = KVLayout(num_layers=3, num_kv_heads=1, head_dim=16, page_size=4, kind="mla")


@dataclass
class Rig:
    device: DevicePool
    host: HostPool
    d2h: SteppedStream
    h2d: SteppedStream
    engine: CopyEngine

    def plane_arrived(self, plane: int, host_page: int, device_page: int) -> bool:
        size = self.device.layout.plane_bytes
        expected = self.host.array[host_page, plane * size : (plane + 1) * size]
        return bool((self.device.planes[plane][device_page] == expected).all())


@pytest.fixture(params=[MHA, MLA], ids=["mha", "mla"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    layout: KVLayout = request.param
    device, host = DevicePool(layout, 6), HostPool(layout, 8)
    random = np.random.default_rng(1)
    for plane in device.planes:
        plane[:] = random.integers(1, 256, plane.shape, np.uint8)
    d2h, h2d = SteppedStream("d2h"), SteppedStream("h2d")
    engine = CopyEngine(host.format, bind(device.planes, host.array), d2h, h2d)
    yield Rig(device, host, d2h, h2d, engine)
    drain(d2h, h2d)
    engine.close()


def pages(*numbers: int) -> PageIndices:
    return np.array(numbers, np.int32)


def test_backup_then_load_back_to_other_pages(rig: Rig) -> None:
    backup = rig.engine.backup(pages(0, 2, 4), pages(7, 1, 3))
    assert backup.nbytes == 3 * rig.device.layout.page_bytes and not backup.query()
    drain(rig.d2h)
    assert backup.query()
    load = rig.engine.load_back(pages(7, 1, 3), pages(5, 3, 1))
    drain(rig.h2d)
    load.synchronize()
    assert load.query() and load.nbytes == backup.nbytes
    assert all((plane[[5, 3, 1]] == plane[[0, 2, 4]]).all() for plane in rig.device.planes)


def test_a_backup_is_one_piece_of_work(rig: Rig) -> None:
    rig.engine.backup(pages(0, 1, 2), pages(0, 1, 2))
    steps = 0
    while rig.d2h.step():
        steps += 1
    assert steps == 2  # the copy and its event


def test_a_layer_is_done_only_when_its_bytes_are_there(rig: Rig) -> None:
    layout = rig.device.layout
    rig.host.array[2] = np.random.default_rng(2).integers(1, 256, layout.page_stride, np.uint8)
    rig.device.poison(pages(4))
    load = rig.engine.load_back(pages(2), pages(4))
    order = []
    while not rig.h2d.idle:
        rig.h2d.step()
        for layer in range(layout.num_layers):
            planes = range(layer * layout.planes_per_layer, (layer + 1) * layout.planes_per_layer)
            if load.layer_done(layer).query():
                assert all(rig.plane_arrived(plane, 2, 4) for plane in planes)
        order.append([load.layer_done(layer).query() for layer in range(layout.num_layers)])
        assert load.query() == all(order[-1])
    assert [True, False, False] in order and [True, True, False] in order and order[-1] == [True] * 3


@pytest.mark.parametrize("direction", ["backup", "load_back"])
def test_a_copy_starts_after_its_event(rig: Rig, direction: str) -> None:
    compute = SteppedStream("compute")
    stream = rig.d2h if direction == "backup" else rig.h2d
    copy = rig.engine.backup if direction == "backup" else rig.engine.load_back
    ticket = copy(pages(0), pages(0), compute.record())
    assert stream.blocked
    drain(compute, stream)
    assert ticket.query()


def test_callers_may_reuse_their_index_arrays(rig: Rig) -> None:
    sources, targets = pages(1), pages(6)
    rig.engine.backup(sources, targets)
    sources[0], targets[0] = 0, 0
    drain(rig.d2h)
    assert rig.plane_arrived(0, host_page=6, device_page=1) and not rig.host.array[0].any()


def test_a_failed_copy_stays_failed_and_the_engine_recovers(rig: Rig) -> None:
    rig.d2h.fail_next()
    failed, skipped = rig.engine.backup(pages(0), pages(0)), rig.engine.backup(pages(1), pages(1))
    rig.engine.recover()
    good = rig.engine.backup(pages(2), pages(2))
    drain(rig.d2h, rig.h2d)
    for _ in range(2):
        for ticket in (failed, skipped):
            with pytest.raises(TransferError, match="injected failure"):
                ticket.query()
    assert good.query() and not rig.host.array[:2].any() and rig.host.array[2].any()


def test_recovery_reaches_the_load_stream(rig: Rig) -> None:
    rig.h2d.fail_next()
    failed = rig.engine.load_back(pages(0), pages(0))
    rig.engine.recover()
    good = rig.engine.load_back(pages(0), pages(1))
    drain(rig.h2d)
    with pytest.raises(TransferError, match="injected failure"):
        failed.query()
    assert good.query() and not rig.device.planes[0][1].any()


def test_layers_before_a_failure_are_good_and_the_load_is_not(rig: Rig) -> None:
    load = rig.engine.load_back(pages(0), pages(0))
    while not load.layer_done(0).query():
        rig.h2d.step()
    rig.h2d.fail_next()
    drain(rig.h2d)
    assert load.layer_done(0).query()
    for query in (load.layer_done(1).query, load.layer_done(2).query, load.query, load.synchronize):
        with pytest.raises(TransferError):
            query()


def test_a_load_has_failed_as_soon_as_a_layer_has(rig: Rig) -> None:
    """Who waits for a layer is told at once; the events of later layers may still be open at that moment."""
    load = rig.engine.load_back(pages(0), pages(0))
    assert not load.failed()
    rig.h2d.fail_next()
    told = False
    while not told:
        rig.h2d.step()
        try:
            load.layer_done(0).query()
        except TransferError:
            told = True
    assert not load.layer_done(2).query() and load.failed()
    drain(rig.h2d)
    assert load.failed()


@pytest.mark.parametrize(
    "device, host, message", [([0, 6], [0, 1], "device page outside"), ([0, 1], [0, -1], "host page outside")]
)
def test_pages_outside_a_pool_are_refused_at_once(rig: Rig, device: list[int], host: list[int], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        rig.engine.backup(pages(*device), pages(*host))
    with pytest.raises(ProtocolError, match=message):
        rig.engine.load_back(pages(*host), pages(*device))
    assert rig.d2h.idle and rig.h2d.idle


def test_unpaired_pages_are_refused_at_once(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="2 device pages are paired with 1 host pages"):
        rig.engine.backup(pages(0, 1), pages(0))
    with pytest.raises(ProtocolError):
        rig.engine.load_back(pages(0), pages(0, 1))
    assert rig.d2h.idle and rig.h2d.idle


def test_pools_of_different_layouts_are_refused() -> None:
    with pytest.raises(ProtocolError, match="different layouts"):
        CopyEngine.between(DevicePool(MHA, 1), HostPool(MLA, 1))


def test_close_may_be_repeated_and_ends_the_streams(rig: Rig) -> None:
    ticket = rig.engine.backup(pages(0), pages(0))
    rig.engine.close()
    rig.engine.close()
    assert ticket.query()
    with pytest.raises(ProtocolError, match="closed"):
        rig.engine.backup(pages(0), pages(0))


def test_on_real_threads() -> None:
    device, host = DevicePool(MHA, 4), HostPool(MHA, 4)
    engine = CopyEngine.between(device, host)
    device.planes[5][0] = 42
    engine.backup(pages(0), pages(3)).synchronize()
    load = engine.load_back(pages(3), pages(2))
    load.layer_done(MHA.num_layers - 1).synchronize()
    assert load.query() and (device.planes[5][2] == 42).all() and not device.planes[4][2].any()
    engine.close()


def test_between_a_device_and_a_quantised_host_pool() -> None:
    """Tickets count what crosses the bus; a page that was quantised once comes back as it went."""
    device, host = DevicePool(MHA, 4), HostPool(MHA, 4, codec="int8")
    values = np.random.default_rng(3).normal(0, 1, (4, MHA.plane_bytes // 2)).astype(np.float16)
    for plane in device.planes:
        plane[:] = values.view(np.uint8)
    engine = CopyEngine.between(device, host)
    try:
        backup = engine.backup(pages(0, 1), pages(3, 2))
        backup.synchronize()
        load = engine.load_back(pages(3, 2), pages(2, 3))
        load.synchronize()
        assert backup.nbytes == load.nbytes == 2 * host.format.page_bytes < 2 * MHA.page_bytes
        for plane in device.planes:
            found = plane.view(np.float16)
            assert 0 < np.abs(found[2:] - found[:2]).max() < 4 / 127
        engine.backup(pages(2, 3), pages(0, 1)).synchronize()
        assert (host.array[[0, 1], : host.format.page_bytes] == host.array[[3, 2], : host.format.page_bytes]).all()
    finally:
        engine.close()
