"""Entries and ghosts by class and age bucket: they grow older without being looked at one by one."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from hicache.policies.lifetimes import BUCKETS, Lifetimes, age_of, bucket_of

T = TypeVar("T")


class Member(NamedTuple):
    """What is known of one of them: class, bucket, the volume when it was last used, size in bytes, hits."""

    kind: int
    bucket: int
    stamp: int
    size: int
    hits: int

    @property
    def cohort(self) -> int:
        return self.kind * BUCKETS + self.bucket


class Cohorts(Generic[T]):
    """Queues by class and bucket, of those used longest ago first. `filled` is told when one is not empty any more."""

    def __init__(self, lifetimes: Lifetimes, filled: Callable[[int], None] = lambda cohort: None) -> None:
        self._lifetimes = lifetimes
        self._filled = filled
        self._members: OrderedDict[T, Member] = OrderedDict()
        self._queues: dict[int, OrderedDict[T, None]] = {}
        self._due: list[tuple[int, int]] = []  # when the head of a queue changes its bucket, by volume; and its cohort
        self.size = 0

    def put(self, key: T, kind: int, stamp: int, size: int, hits: int, now: int) -> None:
        member = Member(kind, bucket_of(now - stamp), stamp, size, hits)
        self._lifetimes.expose(kind, member.bucket, size)
        self._members[key] = member
        self.size += size
        self._join(key, member)

    def pop(self, key: T) -> Member | None:
        """Take one out; it counts as exposed in its bucket no more."""
        member = self._members.pop(key, None)
        if member is not None:
            self._lifetimes.expose(member.kind, member.bucket, -member.size)
            self.size -= member.size
            self._leave(key, member)
        return member

    def grow(self, now: int) -> None:
        """Let everything grow older, up to volume `now`."""
        while self._due and self._due[0][0] <= now:
            _, cohort = heapq.heappop(self._due)
            queue = self._queues.get(cohort)
            while queue:
                key = next(iter(queue))
                member = self._members[key]
                due = _due(member)
                if due > now:
                    heapq.heappush(self._due, (due, cohort))
                    break
                self._leave(key, member)
                older = bucket_of(now - member.stamp)
                for bucket in range(member.bucket + 1, older + 1):
                    self._lifetimes.expose(member.kind, bucket, member.size)
                member = self._members[key] = member._replace(bucket=older)
                self._join(key, member)

    def _join(self, key: T, member: Member) -> None:
        queue = self._queues.get(member.cohort)
        if queue is None:
            queue = self._queues[member.cohort] = OrderedDict()
            self._filled(member.cohort)
            if member.bucket < BUCKETS - 1:
                heapq.heappush(self._due, (_due(member), member.cohort))
        queue[key] = None

    def _leave(self, key: T, member: Member) -> None:
        queue = self._queues[member.cohort]
        del queue[key]
        if not queue:
            del self._queues[member.cohort]

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


def _due(member: Member) -> int:
    return member.stamp + age_of(member.bucket + 1)
