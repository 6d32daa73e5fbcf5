"""Copies that quantise: the one on the CPU against the codecs of the disk tier, those on a GPU against that one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ProtocolError
from hicache.kernels.base import Bytes2D
from hicache.kernels.quantised import QuantisedCopier
from hicache.layout import HostFormat, KVLayout
from hicache.storage_backends.codecs import create_codec, create_quantiser
from hicache.testing.kernels import Bind, QuantisedCase, check_gather, check_scatter, in_place
from hicache.types import PageIndices


def on_cpu(form: HostFormat) -> Bind:
    return in_place(partial(QuantisedCopier, quantiser=create_quantiser(form.codec, form.layout)))


KERNELS = [pytest.param(on_cpu, id="cpu")]
if find_spec("cupy") and torch.cuda.is_available():
    on_gpu = importlib.import_module("hicache.testing.kernels_cuda").on_gpu
    PATHS = ("kernel", "staged", "auto", "unpinned")
    KERNELS += [pytest.param(partial(on_gpu, path), id=f"cuda-{path}", marks=pytest.mark.gpu) for path in PATHS]

Kernels = Callable[[HostFormat], Bind]


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    kind = draw(st.sampled_from(["mha", "mla"]))
    heads, dim = 1 if kind == "mla" else draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 16, 80, 576]))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    return KVLayout(draw(st.integers(1, 4)), heads, dim, draw(st.sampled_from([1, 2, 16])), dtype, kind)


@st.composite
def cases(draw: st.DrawFn) -> QuantisedCase:
    form = HostFormat(draw(layouts()), draw(st.sampled_from(["fp8", "int8"])))
    sizes = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    batch = draw(st.integers(0, min(sizes)))
    pages = [indices(*draw(st.permutations(range(size)))[:batch]) for size in sizes]
    return QuantisedCase(form, sizes[0], sizes[1], pages[0], pages[1], draw(st.integers(0, 999)))


def indices(*pages: int) -> PageIndices:
    return np.array(pages, np.int32)


def page_of(planes: list[Bytes2D], number: int) -> np.ndarray:
    """A device page, its planes one after the other."""
    return np.concatenate([plane[number] for plane in planes])


@settings(max_examples=50)
@given(case=cases())
def test_a_gathered_page_is_what_the_codec_makes_of_it(case: QuantisedCase) -> None:
    planes, host = case.pools()
    before, codec = host.copy(), create_codec(case.form.codec, case.form.layout)
    assert codec is not None
    copier, _ = on_cpu(case.form)(planes, host)
    copier.copy(case.device_pages, case.host_pages).gather()
    for device, to in zip(case.device_pages, case.host_pages):
        length = codec.encode(page_of(planes, device).data, before[to].data)
        assert length == case.form.page_bytes
    np.testing.assert_array_equal(host, before)  # its padding, and pages that are not in the batch, as they were


@settings(max_examples=50)
@given(case=cases(), data=st.data())
def test_a_scattered_plane_is_what_the_codec_reads(case: QuantisedCase, data: st.DataObject) -> None:
    planes, host = case.pools()
    wanted, codec = [plane.copy() for plane in planes], create_codec(case.form.codec, case.form.layout)
    assert codec is not None
    first = data.draw(st.integers(0, len(planes) - 1))
    count = data.draw(st.integers(0, len(planes) - first))
    copier, _ = on_cpu(case.form)(planes, host)
    copier.copy(case.device_pages, case.host_pages).scatter(first, count)
    page = np.zeros(case.form.layout.page_bytes, np.uint8)
    for device, source in zip(case.device_pages, case.host_pages):
        codec.decode(host[source, : case.form.page_bytes].data, page.data)
        for index, values in list(enumerate(page.reshape(len(planes), -1)))[first : first + count]:
            wanted[index][device] = values
    np.testing.assert_array_equal(planes, wanted)


@settings(max_examples=50)
@given(case=cases())
def test_to_quantise_again_changes_nothing(case: QuantisedCase) -> None:
    """A page may go down and up any number of times."""
    planes, host = case.pools()
    copier, _ = on_cpu(case.form)(planes, host)
    copy = copier.copy(case.device_pages, case.host_pages)
    copy.gather()
    copy.scatter(0, len(planes))
    once, before = host.copy(), [plane.copy() for plane in planes]
    copy.gather()
    copy.scatter(0, len(planes))
    np.testing.assert_array_equal(host, once)
    np.testing.assert_array_equal(planes, before)


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=cases(), data=st.data())
@settings(max_examples=40)
def test_every_kernel_makes_the_same_bytes(kernels: Kernels, case: QuantisedCase, data: st.DataObject) -> None:
    check_gather(kernels(case.form), case)
    planes = case.form.layout.num_planes
    first = data.draw(st.integers(0, planes - 1))
    check_scatter(kernels(case.form), case, first, data.draw(st.integers(0, planes - first)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layers_of_a_model_one_by_one(kernels: Kernels, dtype: str, codec: str) -> None:
    """Planes of 16 KiB and more, wider than a block of threads; as many layers as fill vectors of 16 codes."""
    form = HostFormat(KVLayout(4, 4, 128, 16, dtype), codec)
    case = QuantisedCase(form, 24, 20, indices(*range(23, 4, -1)), indices(*range(19)), seed=3)
    check_gather(kernels(form), case)
    for layer in range(4):
        check_scatter(kernels(form), case, 2 * layer, 2)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_layer_reads_its_own_planes_only(kernels: Kernels) -> None:
    """What lies in the other planes of the page does not matter."""
    form = HostFormat(KVLayout(3, 1, 16, 2), "fp8")
    case = QuantisedCase(form, 2, 2, indices(0), indices(1))
    results = []
    for garbage in (0x00, 0xFF):
        planes, host = case.pools()
        kept = [host[1, columns].copy() for columns in form.columns(2, 2)]
        host[1] = garbage
        for columns, data in zip(form.columns(2, 2), kept):
            host[1, columns] = data
        copier, fetch = kernels(form)(planes, host)
        copier.copy(case.device_pages, case.host_pages).scatter(2, 2)
        fetch()
        results.append(planes)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "device_pages, host_pages, message",
    [
        ([0, 4], [0, 1], r"device page outside 0 \.\. 3: \[4\]"),
        ([0, 1], [0, 5], r"host page outside 0 \.\. 4: \[5\]"),
        ([0, 1], [0], "2 device pages are paired with 1 host pages"),
    ],
)
def test_bad_pages_are_refused(kernels: Kernels, device_pages: list[int], host_pages: list[int], message: str) -> None:
    form = HostFormat(KVLayout(1, 1, 16, 2), "fp8")
    planes, host = QuantisedCase(form, 4, 5, indices(), indices()).pools()
    copier, _ = kernels(form)(planes, host)
    with pytest.raises(ProtocolError, match=message):
        copier.copy(indices(*device_pages), indices(*host_pages))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first_plane, count", [(-1, 1), (1, 2), (0, -1)])
def test_planes_that_there_are_not_are_refused(kernels: Kernels, first_plane: int, count: int) -> None:
    form = HostFormat(KVLayout(1, 1, 16, 2), "int8")
    copier, _ = kernels(form)(*QuantisedCase(form, 4, 5, indices(), indices()).pools())
    with pytest.raises(ProtocolError, match=f"planes {first_plane} .. {first_plane + count - 1} leave the 2 planes"):
        copier.copy(indices(0), indices(0)).scatter(first_plane, count)


@pytest.mark.parametrize("kernels", KERNELS)
def test_pools_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    form = HostFormat(KVLayout(1, 1, 16, 2), "int8")
    planes, host = QuantisedCase(form, 2, 2, indices(), indices()).pools()
    with pytest.raises(ProtocolError, match="1 planes of 64 bytes, the layout has 2 of 64 bytes"):
        kernels(form)(planes[:1], host)
    with pytest.raises(ProtocolError, match="int8 pages of 72 bytes leave the 68 byte page"):
        kernels(form)(planes, np.zeros((2, 68), np.uint8))
    with pytest.raises(ProtocolError, match="planes differ"):
        kernels(form)([planes[0], planes[1][:1]], host)
