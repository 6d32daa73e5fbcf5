"""The kernels of kernels/cuda/quantise.cu, run on the CPU: bit for bit what the codecs of the disk tier make."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels.base import Bytes2D
from hicache.layout import DTYPE_BYTES, KVLayout
from hicache.storage_backends.codecs_quantised import Fp8Codec, Int8Codec, QuantisedCodec
from hicache.testing.cuda_shim import Launch, Pools, Shim, ShimModule

QUANTISE = Path(__file__).parents[2] / "kernels" / "cuda" / "quantise.cu"
CODECS: dict[str, type[QuantisedCodec]] = {"fp8": Fp8Codec, "int8": Int8Codec}
DTYPES = ["float32", "float16", "bfloat16"]
FILLER = 0xA5
"""What the pools hold before a copy."""


@dataclass(frozen=True)
class Case:
    """A layout and how it is compiled. `padding`: bytes between scales and codes, 0 in what a codec makes."""

    layout: KVLayout
    format: str
    padding: int = 0

    @property
    def codes(self) -> int:
        return 4 * self.layout.num_planes + self.padding

    @property
    def plane_values(self) -> int:
        return self.layout.plane_bytes // DTYPE_BYTES[self.layout.dtype]

    def codec(self) -> QuantisedCodec:
        return CODECS[self.format](self.layout)

    def module(self, shim: Shim) -> ShimModule:
        sizes = {"PLANE_BYTES": self.layout.plane_bytes, "PAGE_STRIDE": self.stride, "CODES_OFFSET": self.codes}
        kinds = {"DTYPE": f"DTYPE_{self.layout.dtype}", "FORMAT": f"FORMAT_{self.format}"}
        return shim.module(QUANTISE, {**sizes, **kinds, "VECTOR_BYTES": gcd(16, self.codes, self.plane_values)})

    @property
    def stride(self) -> int:
        return (self.codes + self.layout.num_planes * self.plane_values + 31) // 16 * 16

    def host(self, num_pages: int) -> Bytes2D:
        return aligned(num_pages, self.stride)

    def encoded(self, pages: Bytes2D) -> Bytes2D:
        """What a host pool of FILLER becomes when `pages` (n, page_bytes) are gathered to its pages 0, 1, ..."""
        host = self.host(len(pages))
        codec, scales = self.codec(), 4 * self.layout.num_planes
        for page, target in zip(pages, host):
            out = np.zeros(codec.slot_bytes[-1], np.uint8)
            length = codec.encode(memoryview(page.data), memoryview(out.data))
            target[:scales] = out[:scales]
            target[self.codes : self.codes + length - scales] = out[scales:length]
        return host

    def decoded(self, host: Bytes2D) -> Bytes2D:
        """(n, page_bytes): pages as the codec decodes them."""
        values, scales = self.layout.num_planes * self.plane_values, 4 * self.layout.num_planes
        pages = np.zeros((len(host), self.layout.page_bytes), np.uint8)
        for page, source in zip(pages, host):
            data = np.concatenate([source[:scales], source[self.codes : self.codes + values]])
            self.codec().decode(memoryview(data.data), memoryview(page.data))
        return pages


def aligned(num_pages: int, page_bytes: int) -> Bytes2D:
    raw = np.full(num_pages * page_bytes + 64, FILLER, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_pages * page_bytes].reshape(num_pages, page_bytes)


def device_planes(case: Case, pages: Bytes2D) -> list[Bytes2D]:
    """`pages` (n, page_bytes) on the device, layer-first."""
    size = case.layout.plane_bytes
    planes = [aligned(len(pages), size) for _ in range(case.layout.num_planes)]
    for index, plane in enumerate(planes):
        plane[:] = pages[:, index * size : (index + 1) * size]
    return planes


def expect_encoded(case: Case, pages: Bytes2D, host: Bytes2D, note: str = "") -> None:
    """`host` holds `pages` as the codec encodes them."""
    np.testing.assert_array_equal(host, case.encoded(pages), note)


def gathered(shim: Shim, case: Case, pages: Bytes2D, launch: Launch) -> Bytes2D:
    host = case.host(len(pages))
    numbers = np.arange(len(pages), dtype=np.int32)
    pools = Pools(device_planes(case, pages), host)
    case.module(shim).launch("gather_quantised", launch, pools, (numbers, numbers), 0)
    return host


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["mha", "mla"]))
    heads, dim = 1 if kind == "mla" else draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 16, 24, 80, 576]))
    dtype = draw(st.sampled_from(DTYPES))
    layout = KVLayout(draw(st.integers(1, 3)), heads, dim, draw(st.sampled_from([1, 2, 16])), dtype, kind)
    return Case(
        layout, draw(st.sampled_from(list(CODECS))), draw(st.sampled_from([0, 1, 4, -4 * layout.num_planes % 16]))
    )


KINDS = ["normal", "wide", "zeros", "subnormal", "huge", "bits", "few finite", "none finite"]


def plane_of(kind: str, dtype: str, count: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """`count` values of a dtype, as bytes. The last three of KINDS hold NaN of all sorts and both infinities."""
    if kind == "normal":
        return as_bytes(random.normal(0, 1, count), dtype)
    if kind == "wide":
        return as_bytes(random.normal(0, 1, count) * 2.0 ** random.integers(-14, 15, count), dtype)
    wide = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}[dtype]
    bits = random.integers(0, np.iinfo(wide).max, count, wide, endpoint=True)
    sign, infinity, smallest = {
        "float32": (1 << 31, 0x7F800000, 1 << 23),
        "float16": (1 << 15, 0x7C00, 1 << 10),
        "bfloat16": (1 << 15, 0x7F80, 1 << 7),
    }[dtype]
    if kind == "zeros":
        bits &= wide(sign)
    elif kind == "subnormal":
        bits &= wide(sign | (smallest - 1))
    elif kind == "huge":
        bits = bits & wide(sign) | wide(infinity - 1) - bits % wide(16)
    elif kind == "few finite":
        bits = np.where(random.random(count) < 0.8, bits | wide(infinity), bits & wide(sign | 3))
    elif kind == "none finite":  # but for zeros
        bits = np.where(random.random(count) < 0.5, bits & wide(sign) | wide(infinity), bits & wide(sign))
    return bits.astype(wide).view(np.uint8)


def as_bytes(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


launches = st.builds(Launch, st.integers(1, 20), st.sampled_from([32, 64, 160]), st.integers(0, 99))


@settings(max_examples=25)
@given(case=cases(), launch=launches, data=st.data())
def test_a_gathered_page_is_what_the_codec_encodes(shim: Shim, case: Case, launch: Launch, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    count = case.layout.num_planes
    pages = []
    for _ in range(data.draw(st.integers(1, 4))):
        kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
        planes = [plane_of(kind, case.layout.dtype, case.plane_values, random) for kind in kinds]
        pages.append(np.concatenate(planes))
    expect_encoded(case, np.array(pages), gathered(shim, case, np.array(pages), launch))


@settings(max_examples=25)
@given(case=cases(), launch=launches, data=st.data())
def test_a_scattered_page_is_what_the_codec_decodes(
    shim: Shim, case: Case, launch: Launch, data: st.DataObject
) -> None:
    """Scales of all magnitudes, all codes; some planes of a permutation of pages."""
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    pages = data.draw(st.integers(1, 4))
    host, layout = host_page_of_all_codes(case, pages, random), case.layout
    order = random.permutation(pages).astype(np.int32)
    first = data.draw(st.integers(0, layout.num_planes - 1))
    count = data.draw(st.integers(1, layout.num_planes - first))
    planes = [aligned(pages, layout.plane_bytes) for _ in range(count)]
    numbers = np.arange(pages, dtype=np.int32)
    case.module(shim).launch("scatter_quantised", launch, Pools(planes, host), (order, numbers), first)
    wanted = case.decoded(host)
    for index, plane in enumerate(planes, first):
        columns = slice(index * layout.plane_bytes, (index + 1) * layout.plane_bytes)
        np.testing.assert_array_equal(plane[order], wanted[:, columns], f"plane {index}")


def host_page_of_all_codes(case: Case, num_pages: int, random: np.random.Generator) -> Bytes2D:
    host = case.host(num_pages)
    planes, values = case.layout.num_planes, case.layout.num_planes * case.plane_values
    largest = {"float32": 126, "float16": 14, "bfloat16": 126}[case.layout.dtype] - 8
    exponents = random.integers(-126 if largest > 100 else -36, largest, (num_pages, planes))
    scales = random.uniform(1, 2, (num_pages, planes)) * 2.0**exponents * (random.random((num_pages, planes)) < 0.9)
    bits = scales.astype("<f4").view(np.uint32)
    bits &= np.uint32(0xFFFFFFFF) << random.choice(np.array([0, 15, 18], np.uint32), bits.shape)  # short ones make ties
    host[:, : 4 * planes] = bits.view(np.uint8)
    codes = random.integers(0, 256, (num_pages, values), np.uint8)
    unused = (codes & 0x7F) == 0x7F if case.format == "fp8" else codes == 0x80
    host[:, case.codes : case.codes + values] = np.where(unused, 0, codes)
    return host


@pytest.mark.parametrize("format", CODECS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_two_bytes(shim: Shim, dtype: str, format: str) -> None:
    """A plane of all 65536 patterns, and one of the finite ones."""
    case = Case(KVLayout(2, 1, 1024, 64, dtype, "mla"), format)
    bits = np.arange(1 << 16, dtype=np.uint16)
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    finite = np.where(bits & 0x7FFF < infinity, bits, 1)
    for pair in ((bits, finite), (finite, finite)):
        pages = np.concatenate(pair).view(np.uint8)[np.newaxis]
        expect_encoded(case, pages, gathered(shim, case, pages, Launch(2, 512)))


@pytest.mark.parametrize("warps", [2, 3, 4])
def test_planes_that_follow_each_other_in_a_block_do_not_mix(shim: Shim, warps: int) -> None:
    """Every warp has values of each plane, and each in turn falls behind the others."""
    case = Case(KVLayout(3, 1, 128, 16, "float16"), "fp8")
    values = np.random.default_rng(2).normal(0, 1, (2, 6, case.plane_values)) * 4.0 ** np.arange(6)[:, np.newaxis]
    pages = values.astype(np.float16).reshape(2, -1).view(np.uint8)
    for seed in range(0, 1 << 20, 1 << 15):
        host = gathered(shim, case, pages, Launch(2, 32 * warps, seed))
        expect_encoded(case, pages, host, f"seed {seed}")


def test_zeros_keep_their_sign_and_nan_becomes_0(shim: Shim) -> None:
    case = Case(KVLayout(1, 1, 8, 1, "float16", "mla"), "fp8")
    values = np.array([[-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]], np.float16)
    host = gathered(shim, case, values.view(np.uint8), Launch(1, 32))
    assert host[0, :12].tolist() == [0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0x80, 0, 0x80]


@pytest.mark.parametrize("format, code", [("fp8", 0x7F), ("fp8", 0xFF), ("int8", 0x80)])
def test_codes_that_stand_for_nothing_become_0(shim: Shim, format: str, code: int) -> None:
    case = Case(KVLayout(1, 1, 16, 1, "float16", "mla"), format)
    host, page = case.host(1), np.zeros(1, np.int32)
    host[0, :4] = np.array([1], "<f4").view(np.uint8)
    host[0, 4:20] = code
    plane = aligned(1, 32)
    case.module(shim).launch("scatter_quantised", Launch(1, 32), Pools([plane], host), (page, page), 0)
    assert plane.tolist() == [[0] * 32]
