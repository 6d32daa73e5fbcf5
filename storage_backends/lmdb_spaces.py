"""Namespaces of a store by the identities that they are for."""

from __future__ import annotations

from collections.abc import Mapping

from hicache.hashing import Field, field_differences
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_loss import loss_by_quota, refuse_quota
from hicache.storage_backends.lmdb_schema import Space


def space_of(view: IndexView, label: Mapping[str, Field]) -> int | None:
    """The number of the namespace with this identity; None if there is none."""
    return next((number for number, each in view.labels().items() if each == label), None)


def join_space(index: IndexWriter, label: Mapping[str, Field], rules: Space, shrink: bool) -> tuple[int, bool]:
    """The number of the namespace with this identity, and whether it had to be begun; it gets the rules of `rules`.

    Raises ConfigError if pages would have to go for its quota and `shrink` is False.
    """
    number = space_of(index, label)
    begun = number is None
    if number is None:
        known = index.labels().keys()
        number = min(set(range(1, len(known) + 2)) - known)
        index.name_space(number, label)
    space = index.space(number)
    if not shrink and (loss := loss_by_quota(space, rules.quota)):
        raise refuse_quota(loss, rules.quota)
    space.policy, space.quota, space.ttl_us = rules.policy, rules.quota, rules.ttl_us
    return number, begun


def closest(view: IndexView, number: int, label: Mapping[str, Field]) -> str:
    """Which namespace differs least, and in what: why there is no hit where one was expected."""
    others = {other: each for other, each in view.labels().items() if other != number}
    if not others:
        return ""
    differences = {other: field_differences(label, each) for other, each in others.items()}
    nearest = min(differences, key=lambda other: len(differences[other]))
    there = others[nearest]
    fields = ", ".join(
        f"{name} is {label.get(name)!r} here and {there.get(name)!r} there" for name in differences[nearest][:4]
    )
    return f"the nearest of {len(others)} others is namespace {nearest}: {fields}"
