"""Names of pages on storage: a SHA-256 chain over whole pages, seeded with everything the bytes depend on.

    seed     = SHA-256(encode(store identity) ‖ encode(request namespace))
    digest_i = SHA-256(digest_{i-1} ‖ tokens of page i as uint32 little-endian),   digest_{-1} = seed

Fields are encoded typed and length-prefixed, so ("ab", "c") and ("a", "bc") differ, and an absent
field differs from an empty one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256

from hicache.layout import KVLayout
from hicache.types import TOKEN_BYTES

DIGEST_BYTES = 32
FORMAT_VERSION = 1

Field = str | int | None


def encode_fields(values: Mapping[str, Field]) -> bytes:
    """Unambiguous bytes of named optional fields, in the order of the dictionary."""
    return b"".join(_encode(name) + _encode(value) for name, value in values.items())


def _encode(value: Field) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + struct.pack("<q", value)
    raw = value.encode()
    return b"s" + struct.pack("<Q", len(raw)) + raw


def decode_fields(data: bytes) -> list[Field]:
    """Names and values, in turn, as `encode_fields` wrote them. Raises ValueError for bytes that it did not write."""
    found: list[Field] = []
    at = 0
    while at < len(data):
        kind, at = data[at : at + 1], at + 1
        if kind == b"n":
            found.append(None)
            continue
        form = {b"i": "<q", b"s": "<Q"}.get(kind)
        if form is None or len(data) < at + 8:
            raise ValueError(f"byte {at - 1} does not begin a field")
        number, at = int(struct.unpack_from(form, data, at)[0]), at + 8
        if kind == b"i":
            found.append(number)
        else:
            found.append(data[at : at + number].decode())
            at += number
    return found


@dataclass(frozen=True)
class RequestNamespace:
    """What separates requests that run on the same model: nothing is shared between two of these."""

    salt: str | None = None
    adapter: str | None = None
    extra_key: str | None = None

    def encode(self) -> bytes:
        """b"" for the default namespace; else an encoding that no other namespace has."""
        if self == RequestNamespace():
            return b""
        return encode_fields(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> RequestNamespace:
        """The namespace that `encode` made. Raises ValueError for other bytes."""
        found = decode_fields(data)
        if found[::2] not in ([], [field.name for field in fields(cls)]):
            raise ValueError("these are not the fields of a namespace")
        return cls(*(None if value is None else str(value) for value in found[1::2]))

    def differences(self, other: RequestNamespace) -> list[str]:
        """Names of the fields that differ."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


@dataclass(frozen=True)
class StoreIdentity:
    """Everything the bytes of a stored page depend on besides its tokens.

    A page is readable only by a run whose identity is equal in every field. `codec` is how stored bytes
    are encoded; `tenant` separates users who must not share pages.
    """

    layout: KVLayout
    model: str
    revision: str | None = None
    weights_digest: str | None = None
    tokenizer_digest: str | None = None
    first_layer: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attention_backend: str | None = None
    rope_scaling: str | None = None
    tenant: str | None = None
    codec: str = "none"
    format_version: int = FORMAT_VERSION

    def flat(self) -> dict[str, Field]:
        """All fields by name, the layout's too."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layout"}
        return {**own, **{f"layout.{name}": value for name, value in asdict(self.layout).items()}}

    def differences(self, other: Mapping[str, Field]) -> list[str]:
        """Names of the fields in which `other` (as given by `flat`) is not this identity."""
        return field_differences(self.flat(), other)

    def seed(self, namespace: bytes = b"") -> bytes:
        """Start of the digest chain of one namespace, 32 bytes."""
        return identity_seed(self.flat(), namespace)


def field_differences(mine: Mapping[str, Field], other: Mapping[str, Field]) -> list[str]:
    """Names of the fields in which two identities, as given by `StoreIdentity.flat`, differ."""
    return sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))


def identity_seed(identity: Mapping[str, Field], namespace: bytes) -> bytes:
    """`StoreIdentity.seed` of an identity of which only the fields are at hand, in the order of `flat`."""
    encoded = encode_fields(identity)
    return sha256(struct.pack("<Q", len(encoded)) + encoded + namespace).digest()


def digests_in(joined: bytes) -> list[bytes]:
    """The digests of which `joined` is made."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def page_digests(parent: bytes, tokens: bytes, page_size: int) -> list[bytes]:
    """Digests of the whole pages in `tokens` (int32 bytes), continuing the chain after `parent`."""
    step = page_size * TOKEN_BYTES
    digests = []
    for start in range(0, len(tokens) - step + 1, step):
        parent = sha256(parent + tokens[start : start + step]).digest()
        digests.append(parent)
    return digests
