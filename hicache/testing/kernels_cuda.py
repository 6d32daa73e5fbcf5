"""The CUDA copiers as the conformance suite takes them: on pools in GPU memory and pinned memory. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from hicache.kernels.base import Bytes2D, PageCopier, PageCopy, check_same_shape
from hicache.kernels.cuda_bounce import BouncingCopier
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_paths import PathName
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.layout import HostFormat
from hicache.streams import Stream, create_stream
from hicache.testing.kernels import Bind
from hicache.types import PageIndices

AnyPath = PathName | Literal["auto", "unpinned"]


def on_gpu(path: AnyPath, form: HostFormat | None = None) -> Bind:
    """A `Bind` by way of copies of both pools on the machine's first GPU. `form`: of quantised host pages."""

    def bind(planes: Sequence[Bytes2D], host: Bytes2D) -> tuple[PageCopier, Callable[[], None]]:
        check_same_shape(planes)
        tensors = [torch.from_numpy(np.ascontiguousarray(plane)).to("cuda:0") for plane in planes]
        pinned = _pinned(host)
        stream = create_stream("cuda:0", "conformance")
        copier = _copier(path, CudaPlanes(tensors), pinned, form)
        if path == "auto":
            pinned[:] = host  # it has measured with these pages

        def fetch() -> None:
            stream.synchronize()
            host[:] = pinned
            for plane, tensor in zip(planes, tensors):
                plane[:] = tensor.cpu().numpy()

        return _OnStream(copier, stream), fetch

    return bind


def _pinned(host: Bytes2D) -> Bytes2D:
    """A pinned copy of `host`. Its rows keep their distance, whatever that does to their alignment."""
    pages: Bytes2D = torch.empty(host.shape, dtype=torch.uint8, pin_memory=True).numpy()
    pages[:] = host
    return pages


def _copier(path: AnyPath, planes: CudaPlanes, host: Bytes2D, form: HostFormat | None) -> PageCopier:
    return BouncingCopier(planes, host, form) if path == "unpinned" else CudaCopier(planes, host, path, form)


class _OnStream:
    """Copies on a stream of their own: the copy engines' calls refuse the default one."""

    def __init__(self, copier: PageCopier, stream: Stream) -> None:
        self._copier = copier
        self._stream = stream

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> PageCopy:
        """See PageCopier."""
        return _CopyOnStream(self._copier.copy(device_pages, host_pages), self._stream)


class _CopyOnStream:
    def __init__(self, copy: PageCopy, stream: Stream) -> None:
        self._copy = copy
        self._stream = stream

    def gather(self) -> None:
        """See PageCopy."""
        self._run(self._copy.gather)

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        self._run(lambda: self._copy.scatter(first_plane, count))

    def _run(self, work: Callable[[], None]) -> None:
        """Errors of `work` are for the caller here, not for the stream's events."""
        errors: list[Exception] = []

        def attempt() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        self._stream.submit(attempt)
        for error in errors:
            raise error
