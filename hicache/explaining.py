"""Why a prefix is not found further than it is: for each tier where its match ends, and the one reason.

Tiers add up as they do for a request: the host's match goes on where the device's ends, storage's where the host's
ends. The reason of a tier is that of the first page it lacks: from the state of the tree where the page is there still,
else from the decision log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from hicache.decisions import Decision
from hicache.errors import StorageError
from hicache.hashing import Field, RequestNamespace, identity_seed, page_digests
from hicache.tiers import Tiers
from hicache.tree.node import Node
from hicache.tree.residency import FILLING
from hicache.types import DropReason, PrefixKey, Tier


class Reason(str, Enum):
    """Why a match ends where it does."""

    COMPLETE = "complete"  # all of it is there
    UNALIGNED = "page not aligned"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    NAMESPACE = "namespace differs"
    BELOW_THRESHOLD = "below threshold"
    LOAD_FAILED = "load failed"
    ON_ITS_WAY = "on its way"
    OUT_OF_SERVICE = "out of service"
    OLDER_THAN_LOG = "older than the log"


@dataclass(frozen=True)
class TierExplanation:
    """The first `tokens` tokens are on this tier or one above it; `at`: seconds of the cache's clock, if it is known
    when it happened."""

    tier: Tier
    tokens: int
    reason: Reason
    text: str
    at: float | None = None


@dataclass(frozen=True)
class Explanation:
    """Of a key of `tokens` tokens, at `now`; one entry for each tier that there is, the device first."""

    tokens: int
    now: float
    tiers: Sequence[TierExplanation]

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "now": self.now,
            "tiers": [
                {
                    "tier": tier.tier.name.lower(),
                    "match_tokens": tier.tokens,
                    "reason": tier.reason.value,
                    "text": tier.text,
                    "at": tier.at,
                }
                for tier in self.tiers
            ],
        }


class _Why(NamedTuple):
    reason: Reason
    text: str
    at: float | None = None


_THRESHOLDS = {
    DropReason.WRITE_POLICY.value: "hit too rarely for a host copy (write_through_selective)",
    DropReason.NOT_ADMITTED.value: "not admitted to storage",
    "declined": "a prefetch left it, it is sooner computed than read",
}

_NOT_LOADED = _Why(Reason.NEVER_STORED, "it came to the host from storage and was not loaded yet")

_FETCHES = {
    "error": "the prefetch failed",
    "cut_short": "the prefetch was cut short by its deadline",
    "no_room": "there was no room on the host for the prefetch",
    "queue_full": "the load queue was full",
    "short": "the prefetch read fewer pages than it had found",
}


def explain(tiers: Tiers, key: PrefixKey) -> Explanation:
    """Looks, and changes nothing. Asks the store which pages it has, which may wait for it."""
    return _Explainer(tiers, key).explain()


class _Explainer:
    def __init__(self, tiers: Tiers, key: PrefixKey) -> None:
        self._tiers = tiers
        self._key = key
        self._page = tiers.tree.page_size
        self._path, self._matched = _walk(tiers, key)

    def explain(self) -> Explanation:
        found = [self._device()]
        if self._tiers.host is not None:
            found.append(self._host())
        if self._tiers.storage is not None:
            found.append(self._storage())
        return Explanation(len(self._key), self._tiers.decisions.clock(), found)

    # ---- tiers ------------------------------------------------------------------------------

    def _device(self) -> TierExplanation:
        end = 0
        for node, tokens in self._path:
            if node.residency[Tier.DEVICE] is FILLING:
                return _end(Tier.DEVICE, end, _Why(Reason.ON_ITS_WAY, "on its way from the host"))
            if not node.residency.on_device:
                return _end(Tier.DEVICE, end, self._known(Tier.DEVICE, end) or _NOT_LOADED)
            end += tokens
        return _end(
            Tier.DEVICE, end, self._whole(end) or self._known(Tier.DEVICE, end) or self._unknown(Tier.DEVICE, end)
        )

    def _host(self) -> TierExplanation:
        host, end = self._tiers.host, self._matched
        assert host is not None
        why = self._whole(end)
        if why is None and host.degraded:
            why = _Why(Reason.OUT_OF_SERVICE, "the host tier is off, copies have failed; it is tried again by itself")
        return _end(
            Tier.HOST, end, why or self._known(Tier.HOST, end) or self._passed(end) or self._unknown(Tier.HOST, end)
        )

    def _passed(self, end: int) -> _Why | None:
        """Why a page that was on the device got no host copy when it left."""
        decision = self._tiers.decisions.last(self._key, Tier.DEVICE, end)
        if decision is None or decision.verb != "left" or decision.demoted:
            return None
        if decision.why in _THRESHOLDS:
            return _Why(Reason.BELOW_THRESHOLD, _THRESHOLDS[decision.why], decision.at)
        return _Why(Reason.NEVER_STORED, f"discarded from the device without a host copy: {decision.why}", decision.at)

    def _storage(self) -> TierExplanation:
        storage, end = self._tiers.storage, self._matched
        assert storage is not None
        whole = self._whole(end)
        if whole is not None:
            return _end(Tier.STORAGE, end, whole)
        if not storage.engine.takes_loads:
            return _end(Tier.STORAGE, end, _Why(Reason.OUT_OF_SERVICE, "storage is off after failed loads"))
        try:
            stored = self._stored(self._key) * self._page
        except StorageError as error:
            return _end(Tier.STORAGE, end, _Why(Reason.LOAD_FAILED, f"the store could not be asked: {error}"))
        decision = self._tiers.decisions.last(self._key, Tier.STORAGE, end)
        left = self._tiers.decisions.last(self._key, Tier.HOST, end)
        if left is not None and decision is not None and decision.number < left.number:
            decision = None  # it was before the pages went to storage
        if stored and decision is not None and (failed := _failed_fetch(decision, stored)):
            return _end(Tier.STORAGE, end, failed)
        end += stored
        why = self._whole(end) or self._unstored(end) or self._unknown(Tier.STORAGE, end)
        return _end(Tier.STORAGE, end, why)

    def _unstored(self, end: int) -> _Why | None:
        """Why the store lacks a page: it did not come so far, or has left."""
        decisions = self._tiers.decisions
        left = decisions.last(self._key, Tier.HOST, end)
        if left is not None and left.verb == "left":
            if left.why == DropReason.FLUSHED.value:
                return _Why(Reason.FLUSHED, f"flushed at {_time(left.at)}", left.at)
            if left.demoted:
                text = f"from storage{self._by(Tier.STORAGE)}, after {_time(left.at)} when it left the host for there"
                return _Why(Reason.EVICTED, text, left.at)
            if left.why in _THRESHOLDS:
                return _Why(Reason.BELOW_THRESHOLD, self._threshold(left.why), left.at)
            return _Why(Reason.NEVER_STORED, f"discarded from the host without being stored: {left.why}", left.at)
        gone = decisions.last(self._key, Tier.DEVICE, end)
        if gone is not None and gone.verb == "left" and not gone.demoted:
            return _Why(Reason.NEVER_STORED, f"discarded from the device without a lower copy: {gone.why}", gone.at)
        return None

    def _threshold(self, why: str) -> str:
        storage = self._tiers.storage
        assert storage is not None
        rule = storage.admission
        least = f"min_priority {rule.min_priority}" if rule.mode == "priority" else f"min_hits {rule.min_hits}"
        return f"{_THRESHOLDS[why]}: admission {rule.mode}, {least}"

    # ---- reasons ----------------------------------------------------------------------------

    def _whole(self, end: int) -> _Why | None:
        """If nothing is missing but what is no page."""
        rest = len(self._key) - end
        if not rest:
            return _Why(Reason.COMPLETE, "all of it is here or above")
        if rest >= self._page:
            return None
        return _Why(Reason.UNALIGNED, f"only whole pages are shared: the last {rest} tokens are less than {self._page}")

    def _known(self, tier: Tier, end: int) -> _Why | None:
        """What the log says of the page at `end`."""
        decision = self._tiers.decisions.last(self._key, tier, end)
        if decision is None:
            return None
        if decision.verb == "failed":
            return _Why(Reason.LOAD_FAILED, f"the copy from the host failed at {_time(decision.at)}", decision.at)
        if decision.why == DropReason.FLUSHED.value:
            return _Why(Reason.FLUSHED, f"flushed at {_time(decision.at)}", decision.at)
        how = "" if decision.demoted else f", discarded: {decision.why}"
        text = f"from {tier.name.lower()}{self._by(tier)} at {_time(decision.at)}{how}"
        return _Why(Reason.EVICTED, text, decision.at)

    def _by(self, tier: Tier) -> str:
        policy = self._tiers.eviction.get(tier.name.lower())
        return f" by {policy}" if policy is not None else ""

    def _unknown(self, tier: Tier, end: int) -> _Why:
        """Nothing is known of this page: it may be there under another name, or it never was."""
        fields = self._other_namespace(tier, end)
        if fields:
            text = f"the same tokens are here for another {' and '.join(fields)}"
            return _Why(Reason.NAMESPACE, text)
        if tier is Tier.STORAGE and (text := self._other_identity(end)):
            return _Why(Reason.NAMESPACE, text)
        log = self._tiers.decisions
        if not log.size:
            return _Why(Reason.OLDER_THAN_LOG, "never stored, or gone: no decisions are kept (decision_log: 0)")
        if log.since is not None:
            return _Why(Reason.OLDER_THAN_LOG, f"never stored, or gone before the log begins at {_time(log.since)}")
        return _Why(Reason.NEVER_STORED, "nobody has computed it yet")

    def _other_namespace(self, tier: Tier, end: int) -> list[str]:
        for namespace in self._tiers.tree.roots:
            other = PrefixKey(self._key.data, namespace)
            if namespace == self._key.namespace:
                continue
            path, matched = _walk(self._tiers, other)
            if tier is Tier.DEVICE:
                matched = sum(tokens for node, tokens in _leading_device(path))
            elif tier is Tier.STORAGE:
                matched = max(matched, self._stored(other, 0) * self._page)
            if matched > end:
                return _differences(self._key.namespace, namespace)
        return []

    def _other_identity(self, end: int) -> str:
        """In what the identity differs for which the store has more of these tokens; the one that differs least."""
        storage, mine = self._tiers.storage, self._tiers.identity
        assert storage is not None

        def keys_of(fields: Mapping[str, Field]) -> list[bytes]:
            page = _page_of(fields)
            return page_digests(identity_seed(fields, self._key.namespace), self._key.data, page) if page else []

        others = storage.engine.backend.neighbours(keys_of)
        having = [fields for fields, leading in others if leading * _page_of(fields) > end]
        if not having:
            return ""
        nearest = min(having, key=lambda fields: len(mine.differences(fields)))
        here = mine.flat()
        changes = (f"{name} {nearest.get(name)!r}, not {here.get(name)!r}" for name in mine.differences(nearest))
        return "the store has the same tokens for " + ", ".join(changes)

    def _stored(self, key: PrefixKey, first: int | None = None) -> int:
        """Pages that the store has of `key`, from page `first` on; from the end of the match if that is None."""
        storage = self._tiers.storage
        assert storage is not None
        digests = page_digests(self._tiers.seed(key.namespace), key.data, self._page)
        first = self._matched // self._page if first is None else first
        return storage.engine.backend.contains_prefix(digests[first:]) if digests[first:] else 0


def _walk(tiers: Tiers, key: PrefixKey) -> tuple[list[tuple[Node, int]], int]:
    """Nodes along `key` with the tokens of each that match, in whole pages, and all of them. Touches nothing."""
    tree = tiers.tree
    node = tree.roots.get(key.namespace)
    end = len(key.data) // tree.page_bytes * tree.page_bytes
    path: list[tuple[Node, int]] = []
    at = 0
    while node is not None and at < end:
        child = node.child(key.data[at : at + tree.page_bytes])
        if child is None or (tiers.usable_host is None and not child.residency.on_device):
            break
        same = _same_bytes(child.key, key.data[at:end], tree.page_bytes)
        path.append((child, same // (tree.page_bytes // tree.page_size)))
        at += same
        node = child if same == len(child.key) else None
    return path, at // (tree.page_bytes // tree.page_size)


def _same_bytes(have: bytes, data: bytes, page_bytes: int) -> int:
    """Bytes in whole pages that both begin with."""
    if data.startswith(have):
        return len(have)
    same = 0
    while have[same : same + page_bytes] == data[same : same + page_bytes] and same + page_bytes <= len(data):
        same += page_bytes
    return same


def _leading_device(path: Sequence[tuple[Node, int]]) -> Iterator[tuple[Node, int]]:
    for node, tokens in path:
        if not node.residency.on_device:
            return
        yield node, tokens


def _failed_fetch(decision: Decision, stored: int) -> _Why | None:
    """A prefetch that left pages that are there."""
    there = f"{stored:,} more tokens are stored"
    if decision.verb != "fetched":
        return None
    if decision.why in _THRESHOLDS:
        return _Why(Reason.BELOW_THRESHOLD, f"{there}; {_THRESHOLDS[decision.why]}", decision.at)
    if decision.why == "miss":
        text = f"{there}; the prefetch at {_time(decision.at)} found fewer pages than prefetch.min_pages"
        return _Why(Reason.BELOW_THRESHOLD, text, decision.at)
    if decision.why not in _FETCHES:
        return None
    return _Why(Reason.LOAD_FAILED, f"{there}; {_FETCHES[decision.why]} at {_time(decision.at)}", decision.at)


def _differences(mine: bytes, other: bytes) -> list[str]:
    try:
        return RequestNamespace.decode(mine).differences(RequestNamespace.decode(other))
    except ValueError:  # a caller's own encoding
        return ["namespace"]


def _page_of(fields: Mapping[str, Field]) -> int:
    """Tokens of a page of a store's identity; 0 if it does not tell."""
    size = fields.get("layout.page_size")
    return size if isinstance(size, int) else 0


def _end(tier: Tier, tokens: int, why: _Why) -> TierExplanation:
    return TierExplanation(tier, tokens, why.reason, why.text, why.at)


def _time(seconds: float) -> str:
    return f"{seconds:,.3f} s"
