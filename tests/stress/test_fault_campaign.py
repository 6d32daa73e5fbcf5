"""Everything that can go wrong with the disk tier goes wrong in the middle of a replay.

A fault strikes when a third of the requests have finished, and where it can be lifted it is at two thirds. Whatever
it is: every byte of every hit is right, all requests finish, every page is accounted for, the failure is counted
under its reason, and the tier serves again. Faults that could end the process run in one of their own:

    PYTHONPATH=. python tests/stress/test_fault_campaign.py truncated_index /tmp/campaign
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, TypeAlias
from unittest.mock import patch

import lmdb
import pytest

from hicache.cache import HiCache
from hicache.device_pool import DevicePool, ReqToTokenPool, TokenToKVPoolAllocator
from hicache.errors import BadInput, ConfigError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.host_pool.pool import POISON_BYTE, HostPool
from hicache.layout import KVLayout
from hicache.prefetch import PrefetchPolicy
from hicache.requests import Request, RequestManager
from hicache.sim.driver import Replay
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.options import ReplayOptions
from hicache.sim.ports import ReplayTarget
from hicache.sim.result import ReplayResult
from hicache.storage_backends import filesystem
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage
from hicache.storage_backends.budget import BudgetPlan
from hicache.storage_backends.lmdb_audit import audit
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE, IndexEnvironment
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_locks import LOCK_FILE
from hicache.storage_backends.lmdb_readers import READERS_FILE
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.storage_backends.wrappers import SlowBackend
from hicache.streams import create_stream
from hicache.testing.storage import chain, read_checked, run_of
from hicache.tiers import HostTier, StorageTier, Tiers
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.storage_engine import EngineLimits, StorageEngine
from hicache.tree.radix_tree import RadixTree

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8)
IDENTITY = StoreIdentity(LAYOUT, model="faults")
BUDGET = 24 << 20
DEVICE_PAGES, HOST_PAGES = 280, 300
WORKLOAD = ChatWorkload(
    seed=3, conversations=45, turns=4, system_tokens=96, tool_tokens=192, user_tokens=64, output_tokens=24,
    context_tokens=1024, start_gap_ms=100.0, tenants=2,
)  # fmt: skip
OPTIONS = ReplayOptions(verify=True, max_running=4, window=8, chunk_tokens=256, step_tokens=1024, stall_seconds=30.0)
LONG = 1e6
"""Seconds that never pass."""
LIMITS = EngineLimits(8 << 20, LONG, LONG, LONG)


# ---- the replay ---------------------------------------------------------------------------------


class Meddler(StorageBackend):
    """A backend whose calls first pass `hook`, which gets their names and may raise or wait."""

    def __init__(self, inner: StorageBackend, hook: Callable[[str], None]) -> None:
        self.inner = inner
        self._hook = hook

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._hook("contains_prefix")
        return self.inner.contains_prefix(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self._hook("read_into")
        return self.inner.read_into(keys, buffers)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        self._hook("write")
        return self.inner.write(runs)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self.inner.delete(keys)

    def clear(self) -> int:
        return self.inner.clear()

    def generation(self) -> int:
        return self.inner.generation()

    def usage(self) -> StorageUsage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


class Scene:
    """A replay through three small tiers. A request waits `patience` seconds, real ones, for what is read for it."""

    def __init__(self, path: Path, limits: EngineLimits = LIMITS, threads: int = 2) -> None:
        self.path = path
        self.hanging = False
        self._threads = threads
        self._skipped = 0.0
        self._waited = 0.0
        self.limits = limits
        self.lmdb: list[LmdbBackend] = []  # as they were opened, the one in use last
        self.hook: Callable[[str], None] = lambda operation: None
        self.sleep: Callable[[float], None] = lambda seconds: None
        host = HostPool(LAYOUT, HOST_PAGES)
        pool = DevicePool(LAYOUT, DEVICE_PAGES)
        copies = CopyEngine.between(pool, host)
        self.tiers = Tiers(
            identity=IDENTITY,
            tree=RadixTree(LAYOUT.page_size, "lru", "lru"),
            device_pool=pool,
            device_allocator=TokenToKVPoolAllocator(DEVICE_PAGES, LAYOUT.page_size),
            host=HostTier(host, copies),
            storage=self.storage(),
            poison=True,
        )
        self.cache = HiCache(self.tiers, prefetch=PrefetchPolicy("wait_complete", 2.0), clock=self.patience)

    def storage(self) -> StorageTier:
        backend = RecoveringBackend(self._open)
        backend.open()
        slow = SlowBackend(backend, per_call=0.02, sleep=lambda seconds: self.sleep(seconds))
        return StorageTier(StorageEngine(slow, LAYOUT.page_size, self.limits, threads=self._threads, clock=self.clock))

    def clock(self) -> float:
        """The storage engine's time: it runs fast, and a second more passes with each request."""
        return 10 * time.monotonic() + self._skipped

    def patience(self) -> float:
        """The cache's time: it jumps while something hangs."""
        self._waited += 0.05 * self.hanging
        return time.monotonic() + self._waited

    def _open(self) -> StorageBackend:
        backend = LmdbBackend(self.path, IDENTITY, BUDGET, durability="none")  # syncs make it slow
        self.lmdb.append(backend)
        return Meddler(backend, lambda operation: self.hook(operation))

    @property
    def engine(self) -> StorageEngine:
        assert self.tiers.storage is not None
        return self.tiers.storage.engine

    @property
    def storage_hits(self) -> int:
        return self.tiers.counters.hit_tokens["storage"]

    def quiet(self) -> None:
        """Wait until no worker is in the backend: none comes while the scheduler's thread is here."""
        assert self.engine.wait_idle(30.0)

    def replay(self, strike: Callable[[], None], lift: Callable[[], None]) -> Outcome:
        trace = generate(WORKLOAD)
        hits = 0

        def progress(requests: int, prompt_tokens: int) -> None:
            nonlocal hits
            self._skipped += 1.0
            if requests == len(trace) // 3:
                strike()
            if requests == 2 * len(trace) // 3:
                lift()
                self._skipped += 1000.0  # the pause of a breaker is over
                hits = self.storage_hits

        requests = RequestManager(self.cache, ReqToTokenPool(16, DEVICE_PAGES * LAYOUT.page_size, LAYOUT.page_size))
        compute = create_stream("cpu", "compute")
        target = ReplayTarget(
            self.cache, requests, Request, self.tiers.device_allocator, self.tiers.device_pool, compute,
            DEVICE_PAGES * LAYOUT.page_size,
        )  # fmt: skip
        try:
            result = Replay.with_bytes(target, POISON_BYTE, OPTIONS, progress).run(trace)
            failures = dict(self.cache.stats().failures)
        finally:
            compute.close()
            self.cache.close()
        assert result.requests == len(trace)
        return Outcome(result, failures, self.storage_hits - hits)


