"""Versions, and the optional packages by extra."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from hicache import __version__
from hicache.observability.doctor.facts import TorchFacts
from hicache.observability.doctor.finding import Finding, dotted
from hicache.observability.doctor.readers import installed

EXTRAS = {
    "codecs": ("lz4", "zstandard"),
    "compiled": ("numba",),
    "serve": ("starlette", "uvicorn"),
    "serving": ("gguf", "safetensors", "tokenizers"),
    "transformers": ("transformers",),
}
"""Distributions that each extra adds. CuPy has checks of its own."""


def check_versions(torch: TorchFacts) -> Iterator[Finding]:
    yield Finding("software", "Python", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("software", "hicache", __version__)
    yield check_torch(torch)


def check_torch(torch: TorchFacts) -> Finding:
    if not torch.version:
        mend = "pip install --force-reinstall torch"
        return Finding("software", "torch", f"does not import: {torch.error}", "broken", mend)
    build = f"built for CUDA {dotted(torch.cuda)}" if torch.cuda else "built without CUDA"
    return Finding("software", "torch", f"{torch.version}, {build}")


def check_extras(version_of: Callable[[str], str] = installed) -> Iterator[Finding]:
    for extra, distributions in EXTRAS.items():
        versions = {name: version_of(name) for name in distributions}
        value = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
        if all(versions.values()):
            yield Finding("extras", extra, value)
        else:
            yield Finding("extras", extra, value, "missing", f"pip install 'hicache[{extra}]'")
