"""Names of stored pages: unambiguous, chained, and different for every field that the bytes depend on."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.hashing import DIGEST_BYTES, Field, RequestNamespace, StoreIdentity, encode_fields, page_digests
from hicache.layout import KVLayout

TEXT = st.text(st.sampled_from("abns\x00"), max_size=4)
VALUES = st.none() | TEXT | st.integers(-(2**63), 2**63 - 1)
NAMESPACES = st.builds(RequestNamespace, st.none() | TEXT, st.none() | TEXT, st.none() | TEXT)
IDENTITY = StoreIdentity(KVLayout(2, 2, 4, 8), "model", revision="r1")


@given(st.dictionaries(TEXT, VALUES, max_size=3), st.dictionaries(TEXT, VALUES, max_size=3))
def test_two_encodings_are_equal_only_for_equal_fields(one: dict[str, Field], other: dict[str, Field]) -> None:
    same = list(one.items()) == list(other.items())
    assert (encode_fields(one) == encode_fields(other)) == same


@given(NAMESPACES, NAMESPACES)
def test_two_namespaces_are_equal_only_field_by_field(one: RequestNamespace, other: RequestNamespace) -> None:
    assert (one.encode() == other.encode()) == (one == other)


def test_namespaces_that_look_alike_differ() -> None:
    alike = [
        RequestNamespace(),
        RequestNamespace(salt=""),
        RequestNamespace(adapter=""),
        RequestNamespace(extra_key=""),
        RequestNamespace(salt="X"),
        RequestNamespace(adapter="X"),
        RequestNamespace(extra_key="X"),
        RequestNamespace("ab", "c"),
        RequestNamespace("a", "bc"),
        RequestNamespace("abc", ""),
        RequestNamespace("abc"),
    ]
    assert len({namespace.encode() for namespace in alike}) == len(alike)
    assert len({IDENTITY.seed(namespace.encode()) for namespace in alike}) == len(alike)
    assert RequestNamespace().encode() == b""


def test_the_encoding_is_typed() -> None:
    number = struct.unpack("<q", b"12345678")[0]
    values: list[Field] = [None, "", "n", 0, "0", 1, "1", number, "12345678"]
    assert len({encode_fields({"f": value}) for value in values}) == len(values)


def test_the_encoding_is_the_documented_one() -> None:
    assert encode_fields({"a": "é", "b": 7, "c": None}) == (
        b"s\x01\0\0\0\0\0\0\0a" + b"s\x02\0\0\0\0\0\0\0\xc3\xa9"
        b"s\x01\0\0\0\0\0\0\0b" + b"i\x07\0\0\0\0\0\0\0"
        b"s\x01\0\0\0\0\0\0\0c" + b"n"
    )


CHANGES: dict[str, list[StoreIdentity]] = {
    "layout": [
        replace(IDENTITY, layout=replace(IDENTITY.layout, **change))
        for change in (
            {"num_layers": 3},
            {"num_kv_heads": 1},
            {"head_dim": 8},
            {"page_size": 16},
            {"dtype": "bfloat16"},
            {"kind": "mla", "num_kv_heads": 1},
        )
    ],
    "model": [replace(IDENTITY, model="model2")],
    "revision": [replace(IDENTITY, revision=None), replace(IDENTITY, revision="")],
    "weights_digest": [replace(IDENTITY, weights_digest="r1"), replace(IDENTITY, weights_digest="")],
    "tokenizer_digest": [replace(IDENTITY, tokenizer_digest="r1"), replace(IDENTITY, tokenizer_digest="")],
    "first_layer": [replace(IDENTITY, first_layer=2)],
    "tp_rank": [replace(IDENTITY, tp_rank=1)],
    "tp_size": [replace(IDENTITY, tp_size=2)],
    "pp_rank": [replace(IDENTITY, pp_rank=1)],
    "pp_size": [replace(IDENTITY, pp_size=2)],
    "attention_backend": [replace(IDENTITY, attention_backend="r1"), replace(IDENTITY, attention_backend="")],
    "rope_scaling": [replace(IDENTITY, rope_scaling="r1"), replace(IDENTITY, rope_scaling="")],
    "tenant": [replace(IDENTITY, tenant="r1"), replace(IDENTITY, tenant="")],
    "codec": [replace(IDENTITY, codec="zstd")],
    "format_version": [replace(IDENTITY, format_version=IDENTITY.format_version + 1)],
}


def test_every_field_of_the_identity_changes_the_seed() -> None:
    assert set(CHANGES) == {field.name for field in fields(StoreIdentity)}, "a field has no test"
    identities = [IDENTITY, *(changed for variants in CHANGES.values() for changed in variants)]
    assert len({identity.seed() for identity in identities}) == len(identities)
    assert len({identity.seed(b"tenant") for identity in identities}) == len(identities)


@pytest.mark.parametrize("name", CHANGES)
def test_differences_name_the_field(name: str) -> None:
    for changed in CHANGES[name]:
        different = IDENTITY.differences(changed.flat())
        assert different and all(field == name or field.startswith(f"{name}.") for field in different)
        assert different == changed.differences(IDENTITY.flat())
    assert IDENTITY.differences(IDENTITY.flat()) == []


def test_fields_of_another_format_are_differences() -> None:
    flat = {**IDENTITY.flat(), "new_field": 1}
    assert IDENTITY.differences(flat) == ["new_field"]
    del flat["new_field"], flat["model"]
    assert IDENTITY.differences(flat) == ["model"]


def test_the_seed_is_the_documented_one() -> None:
    identity = encode_fields(IDENTITY.flat())
    expected = sha256(len(identity).to_bytes(8, "little") + identity + b"ns").digest()
    assert IDENTITY.seed(b"ns") == expected
    assert len(expected) == DIGEST_BYTES


def test_the_chain_is_the_documented_one() -> None:
    seed = IDENTITY.seed()
    tokens = struct.pack("<5I", 1, 2, 3, 2**31 - 1, 5)
    first = sha256(seed + struct.pack("<2I", 1, 2)).digest()
    second = sha256(first + struct.pack("<2I", 3, 2**31 - 1)).digest()
    assert page_digests(seed, tokens, 2) == [first, second]
    assert page_digests(seed, tokens[:12], 2) == [first]
    assert page_digests(seed, tokens[:4], 2) == []


@given(st.binary(max_size=96), st.integers(1, 3), st.integers(0, 8))
def test_a_chain_can_be_continued_anywhere(data: bytes, page_size: int, cut: int) -> None:
    seed = IDENTITY.seed()
    whole = page_digests(seed, data, page_size)
    head = page_digests(seed, data[: cut * page_size * 4], page_size)
    tail = page_digests(head[-1] if head else seed, data[len(head) * page_size * 4 :], page_size)
    assert head + tail == whole
    assert len(whole) == len(data) // (4 * page_size)


def test_equal_pages_have_other_names_after_another_prefix() -> None:
    same = struct.pack("<I", 7)
    chains = [page_digests(IDENTITY.seed(), struct.pack("<I", first) + same, 1) for first in (1, 2)]
    repeated = page_digests(IDENTITY.seed(), same * 3, 1)
    assert chains[0][1] != chains[1][1]
    assert len(set(repeated)) == 3
