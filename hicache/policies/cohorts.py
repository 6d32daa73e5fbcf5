"""Entries and ghosts by class and age bucket: they grow older without being looked at one by one."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from hicache.policies.lifetimes import BUCKETS, Lifetimes, age_of, bucket_of

T = TypeVar("T")

_AGES = [age_of(bucket) for bucket in range(BUCKETS)]


class Member:
    """What is known of one of them: class, the volume when it was last used, size in bytes, hits, and its cohort:
    class and bucket as one number, the last one once it was taken out."""

    __slots__ = ("cohort", "hits", "kind", "size", "stamp")

    def __init__(self, kind: int, stamp: int, size: int, hits: int, cohort: int) -> None:
        self.kind, self.stamp, self.size, self.hits, self.cohort = kind, stamp, size, hits, cohort

    @property
    def bucket(self) -> int:
        return self.cohort % BUCKETS


class Cohorts(Generic[T]):
    """Queues by class and bucket, in the order in which they came. `filled` is told when one is not empty any more."""

    def __init__(self, lifetimes: Lifetimes, filled: Callable[[int], None] = lambda cohort: None) -> None:
        self._exposed = lifetimes.exposed
        self._filled = filled
        self._members: OrderedDict[T, Member] = OrderedDict()
        self._queues: dict[int, OrderedDict[T, Member]] = {}
        self._due: list[tuple[int, int]] = []  # when the head of a queue changes its bucket, by volume; and its cohort
        self.size = 0

    def put(self, key: T, kind: int, stamp: int, size: int, hits: int, now: int) -> None:
        cohort = kind * BUCKETS + bucket_of(now - stamp)
        member = self._members[key] = Member(kind, stamp, size, hits, cohort)
        self._exposed[cohort] += size
        self.size += size
        self._join(key, member)

    def pop(self, key: T) -> Member | None:
        """Take one out; it counts as exposed in its bucket no more."""
        member = self._members.pop(key, None)
        if member is None:
            return None
        cohort = member.cohort
        self._exposed[cohort] -= member.size
        self.size -= member.size
        queue = self._queues[cohort]
        del queue[key]
        if not queue:
            del self._queues[cohort]
        return member

    def grow(self, now: int) -> None:
        """Let everything grow older, up to volume `now`."""
        while self._due and self._due[0][0] <= now:
            _, cohort = heapq.heappop(self._due)
            queue = self._queues.get(cohort)
            if queue is not None:
                self._grow(queue, cohort, now)

    def _grow(self, queue: OrderedDict[T, Member], cohort: int, now: int) -> None:
        """Move on the members at the head of a queue that are too old for it."""
        exposed, bucket = self._exposed, cohort % BUCKETS
        width = _AGES[bucket + 1]
        while queue:
            key, member = next(iter(queue.items()))
            if member.stamp + width > now:
                heapq.heappush(self._due, (member.stamp + width, cohort))
                return
            del queue[key]
            age, size, at = now - member.stamp, member.size, bucket
            while at + 1 < BUCKETS and _AGES[at + 1] <= age:
                at += 1
                exposed[member.kind * BUCKETS + at] += size
            member.cohort = member.kind * BUCKETS + at
            self._join(key, member)
        del self._queues[cohort]

    def _join(self, key: T, member: Member) -> None:
        cohort = member.cohort
        queue = self._queues.get(cohort)
        if queue is None:
            queue = self._queues[cohort] = OrderedDict()
            self._filled(cohort)
            bucket = cohort % BUCKETS
            if bucket < BUCKETS - 1:
                heapq.heappush(self._due, (member.stamp + _AGES[bucket + 1], cohort))
        queue[key] = member

    def head(self, cohort: int) -> T | None:
        queue = self._queues.get(cohort)
        return next(iter(queue)) if queue else None

    def oldest(self) -> T | None:
        """The one that was put in first."""
        return next(iter(self._members), None)

    @property
    def cohorts(self) -> list[int]:
        """Those that are not empty."""
        return list(self._queues)

    def get(self, key: T) -> Member | None:
        return self._members.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __len__(self) -> int:
        return len(self._members)
