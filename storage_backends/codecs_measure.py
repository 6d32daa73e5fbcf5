"""What a codec costs and gains, on pages like those of a model."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.layout import KVLayout
from hicache.storage_backends.codecs import Codec

_Doubles = npt.NDArray[np.float64]

_OUTLIER_CHANNELS = 64
"""One in so many channels of K is an outlier."""

_CORRELATION = 0.9
"""Of a K channel between one token and the next."""


@dataclass(frozen=True)
class CodecError:
    """What encoding changed: `max_abs` is the largest |decoded - original|, in the unit of the values;
    `relative_rms` is the root mean square of the differences over that of the originals."""

    max_abs: float
    relative_rms: float


def quantisation_error(codec: Codec, layout: KVLayout, pages: Sequence[memoryview]) -> CodecError:
    """Encode and decode `pages` and compare the values, those that are finite in the original. Needs torch."""
    out, decoded = _buffer(codec.slot_bytes[-1]), _buffer(layout.page_stride)
    max_abs = error_square = square = 0.0
    for page in pages:
        length = codec.encode(page, out)
        codec.decode(out[:length], decoded)
        before, after = page_values(layout, page), page_values(layout, decoded)
        finite = np.isfinite(before)
        errors = (after - before)[finite]
        max_abs = max(max_abs, float(np.abs(errors).max(initial=0.0)))
        error_square += float(np.square(errors).sum())
        square += float(np.square(before[finite]).sum())
    return CodecError(max_abs, float(np.sqrt(error_square / square)) if square else 0.0)


def compression_ratio(codec: Codec, layout: KVLayout, pages: Sequence[memoryview]) -> float:
    """Mean length of the encoded pages over page_bytes; what slots are larger than their pages is not counted."""
    out = _buffer(codec.slot_bytes[-1])
    return sum(codec.encode(page, out) for page in pages) / (len(pages) * layout.page_bytes)


def kv_like_pages(layout: KVLayout, count: int, seed: int) -> list[memoryview]:
    """`count` consecutive pages of one sequence, page_stride bytes each and 4096-aligned, as a model might fill them.

    In each plane every channel (head and position in it) has a mean and a log-normal scale of its own, and its
    values are normal around the mean. K varies smoothly from token to token and has a few outlier channels, 8 times
    as large; V and latents do not. The same seed gives the same bytes. Needs torch.
    """
    if not count:
        return []
    tokens = count * layout.page_size
    random = np.random.default_rng(seed)
    view = _buffer(count * layout.page_stride)
    pages = [
        view[start : start + layout.page_stride] for start in range(0, count * layout.page_stride, layout.page_stride)
    ]
    for plane in range(layout.num_planes):
        is_key = layout.kind == "mha" and plane % layout.planes_per_layer == 0
        values = _channels(random, tokens, layout.num_kv_heads * layout.head_dim, is_key)
        data = _to_bytes(layout, values)
        start = plane * layout.plane_bytes
        for number, page in enumerate(pages):
            page[start : start + layout.plane_bytes] = data[number * layout.plane_bytes :][: layout.plane_bytes]
    return pages


def page_values(layout: KVLayout, page: memoryview) -> _Doubles:
    """All values of a page in their order. Needs torch."""
    import torch

    # The copy is for torch, which warns of memory that is read-only.
    data = bytearray(page[: layout.page_bytes])
    values: _Doubles = torch.frombuffer(data, dtype=getattr(torch, layout.dtype)).double().numpy()
    return values


def _channels(random: np.random.Generator, tokens: int, channels: int, is_key: bool) -> _Doubles:
    """(tokens, channels) values of one plane."""
    scale = random.lognormal(0.0, 0.5, channels)
    mean = scale * random.normal(0.0, 0.5, channels)
    noise = random.normal(0.0, 1.0, (tokens, channels))
    if is_key:
        outliers = random.choice(channels, -(-channels // _OUTLIER_CHANNELS), replace=False)
        scale[outliers] *= 8
        for token in range(1, tokens):
            noise[token] = _CORRELATION * noise[token - 1] + np.sqrt(1 - _CORRELATION**2) * noise[token]
    values: _Doubles = mean + scale * noise
    return values


def _to_bytes(layout: KVLayout, values: _Doubles) -> memoryview:
    import torch

    if layout.dtype == "int8":
        values = np.rint(values * (127 / np.abs(values).max()))
    narrow = torch.from_numpy(values).to(getattr(torch, layout.dtype))
    return memoryview(narrow.view(torch.uint8).numpy().tobytes())


def _buffer(nbytes: int) -> memoryview:
    """Zeros, aligned as host pages are."""
    return memoryview(mmap.mmap(-1, nbytes))
