"""Pages that come from disk while their request waits.

    ASKED --hits--> FOUND --room--> READING --> ENDED
      '---none, error---'--- time is up ---------^

A request waits for at most the `prefetch.deadline` of the configuration, whatever the disk does. Pages are known to
the index once all ranks have read and verified them. Those of a request that still waits are pinned until its load
begins, and those of several requests together take at most half of the host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hicache.config.models import CacheConfig, Prefetch
from hicache.integrations.vllm.host_index import Entry, HostIndex
from hicache.integrations.vllm.jobs import Lookup, NamedPage, Read, StepPlan
from hicache.integrations.vllm.open_jobs import OpenJobs
from hicache.integrations.vllm.tracks import Track


@dataclass(eq=False)
class Fetch:
    """Blocks `first` .. `stop` of a request that the host does not have."""

    track: Track
    first: int
    stop: int
    hits: int = 0
    pages: list[int] = field(default_factory=list)
    job: int | None = None
    reading: bool = False
    ended: bool = False
    waited_for: bool = True  # by its request
    leader: Fetch | None = None  # another request's, that brings the same blocks


class Fetches:
    """All fetches. `arrived` is told of entries that are in the host index now, and of their request."""

    def __init__(
        self,
        index: HostIndex,
        jobs: OpenJobs,
        config: CacheConfig,
        clock: Callable[[], float],
        arrived: Callable[[Track, list[Entry]], None],
    ) -> None:
        self._block_size = config.page_size
        self._index = index
        self._jobs = jobs
        self._policy = config.storage.prefetch if config.storage is not None else Prefetch()
        self._clock = clock
        self._arrived = arrived
        self._leaders: dict[bytes, Fetch] = {}
        self._holding = 0  # pages that were fetched for requests and not claimed yet
        self._epoch = 0
        self.plan = StepPlan()
        """Where the jobs of the coming step go."""

    @property
    def min_pages(self) -> int:
        """Fewer are not worth asking for."""
        return self._policy.min_pages

    def begin(self, track: Track, hits: list[Entry], first: int, stop: int) -> None:
        """Look for blocks `first` .. `stop` on disk. `hits` are the host entries before them, kept meanwhile."""
        fetch = track.fetch = Fetch(track, first, stop)
        if track.waiting_since is None:
            track.waiting_since = self._clock()
        key = track.keys()[first]
        leader = self._leaders.get(key)
        if leader is not None:
            fetch.leader = leader
            return
        self.hold(track, hits)
        self._leaders[key] = fetch
        fetch.job = self._jobs.begin(partial(self._looked, fetch))
        self.plan.lookups.append(Lookup(fetch.job, track.keys()[first:stop]))

    def hold(self, track: Track, entries: list[Entry]) -> None:
        for entry in entries:
            self._index.pin(entry)
        track.held += entries
        self._holding += len(entries)

    def may_run(self, track: Track) -> bool:
        """May the request go on with what is there? Gives up what it waited for if its time is up."""
        fetch = track.fetch
        assert fetch is not None
        if fetch.leader is not None and fetch.leader.ended:
            if fetch.leader.hits:
                track.fetch = None  # what the leader brought is in the index: look again
            fetch.ended = True
        if not fetch.ended and fetch.hits and not fetch.reading:
            self._read(fetch)
        if fetch.ended or not fetch.waited_for:
            return True
        if not self._in_time(track):
            self._give_up(fetch)
        return not fetch.waited_for

    def _in_time(self, track: Track, share: float = 1.0) -> bool:
        """Has the request waited for less than this share of the deadline?"""
        assert track.waiting_since is not None
        waited = self._clock() - track.waiting_since
        return self._policy.policy != "best_effort" and waited < share * self._policy.deadline

    def release(self, track: Track) -> None:
        """The request's load begins, or it is over: nothing is held for it any more."""
        if track.fetch is not None and not track.fetch.ended:
            self._give_up(track.fetch)
        track.fetch = track.waiting_since = None
        for entry in track.held:
            self._index.unpin(entry)
        self._holding -= len(track.held)
        track.held = []

    def forget_all(self) -> None:
        """What is being read was flushed: it is not brought back."""
        self._epoch += 1
        self._leaders.clear()

    def _give_up(self, fetch: Fetch) -> None:
        fetch.waited_for = False
        if fetch.job is not None:
            self.plan.cancelled.append(fetch.job)
        if not fetch.reading:  # else what is read by then is kept
            for page in fetch.pages:
                self._index.give_page(page)
            self._holding -= len(fetch.pages)
            self._end(fetch)

    def _looked(self, fetch: Fetch, hits: int) -> None:
        fetch.job = None
        if fetch.ended:
            return
        if hits < self._policy.min_pages:
            self._end(fetch)
            return
        fetch.hits = hits
        self._read(fetch)

    def _read(self, fetch: Fetch) -> None:
        """Begin to read, unless that would take too much of what others wait for."""
        pages = self._index.pages.num_pages
        wanted = min(fetch.hits, pages)
        others = self._holding - len(fetch.track.held) - len(fetch.pages)
        if others and others + wanted > pages // 2:
            return
        self._take_pages(fetch, wanted)
        if len(fetch.pages) < wanted and len(self._jobs) and self._in_time(fetch.track, 0.5):
            return  # a job that ends will free some
        if not fetch.pages:
            self._end(fetch)
            return
        fetch.reading = True
        fetch.job = self._jobs.begin(partial(self._have_read, fetch, self._epoch))
        keys = fetch.track.keys()[fetch.first : fetch.first + len(fetch.pages)]
        named = [NamedPage(key, page) for key, page in zip(keys, fetch.pages, strict=True)]
        self.plan.reads.append(Read(fetch.job, named))

    def _take_pages(self, fetch: Fetch, wanted: int) -> None:
        while len(fetch.pages) < wanted:
            page = self._index.take_page()
            if page is None:
                return
            fetch.pages.append(page)
            self._holding += 1

    def _have_read(self, fetch: Fetch, epoch: int, count: int) -> None:
        self._holding -= len(fetch.pages)
        entries = self._insert(fetch, count if epoch == self._epoch else 0)
        if fetch.waited_for and entries:
            self.hold(fetch.track, entries)
        self._end(fetch)
        if entries:
            self._arrived(fetch.track, entries)

    def _insert(self, fetch: Fetch, count: int) -> list[Entry]:
        """The first `count` pages become entries, where there are none yet. The others are free."""
        keys = fetch.track.keys()
        parent = self._index.get(keys[fetch.first - 1]) if fetch.first else None
        new = []
        for number, page in enumerate(fetch.pages):
            position = fetch.first + number
            known = self._index.get(keys[position])
            if number >= count or known is not None:
                self._index.give_page(page)
                parent = known
                continue
            parent = fetch.track.new_entry(position, parent, page, self._block_size)
            parent.stored = parent.from_disk = True
            self._index.insert(parent)
            self._index.ready(parent)
            new.append(parent)
        return new

    def _end(self, fetch: Fetch) -> None:
        fetch.ended = True
        key = fetch.track.keys()[fetch.first]
        if self._leaders.get(key) is fetch:
            del self._leaders[key]
