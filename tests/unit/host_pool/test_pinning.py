from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import CapacityError, ConfigError, ProtocolError
from hicache.host_pool import pinning as pinning_module
from hicache.host_pool.arena import allocate_aligned
from hicache.host_pool.pinning import (
    CudaRegistrar,
    Registration,
    pages_per_registration,
    registration_plan,
    resolve_pinned,
)
from hicache.layout import HOST_ALIGNMENT

STRIDE = 2 * HOST_ALIGNMENT


class FakeRegistrar:
    """Keeps what is registered, in order; refuses the piece number `refused`."""

    def __init__(self, refused: int | None = None, error: BaseException | None = None) -> None:
        self.refused = refused
        self.error = error or CapacityError("cudaErrorMemoryAllocation: out of memory")
        self.pieces: dict[int, int] = {}
        self.released: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        if len(self.pieces) == self.refused:
            raise self.error
        assert address not in self.pieces
        self.pieces[address] = nbytes

    def unregister(self, address: int) -> None:
        if address not in self.pieces or address in self.released:
            raise ProtocolError(f"{address} is not registered")
        self.released.append(address)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pages to a registration."""
    monkeypatch.setattr(pinning_module, "REGISTRATION_BYTES", 3 * STRIDE + 1)


@given(num_pages=st.integers(0, 5000), units=st.integers(1, 600), kernel_page=st.sampled_from([4096, 16384, 65536]))
def test_pieces_cover_the_arena_in_whole_pages(num_pages: int, units: int, kernel_page: int) -> None:
    stride = units * HOST_ALIGNMENT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinning_module, "REGISTRATION_BYTES", 4 << 20)
        patch.setattr("mmap.PAGESIZE", kernel_page)
        plan = list(registration_plan(num_pages * stride, stride))
        pages = pages_per_registration(stride)
    ends = [start + nbytes for start, nbytes in plan]
    assert [start for start, _ in plan] == [0, *ends][: len(plan)], "one after the other, without gaps"
    assert (ends or [0])[-1] == num_pages * stride
    assert all(nbytes > 0 and nbytes % stride == 0 for _, nbytes in plan)
    assert all(nbytes == pages * stride for _, nbytes in plan[:-1])
    assert all(start % kernel_page == 0 for start, _ in plan), "no page of the kernel lies in two"


def test_a_piece_is_about_a_gibibyte_and_at_least_a_page() -> None:
    assert pages_per_registration(1 << 20) == 1024
    assert pages_per_registration(3 << 20) == 341
    assert pages_per_registration(3 << 30) == 1


@pytest.mark.usefixtures("small_pieces")
def test_an_arena_is_registered_piece_by_piece_and_released_once() -> None:
    arena, registrar = allocate_aligned(7 * STRIDE), FakeRegistrar()
    registration = Registration(arena, STRIDE, registrar)
    start = arena.ctypes.data
    pieces = {start: 3 * STRIDE, start + 3 * STRIDE: 3 * STRIDE, start + 6 * STRIDE: STRIDE}
    assert registrar.pieces == pieces and list(registrar.pieces) == sorted(pieces)
    assert (registration.nbytes, registration.pages, registrar.released) == (7 * STRIDE, 3, [])
    registration.release()
    registration.release()
    assert registrar.released == sorted(pieces, reverse=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("refused", [0, 1, 2])
@pytest.mark.parametrize(("limit", "memlock"), [(8 << 20, "8.0 MiB"), (resource.RLIM_INFINITY, "unlimited")])
def test_a_refused_piece_releases_the_others_and_tells_the_numbers(
    monkeypatch: pytest.MonkeyPatch, refused: int, limit: int, memlock: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (limit, limit)}[which])
    monkeypatch.setattr(pinning_module, "MIB", STRIDE)  # so that the numbers are whole
    limit_text = memlock if limit == resource.RLIM_INFINITY else f"{limit / STRIDE:.1f} MiB"
    registrar = FakeRegistrar(refused)
    with pytest.raises(CapacityError) as caught:
        Registration(allocate_aligned(7 * STRIDE), STRIDE, registrar)
    assert str(caught.value) == (
        f"7.0 MiB of host memory to be pinned, {3 * refused}.0 MiB were when CUDA refused: "
        f"cudaErrorMemoryAllocation: out of memory (memlock limit: {limit_text}): raise the limit (ulimit -l), "
        "choose a smaller size, or use pinned: false for slower, unpinned copies"
    )
    assert len(registrar.pieces) == refused
    assert registrar.released == sorted(registrar.pieces, reverse=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug")])
def test_whatever_else_goes_wrong_releases_the_others_too(error: BaseException) -> None:
    registrar = FakeRegistrar(2, error)
    with pytest.raises(type(error)):
        Registration(allocate_aligned(7 * STRIDE), STRIDE, registrar)
    assert registrar.released == sorted(registrar.pieces, reverse=True) and len(registrar.released) == 2


@pytest.mark.usefixtures("small_pieces")
def test_one_piece_that_cannot_be_released_does_not_keep_the_others() -> None:
    arena, registrar = allocate_aligned(7 * STRIDE), FakeRegistrar()
    registration = Registration(arena, STRIDE, registrar)
    lost = arena.ctypes.data + 3 * STRIDE
    del registrar.pieces[lost]
    with pytest.raises(ProtocolError, match="not registered"):
        registration.release()
    assert registrar.released == [arena.ctypes.data + 6 * STRIDE, arena.ctypes.data]


def test_the_arena_stays_mapped_until_it_is_released(is_mapped: Callable[[int], bool]) -> None:
    registration = Registration(allocate_aligned(STRIDE), STRIDE, registrar := FakeRegistrar())
    (start,) = registrar.pieces
    assert is_mapped(start)
    registration.release()
    assert not is_mapped(start)


def test_a_forked_process_does_not_touch_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar()
    registration = Registration(allocate_aligned(STRIDE), STRIDE, registrar)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    registration.release()
    monkeypatch.undo()
    registration.release()
    assert registrar.released == []


@pytest.mark.parametrize(
    ("pinned", "device", "result"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("auto", "cuda:1", True),
        (True, "cuda", True),
        (False, "cuda:0", False),
        (False, "cpu", False),
    ],
)
def test_auto_is_pinned_with_a_cuda_device(pinned: bool, device: str, result: bool) -> None:
    assert resolve_pinned(pinned, device) is result


def test_pinned_with_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pinned: true needs a CUDA device, this one is cpu: use pinned: auto$"):
        resolve_pinned(True, "cpu")


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"needs CuPy.*install hicache\[cuda12\] or hicache\[cuda13\]"):
        CudaRegistrar()


class FakeCuda(ModuleType):
    """The part of CuPy that registers memory; fails with `status` if it is not 0."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(f"cudaError{status}: refused")
            self.status = status

    class Device:
        current: int | None = None

        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            FakeCuda.Device.current = self.index

        def __exit__(self, *error: object) -> None:
            FakeCuda.Device.current = None

    def __init__(self) -> None:
        super().__init__("cupy")
        self.status = 0
        self.calls: list[tuple[object, ...]] = []
        self.cuda = self.runtime = self

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self._call("register", self.Device.current, address, nbytes, flags)

    def hostUnregister(self, address: int) -> None:
        self._call("unregister", self.Device.current, address)

    def _call(self, *call: object) -> None:
        self.calls.append(call)
        if self.status:
            raise self.CUDARuntimeError(self.status)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    return fake


def test_cuda_registers_on_its_device_for_all_contexts_and_kernels(cuda: FakeCuda) -> None:
    registrar = CudaRegistrar("cuda:2")
    registrar.register(4096, 8192)
    registrar.unregister(4096)
    assert cuda.calls == [("register", 2, 4096, 8192, 3), ("unregister", 2, 4096)]


def test_what_cuda_says_is_passed_on(cuda: FakeCuda) -> None:
    cuda.status = 2
    with pytest.raises(CapacityError, match=r"^cudaError2: refused$"):
        CudaRegistrar("cuda:0").register(4096, 8192)


@pytest.mark.parametrize("status", [4, 700, 709, 713])
def test_a_context_that_is_gone_has_let_go_already(cuda: FakeCuda, status: int) -> None:
    cuda.status = status
    CudaRegistrar("cuda:0").unregister(4096)
    assert cuda.calls == [("unregister", 0, 4096)]
