"""From a .cu file and the sizes of a layout to a kernel on a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hicache.errors import ConfigError

FOLDER = Path(__file__).parent / "cuda"
"""Where the sources are, also where the package is installed: they are compiled on the machine that runs them."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


@dataclass(frozen=True)
class _Handle:
    """A CUDA stream as CuPy's launcher wants it."""

    ptr: int


class Kernel:
    """A compiled kernel. Launching it takes a few microseconds of the calling thread and never waits."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def launch(self, blocks: int, threads: int, arguments: tuple[object, ...], stream: int) -> None:
        """Enqueue on a CUDA stream, given by its handle. Pointers are ints, unsigned ints numpy scalars."""
        self._function((blocks,), (threads,), arguments, 0, _Handle(stream))


@cache
def kernel(file: str, name: str, device: int, macros: tuple[tuple[str, int | str], ...]) -> Kernel:
    """The kernel `name` of kernels/cuda/`file`, compiled for a GPU with `macros` defined.

    Compiled once for each set of macros; CuPy keeps the result on disk, by the text of the source.
    """
    cupy = load_cupy()
    options = ("-std=c++17", *(f"-D{key}={value}" for key, value in macros))
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source(file), options=options)
        return Kernel(module.get_function(name).kernel)


def load_cupy() -> ModuleType:
    """CuPy, an optional extra. Raises ConfigError where it is not installed or does not load."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"a CUDA device needs CuPy, which does not load ({error}): "
            "install hicache[cuda12] or hicache[cuda13], see hicache doctor, or use device: cpu"
        ) from error
    module: ModuleType = cupy
    return module


@cache
def source(file: str) -> str:
    """Text of a .cu file with its .cuh files in their places, each once: so CuPy's key covers all of it."""
    seen: set[str] = set()

    def included(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _INCLUDE.sub(included, _read(match[1]))

    return _INCLUDE.sub(included, _read(file)).replace("#pragma once", "")


def _read(file: str) -> str:
    return (FOLDER / file).read_text()
