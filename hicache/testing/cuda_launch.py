"""The shim in a GPU's place: what the CUDA copiers launch and enqueue runs at once, on the CPU.

Kernels are compiled from their sources by g++ with the copier's own macros, and get the copier's own arguments. All
memory is the host's, so an address is an address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from hicache.kernels import cuda_paths, cuda_quantised
from hicache.kernels.base import Bytes2D
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_driver import Addresses
from hicache.kernels.cuda_paths import PathName, StagedPath
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.cuda_pools import PageBatch
from hicache.kernels.cuda_source import FOLDER
from hicache.layout import HostFormat
from hicache.testing.cuda_shim import Launch, Pools, Shim

PROCESSORS = 16


@dataclass
class ShimGpu:
    """`launches` are (kernel, blocks, threads, pages, planes); `macros` those of the kernel compiled last."""

    shim: Shim
    launches: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    copies: int = 0
    macros: dict[str, int | str] = field(default_factory=dict)
    _memory: dict[int, Bytes2D] = field(default_factory=dict)

    @contextmanager
    def in_use(self, staging_bytes: int = 2 * 4096, threads: int = 64) -> Iterator[ShimGpu]:
        """Let copiers be made and launch here, with a smaller staging buffer and smaller blocks than on a GPU."""
        properties = SimpleNamespace(multi_processor_count=PROCESSORS)
        with (
            mock.patch.object(cuda_paths, "kernel", self._kernel),
            mock.patch.object(cuda_quantised, "kernel", self._kernel),
            mock.patch.object(cuda_paths, "copy_batch", self._copy_batch),
            mock.patch.object(cuda_paths, "STAGING_BYTES", staging_bytes),
            mock.patch.object(cuda_paths, "THREADS", threads),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
            mock.patch.object(PageBatch, "stream", 0),
            mock.patch.object(PageBatch, "on_gpu", property(_page_addresses)),
        ):
            yield self

    def copier(
        self, planes: Sequence[Bytes2D], given: Bytes2D, path: PathName, form: HostFormat | None = None
    ) -> tuple[CudaCopier, Bytes2D]:
        """A copier between planes and an aligned copy of a host pool; the copy."""
        raw = np.zeros(given.size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        host: Bytes2D = raw[start : start + given.size].reshape(given.shape)
        host[:] = given
        copier = CudaCopier(CudaPlanes([torch.from_numpy(plane) for plane in planes]), host, path, form)
        self._memory |= {memory.ctypes.data: memory for memory in (*planes, host)}
        if isinstance(copier.choice.down, StagedPath):
            staging = copier.choice.down.staging
            self._memory[staging.data_ptr()] = staging.numpy().reshape(-1, host.shape[1])
        return copier, host

    def _kernel(self, file: str, name: str, device: int | None, macros: tuple[tuple[str, int | str], ...]) -> object:
        """In place of cuda_source.kernel."""
        self.macros = dict(macros)
        module = self.shim.module(FOLDER / file, self.macros)
        most_threads = int(self.macros["MAX_THREADS"])

        def launch(blocks: int, threads: int, arguments: tuple[int, ...], stream: int) -> None:
            table, memory, device_pages, host_pages, num_pages, num_planes, first = map(int, arguments)
            if not (blocks > 0 and 0 < threads <= most_threads and threads % 32 == 0):
                raise AssertionError(f"{name} was launched with {blocks} blocks of {threads} threads")
            self.launches.append((name, blocks, threads, num_pages, num_planes))
            planes = [self._memory[address] for address in _raw(table, 8 * num_planes).view(np.uint64).tolist()]
            pages = [_raw(numbers, 4 * num_pages).view(np.int32) for numbers in (device_pages, host_pages)]
            module.launch(
                name, Launch(blocks, threads), Pools(planes, self._memory[memory]), (pages[0], pages[1]), first
            )

        return SimpleNamespace(launch=launch)

    def _copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """In place of cuda_driver.copy_batch."""
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist()):
            ctypes.memmove(target, source, size)
            self.copies += 1


def _raw(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """A copy of the bytes at an address."""
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def _page_addresses(batch: PageBatch) -> tuple[int, int]:
    return batch.device_pages.ctypes.data, batch.host_pages.ctypes.data
