from __future__ import annotations

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError, StoreCorruptError
from hicache.layout import DTYPE_BYTES, HOST_ALIGNMENT, KVLayout
from hicache.storage_backends.codecs import CODECS, Codec, create_codec
from hicache.storage_backends.codecs_measure import compression_ratio, kv_like_pages, page_values, quantisation_error
from hicache.testing.storage import blank_pages

PACKAGES = {"zstd": "zstandard", "lz4": "lz4"}
LOSSY = ["fp8", "int8"]
WIDE = ["float32", "float16", "bfloat16"]
GUARD = 64
"""Bytes around a page that must stay as they are."""


def _named(name: str) -> object:
    package = PACKAGES.get(name, "numpy")
    return pytest.param(name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}"))


lossless = pytest.mark.parametrize("name", [_named(name) for name in PACKAGES])
every = pytest.mark.parametrize("name", [_named(name) for name in CODECS[1:]])
lossy = pytest.mark.parametrize("name", LOSSY)
wide = pytest.mark.parametrize("dtype", WIDE)
any_dtype = pytest.mark.parametrize("dtype", list(DTYPE_BYTES))


def layout_of(dtype: str, page_size: int = 8) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype)


def made(name: str, layout: KVLayout) -> Codec:
    codec = create_codec(name, layout)
    assert codec is not None and codec.name == name
    return codec


def encoded(codec: Codec, page: memoryview) -> bytes:
    out = memoryview(bytearray(codec.slot_bytes[-1]))
    length = codec.encode(page, out)
    assert length <= codec.slot_bytes[-1]
    assert not any(out[length:]), "bytes beyond the encoded page were touched"
    return out[:length].tobytes()


def decoded(codec: Codec, layout: KVLayout, data: bytes) -> memoryview:
    """The decoded page; asserts that nothing around it was written."""
    guard = b"\xa5" * GUARD
    memory = memoryview(bytearray(guard + bytes(layout.page_bytes) + guard))
    try:
        codec.decode(memoryview(data), memory[GUARD:])
    finally:
        assert memory[:GUARD] == guard and memory[-GUARD:] == guard
    return memory[GUARD:-GUARD]


