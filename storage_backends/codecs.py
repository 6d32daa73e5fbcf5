"""Page codecs: how a page is put into fewer bytes before it goes to disk. Codecs by name: `create_codec`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.layout import HostFormat, KVLayout

if TYPE_CHECKING:  # they import this module
    from hicache.storage_backends.codecs_quantised import QuantisedCodec

CODECS: tuple[str, ...] = ("none", "zstd", "lz4", "fp8", "int8")
"""Names of the codecs. The name is part of a store's identity: a page is read with the codec that wrote it."""

LOSSY_CODECS = ("fp8", "int8")
"""Those that do not give back every bit."""


class Codec(ABC):
    """Encodes the pages of one layout. Any number of threads may encode and decode with one object at once.

    `name` is one of CODECS. `exact`: decode(encode(page)) equals page bit for bit. `slot_bytes`: sizes, ascending
    and multiples of 4096, of the slots that encoded pages are put in; every encoded page fits the last one.
    """

    name: str
    exact: bool
    slot_bytes: tuple[int, ...]

    @abstractmethod
    def encode(self, page: memoryview, out: memoryview) -> int:
        """Encode page[:page_bytes] into `out`, which is writable and has at least slot_bytes[-1] bytes.

        Returns the length of the encoded page in bytes; what `out` holds beyond it is not touched. `page` and
        `out` are contiguous and do not overlap.
        """

    @abstractmethod
    def decode(self, data: memoryview, page: memoryview) -> None:
        """Fill page[:page_bytes] from `data`: the encoded page, as many bytes as `encode` returned.

        Raises StoreCorruptError if `data` is not what `encode` makes; then page[:page_bytes] holds garbage.
        Damage that leaves the form intact is not noticed: that is the checksum's work.
        """


def create_codec(name: str, layout: KVLayout) -> Codec | None:
    """The codec `name` for pages of `layout`; None for "none": pages are stored as they are.

    Raises ConfigError if the name is unknown, if a package that the codec needs is not installed, or if the
    codec quantises to one byte and the layout's dtype has no more than that.
    """
    if name not in CODECS:
        close = get_close_matches(name, CODECS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(CODECS)}"
        raise ConfigError(f"codec {name!r} is not known, {hint}")
    if name == "none":
        return None
    if name in ("zstd", "lz4"):
        return _create_lossless(name, layout)
    return create_quantiser(name, layout)


def create_quantiser(name: str, layout: KVLayout) -> QuantisedCodec:
    """The codec "fp8" or "int8". Raises ConfigError if the layout's values have one byte already."""
    from hicache.storage_backends.codecs_quantised import Fp8Codec, Int8Codec

    return {"fp8": Fp8Codec, "int8": Int8Codec}[name](layout)


def quantiser_of(form: HostFormat) -> QuantisedCodec | None:
    """The codec of host pages; None if they are as the device has them."""
    return create_quantiser(form.codec, form.layout) if form.quantised else None


def _create_lossless(name: str, layout: KVLayout) -> Codec:
    from hicache.storage_backends.codecs_lossless import Lz4Codec, ZstdCodec

    try:
        return ZstdCodec(layout) if name == "zstd" else Lz4Codec(layout)
    except ImportError as error:
        package = "zstandard" if name == "zstd" else "lz4"
        raise ConfigError(f"codec {name!r} needs the package {package}: pip install 'hicache[codecs]'") from error