@dataclass(frozen=True)
class Outcome:
    """`after`: tokens that storage served in the last third."""

    result: ReplayResult
    failures: Mapping[str, int]
    after: int


# ---- the faults ---------------------------------------------------------------------------------

Strike: TypeAlias = Callable[[Scene, ExitStack], None]
"""Makes a fault happen; what it puts on the stack lifts it."""


@dataclass(frozen=True)
class Fault:
    """`prepare` damages a store at rest, before the replay opens it.

    One of `counted` is counted as a failure, or nothing is if there are none. `aside`: the store is set aside.
    Faults that could end the process run in another, those of one `group` after each other. `verify` looks for more.
    """

    strike: Strike
    counted: tuple[str, ...] = ()
    aside: bool = False
    group: str = ""
    prepare: Callable[[Path], None] = lambda path: None
    verify: Callable[[Scene, Outcome], None] = lambda scene, outcome: None
    limits: EngineLimits = LIMITS
    threads: int = 2


FAULTS: dict[str, Fault] = {}


def fault(**options: Any) -> Callable[[Strike], Strike]:
    def note(strike: Strike) -> Strike:
        FAULTS[strike.__name__] = Fault(strike, **options)
        return strike

    return note


def at_rest(damage: Callable[[Path], None], **options: Any) -> None:
    """A fault that lies in the files when the replay starts."""
    FAULTS[damage.__name__] = Fault(lambda scene, until: None, prepare=partial(prepared, damage), **options)


def prepared(damage: Callable[[Path], None], path: Path) -> None:
    store = LmdbBackend(path, IDENTITY, BUDGET)
    for number in range(20):
        store.write([run_of(LAYOUT, chain(f"before {number}", 30))])
    store.close()
    damage(path)


