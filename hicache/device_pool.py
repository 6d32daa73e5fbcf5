"""The device tier's memory: layer-first KV tensors, their pages, and the page table of running requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import CapacityError, ConfigError, ProtocolError
from hicache.host_pool.budget import check_host_budget
from hicache.host_pool.pool import POISON_BYTE
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.dispatch import Planes
from hicache.layout import KVLayout
from hicache.pages import PageAllocator
from hicache.plane_access import PlaneAccess, access
from hicache.streams.cuda import cuda_index
from hicache.types import PageIndices

_GIB = 1 << 30

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def resolve_device(device: str) -> str:
    """The device that `device` stands for: cpu or cuda:N.

    "auto" is a GPU where torch finds one, else the CPU; "cuda" is torch's current GPU. Raises ConfigError for a
    device that is not there.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{cuda_index('cuda' if device == 'auto' else device)}"


class DevicePool:
    """KV tensors of all layers: plane p is a tensor (num_pages * page_size, num_kv_heads, head_dim).

    `planes` are the same bytes for the copy kernels: on a CPU uint8 arrays (num_pages, plane_bytes), on a GPU
    `CudaPlanes`. Raises CapacityError before anything is allocated if the memory is not to be had.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str = "cpu") -> None:
        device = resolve_device(device)
        _check_budget(num_pages * layout.page_bytes, device)
        shape = _plane_shape(layout, num_pages)
        dtype = _TORCH_DTYPES[layout.dtype]
        self._bind(layout, [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_planes)])
        if self.device != "cpu":
            torch.cuda.current_stream(device).synchronize()  # other streams write next

    @classmethod
    def from_tensors(cls, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> DevicePool:
        """A view on an engine's own tensors, in plane order (L0.K, L0.V, L1.K, ...); nothing is copied.

        Each is contiguous, (num_pages * page_size, num_kv_heads, head_dim) or (num_pages, page_size,
        num_kv_heads, head_dim). Raises ConfigError otherwise.
        """
        if len(tensors) != layout.num_planes:
            raise ConfigError(f"{len(tensors)} tensors given, the layout has {layout.num_planes} planes")
        flat = [_flatten(layout, index, tensor.detach()) for index, tensor in enumerate(tensors)]
        if len({tensor.shape for tensor in flat}) > 1:
            raise ConfigError(f"tensors differ in length: {sorted({len(tensor) for tensor in flat})} tokens")
        pool = cls.__new__(cls)
        pool._bind(layout, flat)
        return pool

    def _bind(self, layout: KVLayout, tensors: list[torch.Tensor]) -> None:
        self.layout = layout
        self.num_pages = len(tensors[0]) // layout.page_size
        self.device = str(tensors[0].device)
        self.nbytes = self.num_pages * layout.page_bytes
        self._tensors = tensors
        rows = [tensor.view(torch.uint8).view(self.num_pages, layout.plane_bytes) for tensor in tensors]
        self.planes: Planes = [row.numpy() for row in rows] if self.device == "cpu" else CudaPlanes(rows)
        self.access: PlaneAccess = access(self.planes)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer, (num_pages * page_size, num_kv_heads, head_dim)."""
        self._expect("mha")
        return self._tensors[2 * layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, (num_pages * page_size, num_kv_heads, head_dim)."""
        self._expect("mha")
        return self._tensors[2 * layer + 1]

    def latent(self, layer: int) -> torch.Tensor:
        """Joint latent of one MLA layer, (num_pages * page_size, 1, head_dim)."""
        self._expect("mla")
        return self._tensors[layer]

    def poison(self, pages: PageIndices) -> None:
        """Fill `pages` of every plane with POISON_BYTE."""
        self.access.fill(pages, POISON_BYTE)

    def _expect(self, kind: str) -> None:
        if self.layout.kind != kind:
            raise ProtocolError(f"the pool's layout is {self.layout.kind}, this tensor belongs to {kind}")


def _check_budget(nbytes: int, device: str) -> None:
    """Raise CapacityError if the device has less memory left."""
    if device == "cpu":
        check_host_budget(nbytes)
        return
    free, _ = torch.cuda.mem_get_info(device)
    if nbytes > free:
        raise CapacityError(
            f"{nbytes / _GIB:.2f} GiB of device memory asked for, {free / _GIB:.2f} GiB free on {device}: "
            "choose a smaller size or free memory"
        )


def _plane_shape(layout: KVLayout, num_pages: int) -> tuple[int, int, int]:
    return num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim


def _flatten(layout: KVLayout, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Check one engine tensor and give it the shape (tokens, heads, head_dim)."""
    shape = tuple(tensor.shape)
    resolve_device(str(tensor.device))
    if tensor.dtype is not _TORCH_DTYPES[layout.dtype]:
        raise ConfigError(f"tensor {index} is {tensor.dtype}, the layout says {layout.dtype}")
    token = (layout.num_kv_heads, layout.head_dim)
    paged = len(shape) == 4 and shape[1:] == (layout.page_size, *token)
    if not paged and not (len(shape) == 3 and shape[1:] == token and shape[0] % layout.page_size == 0):
        expected = f"(pages * {layout.page_size}, {token[0]}, {token[1]})"
        raise ConfigError(f"tensor {index} has shape {shape}, the layout needs {expected}")
    if not tensor.is_contiguous():
        raise ConfigError(f"tensor {index} is not contiguous, pages of it cannot be copied as bytes")
    return tensor.view(-1, *token)


class TokenToKVPoolAllocator:
    """Ownership of the device pool's pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pages = PageAllocator(num_pages)

    @property
    def free_pages(self) -> int:
        return self._pages.free_pages

    def available_size(self) -> int:
        """Tokens that the free pages hold."""
        return self.free_pages * self.page_size

    def alloc(self, num_pages: int) -> PageIndices | None:
        """`num_pages` pages, or None (and nothing taken) if fewer are free."""
        return self._pages.alloc(num_pages)

    def free(self, pages: PageIndices) -> None:
        """Take pages back. Raises ProtocolError, changing nothing, if one of them is not out."""
        self._pages.free(pages)

    def free_list(self) -> PageIndices:
        """Copy of the free page numbers, in no particular order."""
        return self._pages.free_list()


class ReqToTokenPool:
    """One row of page indices for each running request, in the order of its tokens."""

    def __init__(self, num_requests: int, max_context_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.max_context_len = max_context_len
        self._rows = PageAllocator(num_requests)
        self._table = np.zeros((num_requests, -(-max_context_len // page_size)), np.int32)

    @property
    def free_rows(self) -> int:
        return self._rows.free_pages

    def alloc(self) -> int | None:
        """A free row, or None."""
        rows = self._rows.alloc(1)
        return None if rows is None else int(rows[0])

    def free(self, row: int) -> None:
        """Take a row back. Raises ProtocolError if it is not out."""
        self._check_span(row, 0, 0)
        self._rows.free(np.array([row], np.int32))

    def write(self, row: int, first_page: int, pages: PageIndices) -> None:
        """Set the pages of a request from its page number `first_page` on."""
        self._check_span(row, first_page, first_page + len(pages))
        self._table[row, first_page : first_page + len(pages)] = pages

    def pages(self, row: int, count: int) -> PageIndices:
        """Copy of a request's first `count` pages."""
        self._check_span(row, 0, count)
        return self._table[row, :count].copy()

    def token_slots(self, row: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots of a request's tokens start .. stop-1 in the pool's tensors: page * page_size + offset."""
        self._check_span(row, start // self.page_size, -(-stop // self.page_size))
        tokens = np.arange(start, stop, dtype=np.int64)
        slots: npt.NDArray[np.int64] = self._table[row, tokens // self.page_size].astype(np.int64)
        slots *= self.page_size
        slots += tokens % self.page_size
        return slots

    def _check_span(self, row: int, first_page: int, end_page: int) -> None:
        rows, width = self._table.shape
        if not (0 <= row < rows and first_page >= 0 and end_page <= width):
            raise ProtocolError(f"row {row}, pages {first_page} .. {end_page} leave the table of {rows} rows x {width}")
