from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache import device_pool as module
from hicache.device_pool import DevicePool, ReqToTokenPool, TokenToKVPoolAllocator, resolve_device
from hicache.errors import CapacityError, ConfigError, ProtocolError
from hicache.host_pool.pool import POISON_BYTE
from hicache.layout import DTYPE_BYTES, KVLayout, LayoutKind

MHA = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_size=4)
MLA = KVLayout(num_layers=2, num_kv_heads=1, head_dim=24, page_size=4, kind="mla")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("kind, heads", [("mha", 3), ("mla", 1)])
def test_planes_share_the_bytes_of_the_tensors(kind: LayoutKind, heads: int, dtype: str) -> None:
    layout = KVLayout(2, heads, 8, 4, dtype, kind)
    pool = DevicePool(layout, 5)
    tensors = [pool.k(0), pool.v(0), pool.k(1), pool.v(1)] if kind == "mha" else [pool.latent(0), pool.latent(1)]
    assert len(pool.planes) == layout.num_planes and pool.nbytes == 5 * layout.page_bytes
    for index, (plane, tensor) in enumerate(zip(pool.planes, tensors)):
        assert plane.shape == (5, layout.plane_bytes) and tensor.shape == (20, heads, 8)
        plane[3] = index + 1
        assert (tensor.view(torch.uint8)[12:16] == index + 1).all() and not tensor.view(torch.uint8)[:12].any()


def test_tensors_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ProtocolError, match="mha"):
        DevicePool(MHA, 1).latent(0)
    with pytest.raises(ProtocolError, match="mla"):
        DevicePool(MLA, 1).k(0)


def test_poison_touches_only_its_pages() -> None:
    pool = DevicePool(MHA, 3)
    pool.poison(np.array([1], np.int32))
    assert all((plane[1] == POISON_BYTE).all() and not plane[[0, 2]].any() for plane in pool.planes)


def test_too_much_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise CapacityError(f"no {nbytes} bytes")

    monkeypatch.setattr(module, "check_host_budget", refuse)
    with pytest.raises(CapacityError, match=f"no {1 << 30 << 8} bytes"):
        DevicePool(KVLayout(1, 1, 1, 1, "int8", "mla"), 1 << 38)


@pytest.mark.parametrize("shape", [(20, 3, 8), (5, 4, 3, 8)])
def test_from_tensors_is_a_view(shape: tuple[int, ...]) -> None:
    tensors = [torch.zeros(shape, dtype=torch.float16) for _ in range(4)]
    pool = DevicePool.from_tensors(MHA, tensors)
    assert pool.num_pages == 5
    pool.planes[3][2] = 1
    assert tensors[3].view(-1, 3, 8)[8:12].all() and pool.v(1).data_ptr() == tensors[3].data_ptr()


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(20, 3, 8), "tensor 3 is torch.float32, the layout says float16"),
        (torch.zeros(20, 3, 9, dtype=torch.float16), r"tensor 3 has shape \(20, 3, 9\)"),
        (torch.zeros(18, 3, 8, dtype=torch.float16), r"tensor 3 has shape \(18, 3, 8\)"),
        (torch.zeros(5, 2, 3, 8, dtype=torch.float16), "tensor 3 has shape"),
        (torch.zeros(20, 8, 3, dtype=torch.float16).transpose(1, 2), "tensor 3 is not contiguous"),
        (torch.zeros(24, 3, 8, dtype=torch.float16), r"differ in length: \[20, 24\] tokens"),
        (torch.zeros(20, 3, 8, dtype=torch.float16, device="meta"), "'meta': it must be cpu, cuda or cuda:N"),
    ],
)
def test_from_tensors_refuses_what_it_cannot_copy(tensor: torch.Tensor, message: str) -> None:
    good = [torch.zeros(20, 3, 8, dtype=torch.float16) for _ in range(3)]
    with pytest.raises(ConfigError, match=message):
        DevicePool.from_tensors(MHA, [*good, tensor])


def test_from_tensors_needs_every_plane() -> None:
    with pytest.raises(ConfigError, match="1 tensors given, the layout has 4 planes"):
        DevicePool.from_tensors(MHA, [torch.zeros(20, 3, 8, dtype=torch.float16)])


def test_resolve_device() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda'.*use device: cpu"):
        resolve_device("cuda")


def test_token_allocator_counts_tokens_and_refuses_a_double_free() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=4, page_size=16)
    pages = allocator.alloc(3)
    assert pages is not None and allocator.available_size() == 16 and allocator.free_pages == 1
    assert allocator.alloc(2) is None and allocator.free_pages == 1
    allocator.free(pages)
    assert allocator.available_size() == 64 and sorted(allocator.free_list()) == [0, 1, 2, 3]
    with pytest.raises(ProtocolError):
        allocator.free(pages)


def test_rows_are_handed_out_once_and_taken_back_once() -> None:
    pool = ReqToTokenPool(num_requests=2, max_context_len=10, page_size=4)
    first, second = pool.alloc(), pool.alloc()
    assert {first, second} == {0, 1} and pool.alloc() is None and pool.free_rows == 0
    pool.free(0)
    with pytest.raises(ProtocolError):
        pool.free(0)
    with pytest.raises(ProtocolError):
        pool.free(-1)
    assert pool.alloc() == 0


def test_token_slots_follow_the_pages() -> None:
    pool = ReqToTokenPool(num_requests=2, max_context_len=12, page_size=4)
    pool.write(1, 0, np.array([7, 2], np.int32))
    pool.write(1, 2, np.array([5], np.int32))
    assert pool.pages(1, 3).tolist() == [7, 2, 5] and pool.pages(0, 3).tolist() == [0, 0, 0]
    slots = pool.token_slots(1, 3, 10)
    assert slots.dtype == np.int64 and slots.tolist() == [31, 8, 9, 10, 11, 20, 21]
    assert pool.token_slots(1, 4, 4).tolist() == []


def test_token_slots_do_not_overflow_int32() -> None:
    pool = ReqToTokenPool(num_requests=1, max_context_len=512, page_size=512)
    pool.write(0, 0, np.array([1 << 30], np.int32))
    assert pool.token_slots(0, 1, 2).tolist() == [(1 << 39) + 1]


def test_pages_is_a_copy() -> None:
    pool = ReqToTokenPool(num_requests=1, max_context_len=4, page_size=4)
    pool.pages(0, 1)[0] = 9
    assert pool.pages(0, 1).tolist() == [0]


@pytest.mark.parametrize("row, first, count", [(1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 2, 2)])
def test_writing_outside_the_table_is_refused(row: int, first: int, count: int) -> None:
    pool = ReqToTokenPool(num_requests=1, max_context_len=12, page_size=4)
    with pytest.raises(ProtocolError, match="leave the table"):
        pool.write(row, first, np.ones(count, np.int32))