def failing(code: int) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@contextmanager
def failing_commits(error: Exception) -> Iterator[None]:
    """Every commit to the index ends with this error, and nothing of it is kept."""
    begin = IndexEnvironment.writer

    @contextmanager
    def writer(env: IndexEnvironment, now_us: int) -> Iterator[IndexWriter]:
        with begin(env, now_us) as index:
            yield index
            raise error

    with patch.object(IndexEnvironment, "writer", writer):
        yield


# Errors of the system. LMDB passes on those it does not know by their text.


@fault()
def nothing(scene: Scene, until: ExitStack) -> None:
    """The replay itself is in order."""


@fault(counted=("store_disk_full",))
def disk_full_for_pages(scene: Scene, until: ExitStack) -> None:
    until.enter_context(patch.object(os, "pwritev", failing(errno.ENOSPC)))


@fault(counted=("store_disk_full",))
def disk_full_for_the_index(scene: Scene, until: ExitStack) -> None:
    until.enter_context(failing_commits(lmdb.DiskError("mdb_txn_commit: No space left on device")))


@fault(counted=("store_io_error",))
def write_error(scene: Scene, until: ExitStack) -> None:
    until.enter_context(patch.object(os, "pwritev", failing(errno.EIO)))


@fault(counted=("load_io_error",))
def read_error(scene: Scene, until: ExitStack) -> None:
    until.enter_context(patch.object(os, "preadv", failing(errno.EIO)))


@fault(counted=("store_io_error",))
def sync_error(scene: Scene, until: ExitStack) -> None:
    until.enter_context(failing_commits(lmdb.Error("mdb_txn_commit: Input/output error")))


@fault(counted=("store_read_only",))
def remounted_read_only(scene: Scene, until: ExitStack) -> None:
    until.enter_context(patch.object(os, "pwritev", failing(errno.EROFS)))
    until.enter_context(failing_commits(lmdb.Error("mdb_txn_commit: Read-only file system")))


# Damage while the store is open. `quiet`: what a call meets in its middle may be anything.


