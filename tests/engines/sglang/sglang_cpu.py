"""SGLang's real cache on a machine without a GPU: what it imports and does not need here is replaced by stand-ins.

`load()` once, before anything of sglang is imported. Everything below sglang.srt.mem_cache and the cache controller
is SGLang's own, the Rust tree core too; only packages that are not installed, and a few modules that would import
half of them, are stand-ins: modules whose every attribute is a class that does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STAND_INS = (
    "sglang.srt.configs.model_config",
    "sglang.srt.constrained",
    "sglang.srt.layers.deep_gemm_wrapper",
    "sglang.srt.parser",
    "sglang.srt.utils.hf_transformers",
    "sglang.srt.utils.hf_transformers_utils",
)
EMPTY_PACKAGES = ("sglang", "sglang.srt.configs")
"""Their submodules are real, their __init__ is not run."""


class _Meta(type):
    """Attributes, subscripts and unions of a stand-in are stand-ins; called with a function it gives that back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return super().__call__()

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def _stand_in(name: str) -> Any:
    return _Meta(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            "__init_subclass__": classmethod(lambda cls, **kwargs: None),
            "__call__": lambda self, *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) else None,
        },
    )


class _StandInModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - as every package has it
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that were found missing, and for STAND_INS."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        replaced = any(fullname == name or fullname.startswith(name + ".") for name in STAND_INS)
        if replaced or fullname.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def load() -> None:
    """Make SGLang's cache importable. Slow the first time: each missing package is found by trying."""
    import torch

    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    torch.compile = lambda function=None, **kwargs: function if callable(function) else (lambda inner: inner)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).parent
    while True:
        _place_empty_packages(root)
        try:
            importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
            return
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "sglang") or package in finder.missing:
                raise
            finder.missing.add(package)
            for name in [name for name in sys.modules if name.startswith("sglang")]:
                del sys.modules[name]


def _place_empty_packages(root: Path) -> None:
    for name in EMPTY_PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__
        package.__version__ = "0.5.23"  # type: ignore[attr-defined]
        package.__getattr__ = _any_class  # type: ignore[method-assign]
        sys.modules[name] = package


def _any_class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _stand_in(name)
