from __future__ import annotations

import pytest

from hicache.config import parse_config
from hicache.decisions import DecisionLog
from hicache.hashing import RequestNamespace, decode_fields, encode_fields
from hicache.testing.rig import Rig, RigOptions
from hicache.tree.node import Node
from hicache.types import DropReason, PrefixKey, Tier


def chain(*keys: list[int], namespace: bytes = b"") -> list[Node]:
    """Nodes below each other."""
    nodes = [Node(None, namespace, 0)]
    for key in keys:
        data = PrefixKey.of(key).data
        nodes.append(Node(nodes[-1], data, 0, nodes[-1].start + len(nodes[-1].key) // 4 if nodes[-1].parent else 0))
    return nodes[1:]


def test_a_decision_is_found_for_every_page_that_it_covers() -> None:
    log = DecisionLog(10, 2, lambda: 5.0)
    upper, lower = chain([1, 2], [3, 4, 5, 6])
    log.left(lower, Tier.DEVICE, DropReason.HOST_FULL)
    key = PrefixKey.of([1, 2, 3, 4, 5, 6, 7, 8])
    assert [log.last(key, Tier.DEVICE, token) is not None for token in (0, 2, 4, 6)] == [False, True, True, False]
    found = log.last(key, Tier.DEVICE, 4)
    assert found is not None and (found.why, found.at, found.start, found.stop) == ("host_full", 5.0, 2, 6)
    assert log.last(key, Tier.HOST, 4) is None
    assert log.last(PrefixKey.of([9, 2, 3, 4, 5, 6]), Tier.DEVICE, 4) is None, "another prefix"
    assert log.last(PrefixKey(key.data, b"x"), Tier.DEVICE, 4) is None, "another namespace"
    assert upper.start == 0


def test_the_latest_counts_wherever_it_begins() -> None:
    log = DecisionLog(10, 2, lambda: 5.0)
    lower = chain([1, 2], [3, 4])[1]
    whole = chain([1, 2, 3, 4])[0]
    key = PrefixKey.of([1, 2, 3, 4])
    log.left(lower, Tier.DEVICE, DropReason.HOST_FULL)
    log.left(whole, Tier.DEVICE, DropReason.FLUSHED)
    found = log.last(key, Tier.DEVICE, 2)
    assert found is not None and found.why == "flushed"
    log.left(lower, Tier.DEVICE, DropReason.HOST_FULL)
    found = log.last(key, Tier.DEVICE, 2)
    assert found is not None and found.why == "host_full"


def test_the_oldest_falls_out_and_the_log_knows_since_when_it_is_complete() -> None:
    now = [0.0]
    log = DecisionLog(2, 2, lambda: now[0])
    keys = [[10 * at, 10 * at + 1] for at in range(4)]
    for at, key in enumerate(keys):
        now[0] = float(at)
        log.left(chain(key)[0], Tier.HOST, DropReason.NO_LOWER_TIER)
        assert log.since == (None if at < 2 else float(at - 2))
    found = [log.last(PrefixKey.of(key), Tier.HOST, 0) for key in keys]
    assert [decision is not None for decision in found] == [False, False, True, True]
    assert len(log) == 2


def test_a_log_of_no_size_keeps_nothing() -> None:
    log = DecisionLog()
    (node,) = chain([1])
    log.left(node, Tier.DEVICE, DropReason.FLUSHED)
    log.load_failed([node])
    log.fetched(PrefixKey.of([1]), 0, "error")
    assert len(log) == 0 and log.last(PrefixKey.of([1]), Tier.DEVICE, 0) is None


def test_whoever_watches_a_request_hears_of_it_before_it_is_let_in() -> None:
    rig = Rig(RigOptions())
    heard: list[int] = []
    rig.tiers.decisions.watch("wanted", lambda: heard.append(rig.cache.why(PrefixKey.of([1, 2])).tiers[0].tokens))
    for rid in ("other", "wanted", "wanted"):
        rig.serve([1, 2, 3, 4], rid=rid)
    assert heard == [2, 2]


def test_the_size_is_in_the_configuration() -> None:
    text = "model: {name: Qwen/Qwen3-8B}\ntiers: [{tier: device, size: 1GiB}]\n"
    assert parse_config(text).decision_log == 0
    assert parse_config("decision_log: 500\n" + text).decision_log == 500


@pytest.mark.parametrize(
    "namespace", [RequestNamespace(), RequestNamespace("a"), RequestNamespace("", None, "é" * 300)]
)
def test_a_namespace_is_read_back(namespace: RequestNamespace) -> None:
    assert RequestNamespace.decode(namespace.encode()) == namespace


def test_the_fields_that_differ() -> None:
    one, other = RequestNamespace("a", "b", None), RequestNamespace("a", "c", "")
    assert one.differences(other) == ["adapter", "extra_key"]


def test_other_bytes_are_no_namespace() -> None:
    assert decode_fields(encode_fields({"x": 7, "y": None})) == ["x", 7, "y", None]
    for data in (b"zzz", encode_fields({"x": 1}), b"s\x01"):
        with pytest.raises(ValueError, match="field"):
            RequestNamespace.decode(data)
