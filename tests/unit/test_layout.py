"""Sizes of planes, pages and strides, worked out by hand."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.layout import DTYPE_BYTES, HOST_ALIGNMENT, MAX_PAGE_SIZE, HostFormat, KVLayout, LayoutKind, round_up


def test_an_mha_layout_has_two_planes_per_layer() -> None:
    layout = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16")
    assert (layout.planes_per_layer, layout.num_planes) == (2, 72)
    assert layout.plane_bytes == 64 * 8 * 128 * 2 == 131072
    assert layout.page_bytes == 72 * 131072 == layout.page_stride
    assert layout.token_bytes == 147456


def test_an_mla_layout_has_one_plane_per_layer_and_pads_its_pages() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=576, page_size=1, dtype="bfloat16", kind="mla")
    assert (layout.planes_per_layer, layout.num_planes, layout.plane_bytes) == (1, 3, 1152)
    assert (layout.page_bytes, layout.page_stride) == (3456, HOST_ALIGNMENT)


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_the_dtype_scales_a_plane(dtype: str, size: int) -> None:
    assert KVLayout(1, 2, 4, 8, dtype).plane_bytes == 64 * size


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192)])
def test_strides_are_rounded_up(value: int, rounded: int) -> None:
    assert round_up(value, HOST_ALIGNMENT) == rounded


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 512])
def test_pages_of_lengths_around_whole_pages(page_size: int) -> None:
    layout = KVLayout(1, 1, 4, page_size)
    for k in (1, 3):
        assert (layout.pages_of(k * page_size), layout.whole_pages(k * page_size)) == (k, k)
        assert (layout.pages_of(k * page_size + 1), layout.whole_pages(k * page_size - 1)) == (k + 1, k - 1)
        assert layout.whole_pages(k * page_size + 1) == (k + 1 if page_size == 1 else k)
        assert layout.pages_of(k * page_size - 1) == (k - 1 if page_size == 1 else k)
    assert layout.pages_of(0) == layout.whole_pages(0) == 0


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(index: int, value: int) -> None:
    sizes = [2, 2, 4, 8]
    sizes[index] = value
    name = ("num_layers", "num_kv_heads", "head_dim", "page_size")[index]
    with pytest.raises(ConfigError, match=f"{name} is {value}, it must be at least 1"):
        KVLayout(sizes[0], sizes[1], sizes[2], sizes[3])


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "kind", "message"),
    [
        (1, MAX_PAGE_SIZE + 1, "float16", "mha", "page_size is 513, it must be at most 512"),
        (1, 16, "float64", "mha", "dtype 'float64' is not known, use one of float32"),
        (2, 16, "float16", "mla", "num_kv_heads is 2, an mla layout has exactly 1"),
    ],
)
def test_other_wrong_layouts_are_named(heads: int, page_size: int, dtype: str, kind: LayoutKind, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVLayout(1, heads, 4, page_size, dtype, kind)


def test_host_pages_are_those_of_the_device_unless_they_are_quantised() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=576, page_size=1, dtype="bfloat16", kind="mla")
    form = HostFormat(layout)
    assert not form.quantised
    assert (form.page_bytes, form.page_stride) == (layout.page_bytes, layout.page_stride)
    assert form.columns(1, 2) == [slice(1152, 3456)]


@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_quantised_page_has_a_scale_a_plane_and_a_byte_a_value(dtype: str, codec: str) -> None:
    form = HostFormat(KVLayout(num_layers=2, num_kv_heads=3, head_dim=64, page_size=16, dtype=dtype), codec)
    assert form.quantised
    assert (form.plane_values, form.codes_offset) == (3072, 16)
    assert (form.page_bytes, form.page_stride) == (16 + 4 * 3072, 16384)
    assert form.columns(2, 2) == [slice(8, 16), slice(16 + 2 * 3072, 16 + 4 * 3072)]


def test_host_codecs_that_cannot_be() -> None:
    layout = KVLayout(1, 1, 8, 4)
    with pytest.raises(ConfigError, match="cannot have codec 'zstd', use none, fp8, int8"):
        HostFormat(layout, "zstd")
    with pytest.raises(ConfigError, match="int8 has one already"):
        HostFormat(KVLayout(1, 1, 8, 4, "int8"), "fp8")