@fault(counted=("load_corrupt", "store_corrupt"), aside=True, group="open")
def truncated_index(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    os.truncate(scene.path / DATA_FILE, 64 << 10)


@fault(counted=("load_corrupt", "store_corrupt"), aside=True, group="open")
def emptied_index(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    os.truncate(scene.path / DATA_FILE, 0)


@fault(counted=("load_corrupt", "store_corrupt"), aside=True, group="open")
def flipped_records(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    flip_records(scene, lambda view: random.Random(0).sample(list(view.txn.cursor(view.databases.pages)), 300))


@fault(counted=("load_corrupt", "store_corrupt"), aside=True, group="open")
def flipped_counters(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    flip_records(scene, lambda view: [item for item in view.txn.cursor(view.databases.meta) if item[0] == b"state"])


def flip_records(scene: Scene, choose: Callable[[IndexView], list[tuple[bytes, bytes]]]) -> None:
    """Flip a bit of the values of some records. The map and the file are the same memory."""
    chosen = scene.lmdb[-1]._store.view(choose)
    assert chosen
    with open(scene.path / DATA_FILE, "r+b") as file:
        index = file.read(scene.lmdb[-1]._store._env.used_bytes)
        for key, raw in chosen:
            at = index.find(key + raw)
            while at >= 0:
                file.seek(at + len(key))
                file.write(bytes([raw[0] ^ 1]))
                at = index.find(key + raw, at + 1)


def finds_damage(scene: Scene, outcome: Outcome) -> None:
    assert sum(backend.damaged_pages for backend in scene.lmdb) > 0


@fault(verify=finds_damage)
def truncated_slab(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    os.truncate(next(scene.path.glob("slab-*")), 0)


@fault(verify=finds_damage)
def flipped_pages(scene: Scene, until: ExitStack) -> None:
    scene.quiet()
    with open(next(scene.path.glob("slab-*")), "r+b", buffering=0) as file:
        for start in range(0, os.fstat(file.fileno()).st_size, LAYOUT.page_stride):
            byte = os.pread(file.fileno(), 1, start + start // 5 % LAYOUT.page_bytes)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), start + start // 5 % LAYOUT.page_bytes)


# Files that go, or are replaced, while the store is open. A race with a call in its middle is part of it: what the
# call meets first is what it names.


UNDERNEATH = {
    "counted": tuple(
        f"{kind}_{what}_{verb}"
        for kind in ("load", "store")
        for what in ("folder", "index", "lock", "slab")
        for verb in ("removed", "replaced")
    )
}


@fault(**UNDERNEATH)
def removed_folder(scene: Scene, until: ExitStack) -> None:
    shutil.rmtree(scene.path, ignore_errors=True)  # the store may begin again meanwhile


@fault(**UNDERNEATH)
def moved_folder(scene: Scene, until: ExitStack) -> None:
    scene.path.rename(scene.path.with_name("moved"))


@fault(**UNDERNEATH)
def replaced_folder(scene: Scene, until: ExitStack) -> None:
    scene.path.rename(scene.path.with_name("moved"))
    scene.path.mkdir(exist_ok=True)


@fault(**UNDERNEATH)
def emptied_folder(scene: Scene, until: ExitStack) -> None:
    for file in scene.path.iterdir():
        file.unlink(missing_ok=True)


@fault(**UNDERNEATH)
def removed_index(scene: Scene, until: ExitStack) -> None:
    (scene.path / DATA_FILE).unlink()


@fault(**UNDERNEATH)
def removed_slab(scene: Scene, until: ExitStack) -> None:
    next(scene.path.glob("slab-*")).unlink()


@fault(**UNDERNEATH)
def removed_lock_files(scene: Scene, until: ExitStack) -> None:
    for name in (LOCK_FILE, READERS_FILE):
        (scene.path / name).unlink()


@fault()
def removed_lock_file(scene: Scene, until: ExitStack) -> None:
    """The store is as it was, and nobody can have it alone."""
    (scene.path / LOCK_FILE).unlink()


# Damage at rest.


@partial(at_rest, aside=True, group="at rest")
def truncated_index_at_rest(path: Path) -> None:
    os.truncate(path / DATA_FILE, 16 << 10)


@partial(at_rest, aside=True, group="at rest")
def garbage_in_meta_pages(path: Path) -> None:
    with open(path / DATA_FILE, "r+b") as file:
        file.write(random.Random(0).randbytes(2 * 4096))


@partial(at_rest, aside=True, group="at rest")
def zeroed_meta_pages(path: Path) -> None:
    with open(path / DATA_FILE, "r+b") as file:
        file.write(bytes(2 * 4096))


@partial(at_rest, aside=True, group="at rest")
def flipped_roots(path: Path) -> None:
    """Where the main database begins, in both meta pages: 16 bytes of header, 24 of map, 48 of the free list."""
    with open(path / DATA_FILE, "r+b") as file:
        for page in (0, 4096):
            file.seek(page + 16 + 24 + 2 * 48 - 8)
            file.write(b"\xff\xff")


@partial(at_rest)
def garbage_in_lock_files(path: Path) -> None:
    for name in ("lock", "lock.mdb", "session"):
        (path / name).write_bytes(random.Random(0).randbytes(8192))


@partial(at_rest, aside=True)
def another_format(path: Path) -> None:
    env = lmdb.open(str(path), max_dbs=12)
    with env.begin(write=True) as txn:
        txn.put(b"store", b'{"format": 99, "values": "slab"}', db=env.open_db(b"meta", txn=txn))
    env.close()


# A map that is full.


@fault(counted=("store_map_full",))
def full_map(scene: Scene, until: ExitStack) -> None:
    """It cannot grow, either."""
    scene.quiet()
    env = scene.lmdb[-1]._store._env
    full = lmdb.MapFullError("mdb_put: Environment mapsize limit reached")
    until.enter_context(failing_commits(full))
    until.enter_context(patch.object(BudgetPlan, "split", side_effect=ConfigError("nothing is left")))
    assert env.map_bytes


STUCK_READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=12, map_size=int(sys.argv[2]))
with env.begin() as txn:
    txn.stat()
    print("reading", flush=True)
    sys.stdin.read()
"""


@fault(counted=("store_reader_stuck",))
def stuck_reader(scene: Scene, until: ExitStack) -> None:
    """Another process holds a snapshot, so that nothing it sees can be reused."""
    backend = scene.lmdb[-1]
    until.enter_context(talking_process(STUCK_READER, str(scene.path), str(backend._store._env.map_bytes)))
    with pytest.raises(StoreUnavailableError, match="transactions behind"):
        for number in range(5000):
            backend.write([run_of(LAYOUT, chain(f"more {number}", 1))])


@contextmanager
def talking_process(code: str, *arguments: str) -> Iterator[None]:
    """A program that says a line when it is ready, and ends with its input."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        process.communicate()
        assert process.returncode == 0


# Others.


@fault(group="fork")
def used_after_a_fork(scene: Scene, until: ExitStack) -> None:
    """The child is refused, and closing there closes nothing here."""
    backend, keys = scene.lmdb[-1], chain("child", 3)
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: backend.contains_prefix(keys),
            lambda: read_checked(backend, LAYOUT, keys),
            lambda: backend.write([run_of(LAYOUT, keys)]),
            backend.clear,
        ):
            try:
                call()
            except StoreUnavailableError:
                refused += 1
        backend.close()
        os._exit(0 if refused == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0


@fault()
def opened_twice_through_a_link(scene: Scene, until: ExitStack) -> None:
    link = scene.path.with_name("link")
    link.symlink_to(scene.path)
    second = LmdbBackend(link, IDENTITY, BUDGET)
    until.callback(second.close)
    assert second.write([run_of(LAYOUT, chain("second", 20))]) == [20]
    assert read_checked(second, LAYOUT, chain("second", 20)) == 20


NEIGHBOUR = """
import sys, threading
from pathlib import Path
from dataclasses import replace
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

store = LmdbBackend(Path(sys.argv[1]), IDENTITY, int(sys.argv[2]))
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("working", flush=True)
number = 0
while not over.wait(0.005):
    keys = chain(f"neighbour {number}", 20)
    assert store.write([run_of(IDENTITY.layout, keys)]) == [20]
    read_checked(store, IDENTITY.layout, keys)
    number += 1
store.clear()
store.close()
"""


@fault()
def a_neighbour_in_the_store(scene: Scene, until: ExitStack) -> None:
    """Another process has a namespace in it, takes room, and clears it in the end."""
    until.enter_context(talking_process(NEIGHBOUR, str(scene.path), str(BUDGET)))


@fault(verify=lambda scene, outcome: forgets(scene))
def cleared_by_others(scene: Scene, until: ExitStack) -> None:
    second = LmdbBackend(scene.path, IDENTITY, BUDGET)
    assert second.clear()
    second.close()


def forgets(scene: Scene) -> None:
    assert scene.tiers.counters.forgotten_pages > 0


@fault()
def slow_backend(scene: Scene, until: ExitStack) -> None:
    scene.sleep = time.sleep
    until.callback(setattr, scene, "sleep", lambda seconds: None)


HANGING_LOADS: dict[str, Any] = {
    "counted": ("load_timeout",),
    "limits": replace(LIMITS, queue_seconds=8.0, load_deadline=8.0),
}


def hang(scene: Scene, until: ExitStack, *operations: str) -> None:
    """Calls hang until the fault is lifted."""
    released = threading.Event()

    def hook(operation: str) -> None:
        if operation in operations:
            released.wait()

    scene.hook, scene.hanging = hook, True
    until.callback(setattr, scene, "hook", lambda operation: None)
    until.callback(setattr, scene, "hanging", False)
    until.callback(released.set)


@fault(**HANGING_LOADS)
def hung_reads(scene: Scene, until: ExitStack) -> None:
    hang(scene, until, "read_into")


@fault(**HANGING_LOADS)
def hung_lookups(scene: Scene, until: ExitStack) -> None:
    hang(scene, until, "contains_prefix")


@fault(counted=("store_timeout",), limits=replace(LIMITS, queue_seconds=8.0, store_deadline=8.0))
def hung_writes(scene: Scene, until: ExitStack) -> None:
    hang(scene, until, "write")


def hook_errors(scene: Scene, until: ExitStack, *operations: str) -> None:
    chance = random.Random(0)

    def hook(operation: str) -> None:
        if operation in operations:
            raise chance.choice((ValueError, KeyError, ZeroDivisionError, MemoryError, RuntimeError))("injected")

    scene.hook = hook
    until.callback(setattr, scene, "hook", lambda operation: None)


@fault(counted=("load_error",))
def surprising_errors_of_loads(scene: Scene, until: ExitStack) -> None:
    hook_errors(scene, until, "contains_prefix", "read_into")


@fault(counted=("store_error",))
def surprising_errors_of_stores(scene: Scene, until: ExitStack) -> None:
    hook_errors(scene, until, "write")


@fault()
def detached(scene: Scene, until: ExitStack) -> None:
    report = scene.cache.detach_storage()
    assert report.closed
    until.callback(lambda: scene.cache.attach_storage(scene.storage()))


# A disk that is really full. It takes a mount.


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    made = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"nothing may be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(scene: Scene, until: ExitStack) -> None:
    ballast = scene.path.with_name("ballast")
    until.callback(ballast.unlink)
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


for name in ("full_tmpfs", "full_ext4"):
    FAULTS[name] = Fault(fill_disk, counted=("store_disk_full",), group=name)


# ---- the tests ----------------------------------------------------------------------------------


def run(name: str, folder: Path) -> Outcome:
    """A replay with that fault in the folder, which is empty; raises AssertionError if a promise is broken."""
    it, path = FAULTS[name], folder / "store"
    it.prepare(path)
    scene, lifted = Scene(path, it.limits, it.threads), ExitStack()
    with lifted:  # lifted for a replay that fails, too
        outcome = scene.replay(lambda: it.strike(scene, lifted), lifted.close)
    assert outcome.result.wrong_pages == 0, outcome.result.wrong_examples
    assert not it.counted or any(outcome.failures.get(reason) for reason in it.counted), outcome.failures
    assert it.counted or not outcome.failures, outcome.failures
    assert outcome.after > 0, "storage served nothing any more"
    assert path.with_name("store.aside-1").exists() == it.aside
    it.verify(scene, outcome)
    look_over(path)
    return outcome


def look_over(path: Path) -> None:
    """The store is whole, within its budget, and every page that it names can be read."""
    store = LmdbBackend(path, IDENTITY, BUDGET)
    assert audit(store._store) == []
    assert store.usage().used_bytes <= BUDGET
    store.close()


def run_alone(group: str, folder: Path) -> None:
    command = [sys.executable, __file__, group, str(folder)]
    replay = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replay.returncode == 0, f"{replay.returncode}: {replay.stdout}{replay.stderr}"


@pytest.mark.stress
@pytest.mark.parametrize("name", [name for name, it in FAULTS.items() if not it.group])
def test_a_replay_survives(tmp_path: Path, name: str) -> None:
    run(name, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("group", ["open", "at rest", "fork"])
def test_no_fault_ends_the_process(tmp_path: Path, group: str) -> None:
    run_alone(group, tmp_path)


@pytest.mark.stress
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
def test_a_replay_survives_a_full_tmpfs(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=40m", "tmpfs"):
        run_alone("full_tmpfs", tmp_path)


@pytest.mark.stress
@pytest.mark.skipif(os.geteuid() != 0 or not which("mkfs.ext4"), reason="makes and mounts file systems")
def test_a_replay_survives_a_full_ext4(tmp_path: Path) -> None:
    image, folder = tmp_path / "image", tmp_path / "disk"
    image.touch()
    os.truncate(image, 48 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    folder.mkdir()
    with mounted(folder, "-o", "loop", str(image)):
        run_alone("full_ext4", folder)


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    nfs = patch.object(filesystem, "file_system_of", lambda path: "nfs4")
    with nfs, pytest.raises(ConfigError, match="network"):
        Scene(tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_the_database_of_another_program_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "store"
    env = lmdb.open(str(path))
    with env.begin(write=True) as txn:
        txn.put(b"theirs", b"kept")
    env.close()
    with pytest.raises(BadInput):
        Scene(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    with lmdb.open(str(path)) as env, env.begin() as txn:
        assert txn.get(b"theirs") == b"kept"


def main() -> None:
    group, folder = sys.argv[1], Path(sys.argv[2])
    for name, it in FAULTS.items():
        if group in (name, it.group):
            print(name, flush=True)
            (folder / name).mkdir(parents=True)
            print(run(name, folder / name))


if __name__ == "__main__":
    main()