def page_of(layout: KVLayout, data: bytes) -> memoryview:
    (page,) = blank_pages(layout, 1)
    page[: layout.page_bytes] = (data * (layout.page_bytes // len(data) + 1))[: layout.page_bytes]
    return page


def page_of_values(layout: KVLayout, values: npt.ArrayLike) -> memoryview:
    tensor = torch.from_numpy(np.resize(np.asarray(values, np.float64), layout.page_bytes // DTYPE_BYTES[layout.dtype]))
    return page_of(layout, tensor.to(getattr(torch, layout.dtype)).view(torch.uint8).numpy().tobytes())


def planes_of(layout: KVLayout, page: memoryview) -> npt.NDArray[np.float64]:
    return page_values(layout, page).reshape(layout.num_planes, -1)


def scales_of(layout: KVLayout, data: bytes) -> npt.NDArray[np.float64]:
    return np.frombuffer(data, "<f4", layout.num_planes).astype(np.float64)[:, np.newaxis]


def assert_within_bounds(name: str, layout: KVLayout, page: memoryview) -> None:
    """The error of each value is at most that of its code plus that of the dtype."""
    codec = made(name, layout)
    data = encoded(codec, page)
    before, after = planes_of(layout, page), planes_of(layout, decoded(codec, layout, data))
    scales = scales_of(layout, data)
    if name == "int8":
        bound = scales / 2
    else:
        bound = np.maximum(np.abs(before) / 16, scales / 1024)
    info = torch.finfo(getattr(torch, layout.dtype))
    bound = bound * (1 + 2**-20) + np.abs(after) * info.eps + info.smallest_normal * info.eps
    assert np.isfinite(after).all()
    assert (np.abs(after - before) <= bound).all()


# Choosing one


def test_none_is_no_codec() -> None:
    assert create_codec("none", layout_of("float16")) is None


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'zstandard' is not known, did you mean 'zstd'"):
        create_codec("zstandard", layout_of("float16"))
    with pytest.raises(ConfigError, match="use one of none, zstd, lz4, fp8, int8"):
        create_codec("gzip", layout_of("float16"))


@pytest.mark.parametrize("name", list(PACKAGES))
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (PACKAGES[name], "lz4.block"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{PACKAGES[name]}: pip install 'hicache\[codecs\]'"):
        create_codec(name, layout_of("float16"))


@lossy
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_one_byte_is_not_quantised(name: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"{dtype} has one already"):
        create_codec(name, layout_of(dtype))


# Slots


@lossless
@pytest.mark.parametrize("page_size", [1, 8, 9, 64, 512])
def test_slots_of_a_lossless_codec(name: str, page_size: int) -> None:
    layout = layout_of("float16", page_size)
    slots = made(name, layout).slot_bytes
    assert list(slots) == sorted(set(slots))
    assert not any(size % HOST_ALIGNMENT for size in slots)
    assert slots[-1] == layout.page_stride


@lossy
@wide
def test_a_lossy_codec_has_one_slot(name: str, dtype: str) -> None:
    layout = layout_of(dtype, 9)
    codec = made(name, layout)
    (slot,) = codec.slot_bytes
    length = len(encoded(codec, page_of(layout, b"\0")))
    assert length == 4 * layout.num_planes + layout.page_bytes // DTYPE_BYTES[dtype]
    assert length <= slot < length + HOST_ALIGNMENT and slot % HOST_ALIGNMENT == 0


# Lossless


@lossless
@any_dtype
def test_lossless_is_lossless(name: str, dtype: str) -> None:
    layout = layout_of(dtype, 9)
    codec = made(name, layout)
    assert codec.exact
    noise = np.random.default_rng(0).bytes(layout.page_bytes)
    pages = [page_of(layout, data) for data in (b"\0", b"\xff", b"\x12\x34\x56\x78", noise)]
    for page in [*pages, *kv_like_pages(layout, 2, seed=1)]:
        assert decoded(codec, layout, encoded(codec, page)) == page[: layout.page_bytes]


@lossless
@given(data=st.binary(min_size=1, max_size=300), noise=st.integers(0, 4096), dtype=st.sampled_from(list(DTYPE_BYTES)))
def test_lossless_for_any_bytes(name: str, data: bytes, noise: int, dtype: str) -> None:
    layout = layout_of(dtype, 8)
    codec = made(name, layout)
    page = page_of(layout, data)
    page[:noise] = np.random.default_rng(noise).bytes(noise)
    assert decoded(codec, layout, encoded(codec, page)) == page[: layout.page_bytes]


@lossless
def test_noise_is_kept_as_it_is(name: str) -> None:
    layout = layout_of("float16")
    page = page_of(layout, np.random.default_rng(0).bytes(layout.page_bytes))
    assert encoded(made(name, layout), page) == page


@lossless
def test_regular_pages_take_the_smallest_slot(name: str) -> None:
    layout = layout_of("float16", 64)
    codec = made(name, layout)
    assert len(encoded(codec, page_of(layout, b"\0"))) < layout.page_bytes / 50 < codec.slot_bytes[0]


@lossless
def test_read_only_pages_are_encoded(name: str) -> None:
    layout = layout_of("float16")
    page = memoryview(bytes(layout.page_bytes))
    assert decoded(made(name, layout), layout, encoded(made(name, layout), page)) == page


@pytest.mark.skipif(find_spec("zstandard") is None, reason="needs zstandard")
def test_kv_values_get_smaller() -> None:
    for dtype, ratio in (("bfloat16", 0.7), ("float16", 0.88), ("float32", 0.86)):
        layout = layout_of(dtype, 64)
        assert compression_ratio(made("zstd", layout), layout, kv_like_pages(layout, 2, seed=3)) < ratio


# Lossy


@lossy
@wide
def test_errors_are_bounded(name: str, dtype: str) -> None:
    layout = layout_of(dtype, 16)
    for page in kv_like_pages(layout, 3, seed=5):
        assert_within_bounds(name, layout, page)


@lossy
@wide
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40),
    exponent=st.integers(-149, 0),
)
def test_errors_are_bounded_at_any_magnitude(name: str, dtype: str, values: list[float], exponent: int) -> None:
    layout = layout_of(dtype, 1)
    largest = torch.finfo(getattr(torch, dtype)).max
    scaled = [min(max(value * 2.0**exponent, -largest), largest) for value in values]
    assert_within_bounds(name, layout, page_of_values(layout, scaled))


@lossy
@wide
def test_extremes_stay_finite(name: str, dtype: str) -> None:
    layout = layout_of(dtype)
    info = torch.finfo(getattr(torch, dtype))
    for value in (info.max, info.smallest_normal, info.smallest_normal * info.eps):
        assert_within_bounds(name, layout, page_of_values(layout, [value, -value, 0.0]))


@lossy
@wide
def test_zeros_are_exact(name: str, dtype: str) -> None:
    layout = layout_of(dtype)
    codec, page = made(name, layout), page_of(layout, b"\0")
    assert not codec.exact
    assert decoded(codec, layout, encoded(codec, page)) == page[: layout.page_bytes]


@lossy
@wide
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_spoils_nothing(name: str, dtype: str) -> None:
    layout = layout_of(dtype)
    values = np.random.default_rng(0).normal(size=layout.page_bytes // DTYPE_BYTES[dtype])
    values[:4] = [0.0, 7.0, 7.0, -7.0]
    codec = made(name, layout)
    without = encoded(codec, page_of_values(layout, values))
    values[[0, 2, 3]] = [np.nan, np.inf, -np.inf]
    assert encoded(codec, page_of_values(layout, values)) == without
    for value in (np.nan, np.inf, -np.inf):
        data = encoded(codec, page_of_values(layout, value))
        assert not planes_of(layout, decoded(codec, layout, data)).any()


@lossy
@wide
@pytest.mark.filterwarnings("error")
@given(data=st.binary(min_size=1, max_size=600))
def test_any_bytes_are_encoded(name: str, dtype: str, data: bytes) -> None:
    """Among them signaling NaNs and subnormal values; what is finite keeps to the bounds."""
    layout = layout_of(dtype, 1)
    page = page_of(layout, data)
    codec = made(name, layout)
    before, after = planes_of(layout, page), planes_of(layout, decoded(codec, layout, encoded(codec, page)))
    assert np.isfinite(after).all()
    assert not after[np.isnan(before)].any()
    assert_within_bounds(name, layout, page_of_values(layout, np.where(np.isfinite(before), before, 0.0)))


@wide
def test_fp8_codes_are_float8(dtype: str) -> None:
    """Codes mean what float8_e4m3fn means to others, rounding included."""
    layout = layout_of(dtype, 64)
    random = np.random.default_rng(2)
    planes = (layout.num_planes, layout.page_bytes // layout.num_planes // DTYPE_BYTES[dtype])
    values = random.normal(size=planes) * np.exp2(random.integers(-12, 8, planes))
    values[:, 0] = 448.0
    page = page_of_values(layout, np.clip(values, -448, 448))
    data = encoded(made("fp8", layout), page)
    assert (scales_of(layout, data) == 1.0).all()
    expected = torch.from_numpy(page_values(layout, page)).float().to(torch.float8_e4m3fn)
    assert data[4 * layout.num_planes :] == expected.view(torch.uint8).numpy().tobytes()
    after = page_values(layout, decoded(made("fp8", layout), layout, data))
    assert (after == expected.double().numpy()).all()


@lossy
def test_encoding_does_not_change_the_page(name: str) -> None:
    layout = layout_of("float32")
    page = memoryview(bytes(kv_like_pages(layout, 1, seed=4)[0]))
    assert decoded(made(name, layout), layout, encoded(made(name, layout), page)) != page
    assert page == kv_like_pages(layout, 1, seed=4)[0]


def test_quantisation_errors_are_reported() -> None:
    layout = layout_of("float16", 16)
    pages = kv_like_pages(layout, 2, seed=6)
    for name in LOSSY:
        error = quantisation_error(made(name, layout), layout, pages)
        assert 0 < error.max_abs < 3 and 0.01 < error.relative_rms < 0.06
        assert compression_ratio(made(name, layout), layout, pages) == pytest.approx(0.5, abs=0.01)
    page = page_of_values(layout, [127.0, 0.25])  # a scale of 1: 0.25 is lost
    error = quantisation_error(made("int8", layout), layout, [page])
    assert error.max_abs == 0.25
    assert error.relative_rms == pytest.approx(0.25 / np.sqrt(127**2 + 0.25**2))
    assert quantisation_error(made("int8", layout), layout, [page_of(layout, b"\0")]).relative_rms == 0


# Damage


@every
@pytest.mark.filterwarnings("error")
@given(data=st.data(), dtype=st.sampled_from(WIDE))
def test_damage_raises_or_decodes(name: str, data: st.DataObject, dtype: str) -> None:
    """Nothing but StoreCorruptError, and no byte outside the page (`decoded` looks)."""
    layout = layout_of(dtype)
    codec = made(name, layout)
    whole = bytearray(encoded(codec, kv_like_pages(layout, 1, seed=7)[0]))
    kind = data.draw(st.sampled_from(["flips", "cut", "longer", "any"]))
    if kind == "flips":
        for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=5)):
            whole[place] ^= data.draw(st.integers(1, 255))
        for place in data.draw(st.lists(st.integers(0, 40), max_size=3)):  # lengths, frame headers, scales
            whole[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "longer":
        whole += data.draw(st.binary(min_size=1, max_size=layout.page_bytes))
    else:
        whole = bytearray(data.draw(st.binary(max_size=300)))
    try:
        decoded(codec, layout, bytes(whole))
    except StoreCorruptError as error:
        assert error.reason == "corrupt"


@every
def test_a_cut_page_is_corrupt(name: str) -> None:
    layout = layout_of("bfloat16")
    codec = made(name, layout)
    data = encoded(codec, page_of_values(layout, [1.0, -2.0, 3.0]))
    for length in (0, 1, 7, len(data) // 2, len(data) - 1):
        with pytest.raises(StoreCorruptError):
            decoded(codec, layout, data[:length])
    with pytest.raises(StoreCorruptError):
        decoded(codec, layout, data + b"\0")


@lossless
def test_parts_of_impossible_lengths_are_corrupt(name: str) -> None:
    layout = layout_of("float16")
    codec = made(name, layout)
    half = layout.page_bytes // 2
    for lengths in ((0, 92), (92, 0), (half + 1, 0), (2**32 - 1, 2**32 - 1)):
        size = 100 if sum(lengths) == 92 else 8 + min(sum(lengths), 2 * half - 9)
        with pytest.raises(StoreCorruptError):
            decoded(codec, layout, struct.pack("<II", *lengths).ljust(size, b"\0"))


@pytest.mark.skipif(find_spec("zstandard") is None, reason="needs zstandard")
def test_a_frame_of_another_size_is_corrupt() -> None:
    """Neither a frame that would fill the memory nor one with a window larger than the page is begun."""
    import zstandard

    layout = layout_of("float16")
    codec, half = made("zstd", layout), layout.page_bytes // 2
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    short = zstandard.ZstdCompressor().compress(bytes(half - 1))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(half))
    # magic, descriptor (8 bytes of content size), window of 64 MiB, content size, one block: `half` times a zero
    block = (half << 3 | 0b011).to_bytes(3, "little") + b"\0"
    window = b"\x28\xb5\x2f\xfd" + b"\xc0" + bytes([16 << 3]) + struct.pack("<Q", half) + block
    assert zstandard.ZstdDecompressor().decompress(window) == bytes(half)
    for frame in (bomb, short, unsized, window):
        with pytest.raises(StoreCorruptError):
            decoded(codec, layout, struct.pack("<II", len(frame), 0) + frame)
        with pytest.raises(StoreCorruptError):
            decoded(codec, layout, struct.pack("<II", len(frame), half - 100) + frame + bytes(half - 100))


@lossy
@wide
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [-1.0, float("inf"), -float("inf"), 3.3e38, float("nan"), "signaling nan"])
def test_impossible_scales_are_corrupt(name: str, dtype: str, scale: float | str) -> None:
    layout = layout_of(dtype)
    codec = made(name, layout)
    data = bytearray(encoded(codec, kv_like_pages(layout, 1, seed=8)[0]))
    data[4:8] = b"\x01\x00\x80\x7f" if isinstance(scale, str) else struct.pack("<f", scale)
    with pytest.raises(StoreCorruptError, match="scale"):
        decoded(codec, layout, bytes(data))


@pytest.mark.parametrize("name, code", [("fp8", 0x7F), ("fp8", 0xFF), ("int8", 0x80)])
def test_impossible_codes_are_corrupt(name: str, code: int) -> None:
    layout = layout_of("float16")
    codec = made(name, layout)
    data = bytearray(encoded(codec, kv_like_pages(layout, 1, seed=8)[0]))
    data[-1] = code
    with pytest.raises(StoreCorruptError, match="code"):
        decoded(codec, layout, bytes(data))


# Threads


@every
def test_threads_do_not_disturb_each_other(name: str) -> None:
    layout = layout_of("bfloat16", 64)
    codec = made(name, layout)
    pages = kv_like_pages(layout, 8, seed=9)
    data = [encoded(codec, page) for page in pages]
    expected = [decoded(codec, layout, item).tobytes() for item in data]

    def again(number: int) -> None:
        index = number % len(pages)
        assert decoded(codec, layout, data[index]) == expected[index]
        assert encoded(codec, pages[index]) == data[index]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(again, range(200)))


# Pages to measure with


@any_dtype
def test_kv_like_pages_repeat(dtype: str) -> None:
    layout = layout_of(dtype, 9)
    pages = kv_like_pages(layout, 3, seed=1)
    assert [page.nbytes for page in pages] == [layout.page_stride] * 3
    assert [bytes(page) for page in pages] == [bytes(page) for page in kv_like_pages(layout, 3, seed=1)]
    assert bytes(pages[0]) != bytes(kv_like_pages(layout, 1, seed=2)[0])
    assert all(np.isfinite(page_values(layout, page)).all() for page in pages)
    assert kv_like_pages(layout, 0, seed=1) == []


def test_keys_are_smooth_and_have_outliers() -> None:
    layout = layout_of("float32", 256)
    planes = planes_of(layout, kv_like_pages(layout, 1, seed=1)[0]).reshape(layout.num_planes, 256, -1)
    step = np.abs(np.diff(planes, axis=1)).mean((1, 2)) / planes.std(1).mean(1)
    peaks = np.abs(planes).max((1, 2)) / np.abs(planes).mean((1, 2))
    assert (step[0::2] < step[1::2] / 2).all()
    assert (peaks[0::2] > peaks[1::2]).all()
