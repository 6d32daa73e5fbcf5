"""The scheduler's side of the connector: which blocks are where, and what the workers do next.

All decisions are made here, on the scheduler's thread. Nothing waits: jobs go out with the plan of a step and come
back with a later report.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hicache.config import CacheConfig
from hicache.integrations.vllm.events import CPU, DISK, EventLog
from hicache.integrations.vllm.fetches import Fetches
from hicache.integrations.vllm.host_index import Entry, HostIndex
from hicache.integrations.vllm.jobs import BlockCopy, Hello, Load, NamedPage, Persist, StepPlan, Store, WorkerReport
from hicache.integrations.vllm.metrics import SchedulerMeter, TierStats
from hicache.integrations.vllm.open_jobs import OpenJobs
from hicache.integrations.vllm.tracks import Track
from hicache.policies.admission import AdmissionPolicy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.hicache")


class CacheScheduler:
    """The lower tiers of one engine, known to all its ranks by the same page numbers."""

    def __init__(
        self,
        config: CacheConfig,
        hellos: Sequence[Hello],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, storage = config.host, config.storage
        assert host is not None
        self.counters: Counter[str] = Counter()
        self._meter = SchedulerMeter()
        self.events = events
        self._block_size = config.page_size
        self._clock = clock
        self._tracks: dict[str, Track] = {}
        self._jobs = OpenJobs(len(hellos))
        self.index = HostIndex(min(hello.host_pages for hello in hellos), host.eviction, self._evicted)
        self.disk = storage is not None
        """Whether the disk may be asked."""
        admission = storage.admission if storage is not None else None
        self._admission = (
            AdmissionPolicy(admission.policy, admission.min_hits, admission.min_priority) if admission else None
        )
        self._fetches = Fetches(self.index, self._jobs, config, clock, self._arrived)

    @property
    def _plan(self) -> StepPlan:
        return self._fetches.plan

    # ---- requests ---------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """A request has arrived; its disk pages are fetched at once if it asks for that."""
        track = self._tracks[request.request_id] = Track.of(request)
        if track.hints.prefetch and track.hints.load:
            self._look(track, 0)

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Tokens after the first `local_tokens` that can be loaded, whole blocks; None: ask again at the next step."""
        track = self._tracks.get(request.request_id)
        if track is None:
            track = self._tracks[request.request_id] = Track.of(request)
        if not track.hints.load or track.load_failed or request.skip_reading_prefix_cache:
            return 0
        track.first = local_tokens // self._block_size
        hits = self._look(track, track.first)
        return None if hits is None else len(hits) * self._block_size

    def _look(self, track: Track, first: int) -> list[Entry] | None:
        """Host entries from block `first` on; None while more may come from disk."""
        keys = track.keys()
        stop = min(len(keys), (track.request.num_tokens - 1) // self._block_size)  # one token is left to compute
        hits = self.index.hits(keys, first, stop)
        missing = first + len(hits)
        if track.fetch is not None:
            if not self._fetches.may_run(track):
                return None
            if track.fetch is not None:
                return self.index.hits(keys, first, stop)
        if self.disk and stop - missing >= self._fetches.min_pages:
            self._fetches.begin(track, hits, missing, stop)
            return None
        return hits

    def allocated(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """The engine has taken `blocks` for a request, all of them; `tokens` are to be loaded."""
        track = self._tracks[request.request_id]
        if not tokens:
            self._fetches.release(track)
            return
        first, count = track.first, tokens // self._block_size
        entries = self.index.hits(track.keys(), first, first + count)
        assert len(entries) == count, "a block that was promised has left the host"
        for entry in entries:
            self.index.pin(entry)
        self._fetches.release(track)
        self.index.use(entries, track.hints.priority)
        track.from_disk = sum(entry.from_disk for entry in entries)
        track.from_host = count - track.from_disk
        self.counters["loaded_blocks"] += count
        for entry in entries:
            entry.from_disk = False
        job = self._jobs.begin(partial(self._loaded, track, entries))
        own = zip(blocks[first : first + count], entries, strict=True)
        self._plan.loads.append(Load(job, track.rid, [BlockCopy(block, entry.page) for block, entry in own]))
        self._persist(track, entries[-1])

    def sources(self, request: Request) -> tuple[int, int]:
        """Tokens of the request's last load that came from host memory, and from disk."""
        track = self._tracks[request.request_id]
        return track.from_host * self._block_size, track.from_disk * self._block_size

    def finished(self, request: Request) -> None:
        """A request is over, whatever the way."""
        track = self._tracks.pop(request.request_id, None)
        if track is not None:
            self._fetches.release(track)

    # ---- a step -----------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepPlan:
        """The jobs of the step that `output` describes."""
        self.index.advance(self._clock())
        for rid in output.scheduled_cached_reqs.resumed_req_ids:
            if rid in self._tracks:  # it begins again from its first block
                self._tracks[rid].next_block = 0
                self._tracks[rid].stale = False
        state = output.kv_connector_block_state
        assert state is not None
        for rid, computed in _computed_tokens(output):
            track = self._tracks.get(rid)
            if track is None or not track.hints.store or track.stale:
                continue
            whole = min((computed + output.num_scheduled_tokens[rid]) // self._block_size, len(track.keys()))
            if whole > track.next_block:
                tables = state.get_block_ids(rid)
                assert tables is not None
                self._store(track, whole, tables[0])
        plan, self._fetches.plan = self._fetches.plan, StepPlan()
        plan.idle = not output.num_scheduled_tokens
        return plan

    def _store(self, track: Track, whole: int, blocks: Sequence[int]) -> None:
        """Blocks up to `whole` are complete after this step: copy those to the host that it does not have."""
        keys, first = track.keys(), track.next_block
        track.next_block = whole
        last = self.index.get(keys[first - 1]) if first else None
        if first and last is None:
            self.counters["chain_cut_blocks"] += whole - first  # could never be reached
            return
        # New entries need not follow each other: blocks between them may be on the host already.
        #
        #     block       first | new | known | known | new | new | whole
        #
        new: list[tuple[Entry, int]] = []
        for position in range(first, whole):
            entry = self.index.get(keys[position])
            if entry is None:
                entry = self._new_entry(track, position, last)
                if entry is None:
                    self.counters["no_room_blocks"] += whole - position
                    break
                new.append((entry, blocks[position]))
            last = entry
        if new:
            self._copy_to_host(track, new)

    def _new_entry(self, track: Track, position: int, parent: Entry | None) -> Entry | None:
        if parent is not None:
            self.index.pin(parent)  # it must not make room for its own child
        page = self.index.take_page()
        if parent is not None:
            self.index.unpin(parent)
        if page is None:
            return None
        entry = track.new_entry(position, parent, page, self._block_size)
        self.index.insert(entry)
        self.index.pin(entry)
        return entry

    def _copy_to_host(self, track: Track, new: list[tuple[Entry, int]]) -> None:
        entries = [entry for entry, _ in new]
        job = self._jobs.begin(partial(self._stored, track, entries))
        self._plan.stores.append(Store(job, track.rid, [BlockCopy(block, entry.page) for entry, block in new]))
        self.counters["stored_blocks"] += len(new)
        self._persist(track, entries[-1])

    def _persist(self, track: Track, entry: Entry) -> None:
        """Store a block on disk if it is admitted, with those before it that are not there yet."""
        if self._admission is None or not self.disk or not self._admission.admits(entry):
            return
        chain: list[Entry] = []
        at: Entry | None = entry
        while at is not None and not (at.stored or at.persisting):
            chain.append(at)
            at = at.parent
        if not chain or (at is None and chain[-1].start > 0):  # the blocks before it are not known here
            return
        chain.reverse()
        for one in chain:
            one.persisting = True
            self.index.pin(one)
        job = self._jobs.begin(partial(self._persisted, track, chain))
        parent = at.key if at is not None else None
        self._plan.persists.append(Persist(job, [NamedPage(one.key, one.page) for one in chain], parent))

    # ---- what came of it --------------------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Results of the workers' jobs."""
        self._jobs.report(report)

    def _loaded(self, track: Track, entries: list[Entry], result: int) -> None:
        for entry in entries:
            self.index.unpin(entry)
        if not result:
            self.counters["failed_loads"] += 1
            track.load_failed = True
            self._discard(entries)

    def _stored(self, track: Track, entries: list[Entry], result: int) -> None:
        for entry in entries:
            self.index.unpin(entry)
        if not result:
            self.counters["failed_stores"] += 1
            self._discard(entries)
            return
        alive = [entry for entry in entries if entry.alive]
        for entry in alive:
            self.index.ready(entry)
        self.events.stored(track.request, alive, CPU)

    def _persisted(self, track: Track, chain: list[Entry], count: int) -> None:
        parent = chain[0].parent
        for number, entry in enumerate(chain):
            entry.persisting = False
            entry.stored = entry.stored or number < count
            self.index.unpin(entry)
        self.counters["persisted_blocks"] += count
        if not count:
            while parent is not None:  # the disk may have evicted what it was said to have
                parent.stored = False
                parent = parent.parent
        self.events.stored(track.request, chain[:count], DISK)

    def _arrived(self, track: Track, entries: list[Entry]) -> None:
        self.counters["fetched_blocks"] += len(entries)
        self.events.stored(track.request, entries, CPU)

    def _discard(self, entries: Sequence[Entry]) -> None:
        gone = [lost.block_hash for entry in entries for lost in self.index.discard(entry) if lost.ready]
        self.events.removed(gone, CPU)

    def _evicted(self, entry: Entry) -> None:
        self.counters["demoted_blocks" if entry.stored else "discarded_blocks"] += 1
        self.events.removed([entry.block_hash], CPU)

    def stats(self) -> TierStats | None:
        """What has changed since the last call."""
        return self._meter.report(self.counters, self.index.owned_pages(), self.index.pages.num_pages)

    # ---- reset ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all host pages, and what is on its way; what was computed until now is not stored any more."""
        self._fetches.forget_all()
        for track in self._tracks.values():
            self._fetches.release(track)
            track.stale = track.next_block > 0 or track.request.num_computed_tokens > 0
        self.index.clear()
        self.events.cleared()


def _computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Each scheduled request and its tokens computed before this step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
