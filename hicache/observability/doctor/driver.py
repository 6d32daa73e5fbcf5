"""The NVIDIA driver, asked without torch and CuPy. Only questions: no context is made and no memory taken."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from hicache.observability.doctor.facts import DriverFacts, Gpu, cuda_version
from hicache.observability.doctor.finding import in_one_line

LIBRARY = "libcuda.so.1"

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_NO_DEVICE = 100  # CUresult


class _DriverError(Exception):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> DriverFacts:
    """What the driver says; no facts at all where there is none, an error where it fails."""
    try:
        library = load(LIBRARY)
    except OSError as error:  # without an errno: the text is all there is
        absent = "cannot open shared object file" in str(error)
        return DriverFacts(error="" if absent else in_one_line(error))
    version = None
    try:
        version = cuda_version(_number(library, library.cuDriverGetVersion))
        _check(library, library.cuInit(0))
        return DriverFacts(True, version, tuple(_gpus(library)))
    except _DriverError as error:
        return DriverFacts(True, version, error="" if error.code == _NO_DEVICE else str(error))


def _gpus(library: Any) -> Iterator[Gpu]:
    for ordinal in range(_number(library, library.cuDeviceGetCount)):
        device = _number(library, library.cuDeviceGet, ordinal)
        total = ctypes.c_size_t()
        _check(library, library.cuDeviceTotalMem_v2(ctypes.byref(total), device))
        multiprocessors, major, minor = (
            _number(library, library.cuDeviceGetAttribute, attribute, device)
            for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR)
        )
        name, pci = (_text(library, call, device) for call in (library.cuDeviceGetName, library.cuDeviceGetPCIBusId))
        yield Gpu(name, total.value, multiprocessors, (major, minor), pci.lower())


def _number(library: Any, call: Any, *arguments: int) -> int:
    """What a call writes to the int that its first argument points to."""
    number = ctypes.c_int()
    _check(library, call(ctypes.byref(number), *arguments))
    return number.value


def _text(library: Any, call: Any, device: int) -> str:
    buffer = ctypes.create_string_buffer(256)
    _check(library, call(buffer, len(buffer), device))
    return buffer.value.decode(errors="replace")


def _check(library: Any, code: int) -> None:
    """Raises _DriverError, with the driver's own words, unless `code` is CUDA_SUCCESS."""
    if code:
        words = []
        for call in (library.cuGetErrorName, library.cuGetErrorString):
            text = ctypes.c_char_p()
            if call(code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode(errors="replace"))
        raise _DriverError(code, ": ".join(words) or f"CUresult {code}")
