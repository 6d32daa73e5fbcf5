"""Geometry of one KV page: which bytes it has, in which order, on the device, in host memory and on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache.errors import ConfigError

HOST_ALIGNMENT = 4096
"""Host pages start at multiples of this many bytes, so that O_DIRECT can read and write them in place."""

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

MAX_PAGE_SIZE = 512

LayoutKind = Literal["mha", "mla"]

HOST_CODECS = ("none", "fp8", "int8")
"""How host memory may hold pages: as the device does, or quantised."""

SCALE_BYTES = 4


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV cache of one model rank.

    A *plane* is one tensor of one layer: K and V for MHA/GQA, the joint latent for MLA. The device
    is layer-first: plane p is a tensor (num_pages, page_size, num_kv_heads, head_dim). A host page
    is page-first: planes 0, 1, ... of one page follow each other, then padding up to `page_stride`.

        host page:  | L0.K | L0.V | L1.K | L1.V | ... | padding |
                    <-plane_bytes->
                    <------------ page_bytes ---------->
                    <----------------- page_stride ------------->

    For MLA, `num_kv_heads` is 1 and `head_dim` is kv_lora_rank + qk_rope_head_dim.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float16"
    kind: LayoutKind = "mha"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.page_size > MAX_PAGE_SIZE:
            raise ConfigError(f"page_size is {self.page_size}, it must be at most {MAX_PAGE_SIZE} tokens")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} is not known, use one of {', '.join(DTYPE_BYTES)}")
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise ConfigError(f"num_kv_heads is {self.num_kv_heads}, an mla layout has exactly 1")

    @property
    def planes_per_layer(self) -> int:
        return 2 if self.kind == "mha" else 1

    @property
    def num_planes(self) -> int:
        return self.num_layers * self.planes_per_layer

    @property
    def plane_bytes(self) -> int:
        """Bytes of one page in one plane."""
        return self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.num_planes * self.plane_bytes

    @property
    def page_stride(self) -> int:
        """Distance in bytes of two host pages that are not quantised; also the slot size on disk."""
        return round_up(self.page_bytes, HOST_ALIGNMENT)

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def pages_of(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take, the last one possibly partial."""
        return -(-num_tokens // self.page_size)

    def whole_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill completely: the only ones that can be shared."""
        return num_tokens // self.page_size


@dataclass(frozen=True)
class HostFormat:
    """What a page is in host memory; a disk tier behind it keeps the same bytes.

    Codec "none" leaves the page as `KVLayout` has it. "fp8" and "int8" make one byte of each value, with one scale for
    each plane, as the codec of that name does (storage_backends/codecs_quantised.py):

        | scales: num_planes float32 | codes: 1 byte a value, planes one after the other | padding |
        <---------------------------------- page_bytes ---------------------------------->
        <-------------------------------------- page_stride --------------------------------------->

    Raises ConfigError for another codec, or if the layout's values have one byte already.
    """

    layout: KVLayout
    codec: str = "none"

    def __post_init__(self) -> None:
        if self.codec not in HOST_CODECS:
            raise ConfigError(f"pages in host memory cannot have codec {self.codec!r}, use {', '.join(HOST_CODECS)}")
        if self.quantised and DTYPE_BYTES[self.layout.dtype] == 1:
            dtype = self.layout.dtype
            raise ConfigError(f"codec {self.codec!r} makes one byte of a value, {dtype} has one already: use none")

    @property
    def quantised(self) -> bool:
        """Whether a page that was here is no longer what it was on the device, but near it."""
        return self.codec != "none"

    @property
    def plane_values(self) -> int:
        """Values of one page in one plane."""
        return self.layout.plane_bytes // DTYPE_BYTES[self.layout.dtype]

    @property
    def codes_offset(self) -> int:
        """Where the codes of a quantised page begin."""
        return SCALE_BYTES * self.layout.num_planes

    def columns(self, first_plane: int, count: int) -> list[slice]:
        """Where the bytes of some planes lie in a page."""
        spans = [(0, self.layout.plane_bytes)]
        if self.quantised:
            spans = [(0, SCALE_BYTES), (self.codes_offset, self.plane_values)]
        return [slice(start + first_plane * size, start + (first_plane + count) * size) for start, size in spans]

    @property
    def page_bytes(self) -> int:
        if not self.quantised:
            return self.layout.page_bytes
        return self.codes_offset + self.layout.num_planes * self.plane_values

    @property
    def page_stride(self) -> int:
        """Distance in bytes of two host pages; also the slot size on disk."""
        return round_up(self.page_bytes, HOST_ALIGNMENT)
