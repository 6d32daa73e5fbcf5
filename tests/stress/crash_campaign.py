"""Writers of a store are killed at random instants, and the store is looked over each time.

No page may have wrong bytes, nothing that was acknowledged may be missing, nothing that was removed may be back,
and every slot must be accounted for. test_crash_campaign.py runs this; by hand, for as long as you like:

    PYTHONPATH=. python tests/stress/crash_campaign.py slab /tmp/campaign --kills 2000 --seed 7

This process opens nothing: it forks the writers, and a checker after each kill. A writer says over a pipe what it
has done, one line each, and beforehand what it is about to remove.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from hashlib import shake_128
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import ValuesMode, inline_cost
from hicache.storage_backends.lmdb_audit import audit_view
from hicache.storage_backends.lmdb_backend import Eviction, LmdbBackend
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder
from hicache.storage_backends.lmdb_schema import PageRecord
from hicache.storage_backends.slab import SlabFile
from hicache.testing.storage import blank_pages, chain

MIB = 1 << 20

MAX_LENGTH = 40
"""Pages of the longest chain."""

NEWEST = 300
"""So many chains are remembered where the budget is tight."""

PATIENCE = 60.0
"""Seconds after which a silent writer is said to hang."""


# ---- what is tried ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """A namespace of the store: pages of 512 bytes times `page_size`."""

    page_size: int
    eviction: Eviction = "lru"
    codec: str = "none"
    ttl: float = 0.0
    quota_bytes: int = 0

    @property
    def identity(self) -> StoreIdentity:
        layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=self.page_size)
        return StoreIdentity(layout, model=f"{self.eviction}, {self.ttl} s", codec=self.codec)

    @property
    def keeps_newest(self) -> bool:
        """Are the pages used last the last to go, whatever the other namespaces do?"""
        return not self.ttl and not self.quota_bytes and self.eviction != "slru"


@dataclass(frozen=True)
class Plan:
    """A store that is `tight` evicts all the time; else it never does, and everything acknowledged must be there.

    With two writers, each has the space of its number for itself, and they share the others.
    """

    spaces: tuple[Space, ...]
    values: ValuesMode = "slab"
    tight: bool = False
    writers: int = 1

    @property
    def budget_bytes(self) -> int:
        return (12 if self.tight else 80) * MIB

    @property
    def keeps_newest(self) -> bool:
        return all(space.eviction != "slru" for space in self.spaces)


ROOMY = (Space(8), Space(12, "fifo"), Space(32, "slru"))
TIGHT = (Space(8), Space(12, "fifo"), Space(8, ttl=0.3), Space(32, quota_bytes=MIB), Space(16))
CODEC = "zstd" if find_spec("zstandard") is not None else "lz4"
CODED = (Space(32, codec=CODEC), Space(64, codec=CODEC), Space(8))
PLANS = {
    "slab": Plan(ROOMY),
    "slab-tight": Plan(TIGHT, tight=True),
    "slab-slru": Plan((Space(8, "slru"), *TIGHT), tight=True),
    "inline": Plan(ROOMY, "inline"),
    "inline-tight": Plan(TIGHT, "inline", tight=True),
    "two": Plan(ROOMY, writers=2),
    "two-tight": Plan(TIGHT, tight=True, writers=2),
    "two-inline": Plan(TIGHT, "inline", tight=True, writers=2),
    "codec": Plan(CODED),
    "codec-tight": Plan(CODED, tight=True),
}


@lru_cache(8192)
def keys_of(name: str) -> list[bytes]:
    return chain(name, MAX_LENGTH)


@lru_cache(8192)
def content(page_bytes: int, key: bytes) -> bytes:
    """Different for every key, and compressible for some more than for others."""
    noise = shake_128(key).digest(page_bytes * key[0] // 255)
    return (noise + key * (page_bytes // len(key) + 1))[:page_bytes]


def read(backend: LmdbBackend, layout: KVLayout, keys: list[bytes]) -> tuple[int, list[bytes]]:
    """How many leading pages are read, and the keys of those that have wrong bytes."""
    pages = blank_pages(layout, len(keys))
    count = backend.read_into(keys, pages)
    size = layout.page_bytes
    return count, [key for key, page in zip(keys[:count], pages) if page[:size] != content(size, key)]


# ---- what must be there -------------------------------------------------------------------------


@dataclass
class Chain:
    """`length` pages of a namespace, after page `at` of the chain `parent`."""

    space: int
    parent: str
    at: int
    length: int
    writer: int

    @property
    def parent_key(self) -> bytes | None:
        return keys_of(self.parent)[self.at] if self.parent else None


class Model:
    """What has been acknowledged: chains that must be there, the newest last, and pages that must not."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chains: dict[str, Chain] = {}
        self.gone: list[bytes] = []

    def follow(self, line: str) -> None:
        """A line of a writer. Removals are announced, and pages that one may have taken are nobody's business."""
        what, name, *numbers = line.split()
        match what:
            case "stored":
                self._stored(name, *numbers)
            case "deletes":
                self.cut(name, int(numbers[0]))
            case "deleted":
                self._note_gone(keys_of(name)[int(numbers[0]) :])
            case "clears":
                for each in self.of_space(int(name)):
                    del self.chains[each]
            case "cleared":
                for each in name.split(","):
                    self._note_gone(keys_of(each))

    def _stored(self, name: str, parent: str, *numbers: str) -> None:
        space, at, length, writer = map(int, numbers)
        if self.plan.spaces[space].eviction != "fifo":
            self.chains.pop(name, None)  # used now
        if length:
            self.chains[name] = Chain(space, parent.strip("-"), at, length, writer)
        else:
            self.cut(name, 0)
        if self.plan.tight and len(self.chains) > NEWEST:
            del self.chains[next(iter(self.chains))]

    def cut(self, name: str, at: int) -> None:
        """Forget the pages of a chain from `at` on, and what hangs below them."""
        for below in [each for each, it in self.chains.items() if it.parent == name and it.at >= at]:
            self.cut(below, 0)
        if name in self.chains:
            self.chains[name].length = min(self.chains[name].length, at)
            if not at:
                del self.chains[name]

    def of_space(self, space: int) -> list[str]:
        return [name for name, chain in self.chains.items() if chain.space == space]

    def _note_gone(self, keys: list[bytes]) -> None:
        self.gone += keys
        del self.gone[:-20_000]

    def cost(self, each: Chain) -> int:
        """Bytes that its pages take at most."""
        layout = self.plan.spaces[each.space].identity.layout
        slab = self.plan.values == "slab"
        return each.length * (layout.page_stride if slab else inline_cost(layout.page_bytes))

    def promised(self, writer: int | None) -> Iterator[tuple[str, Chain]]:
        """Chains that must be there: all; of a tight store the newest, if need be only those of one writer."""
        if not self.plan.tight:
            yield from self.chains.items()
            return
        room = self.plan.budget_bytes // 6 if self.plan.keeps_newest else 0
        for name, each in reversed(self.chains.items()):
            room -= self.cost(each)
            if room < 0:
                return
            if self.plan.spaces[each.space].keeps_newest and (writer is None or each.writer == writer):
                yield name, each


# ---- the writers --------------------------------------------------------------------------------


class Writer:
    """Writes, reads and removes at random until it is killed, and says what it did."""

    def __init__(self, number: int, alone: bool, round_name: str, path: Path, model: Model, pipe: int) -> None:
        self.number = number
        self.alone = alone
        self.plan = model.plan
        self.model = model
        self.rng = random.Random(f"{round_name}.{number}")
        self._name = f"{round_name}.{number}"
        self._written = 0
        self._pipe = pipe
        self._backends = open_backends(path, self.plan)
        self._own = [n for n in range(len(self.plan.spaces)) if alone or n == number or n >= self.plan.writers]

    def run(self) -> NoReturn:
        self.say("ready -")
        while True:
            state = self._backends[0]._store.view(IndexView.state)
            share = state.live_bytes / state.data_bytes
            if not self.plan.tight and share > 0.5:
                self._clear(max(self._clearable, key=lambda space: len(self.model.of_space(space))))
            actions = [self._write, self._branch, self._write_again, self._read, self._delete]
            (action,) = self.rng.choices(actions, (50, 20, 8, 12, 8))
            if self.rng.random() < 0.01:
                self._clear(self.rng.choice(self._clearable))
            elif self.plan.tight or share < 0.75:
                action()
            else:
                self._read()

    def say(self, line: str) -> None:
        os.write(self._pipe, line.encode() + b"\n")
        self.model.follow(line)

    # ---- what it does ---------------------------------------------------------------------------

    def _write(self) -> None:
        """One to three chains in one transaction."""
        space = self.rng.choice(self._own)
        self._store([self._new(space, "", 0) for _ in range(self.rng.choice((1, 1, 2, 3)))])

    def _branch(self) -> None:
        found = self._pick()
        if found is not None:
            self._store([self._new(self.model.chains[found].space, found, self._place(found))])

    def _write_again(self) -> None:
        found = self._pick()
        if found is not None:
            self._store([(found, self.model.chains[found])])

    def _read(self) -> None:
        found = self._pick()
        if found is None:
            return
        wanted = self.model.chains[found]
        backend, layout = self._backends[wanted.space], self.plan.spaces[wanted.space].identity.layout
        count, wrong = read(backend, layout, keys_of(found)[: wanted.length])
        assert not wrong, f"wrong bytes for {wrong}"
        assert self.plan.tight or count == wanted.length, f"{count} of {wanted} are left"

    def _delete(self) -> None:
        found = self._pick()
        if found is not None:
            at = self._place(found)
            space = self.model.chains[found].space
            self.say(f"deletes {found} {at}")
            self._backends[space].delete([keys_of(found)[at]])
            self.say(f"deleted {found} {at}")

    def _clear(self, space: int) -> None:
        names = self.model.of_space(space)
        self.say(f"clears {space}")
        self._backends[space].clear()
        for start in range(0, len(names), 50):  # a line is written whole up to 4096 bytes
            self.say(f"cleared {','.join(names[start : start + 50])}")

    # ---- choosing -------------------------------------------------------------------------------

    @property
    def _clearable(self) -> list[int]:
        return self._own if self.alone else [self.number]

    def _pick(self) -> str | None:
        """One of the newest chains that nobody else changes."""
        newest = islice(reversed(self.model.chains.items()), 60)
        mine = [name for name, each in newest if self._may_change(each)]
        return self.rng.choice(mine) if mine else None

    def _may_change(self, each: Chain) -> bool:
        shared = each.space >= self.plan.writers
        return self.alone or each.space == self.number or (shared and each.writer == self.number)

    def _place(self, name: str) -> int:
        return self.rng.randrange(self.model.chains[name].length)

    def _new(self, space: int, parent: str, at: int) -> tuple[str, Chain]:
        self._written += 1
        return f"{self._name}.{self._written}", Chain(space, parent, at, self.rng.randint(1, MAX_LENGTH), self.number)

    def _store(self, chains: list[tuple[str, Chain]]) -> None:
        space = chains[0][1].space
        layout = self.plan.spaces[space].identity.layout
        runs = []
        for name, each in chains:
            keys = keys_of(name)[: each.length]
            pages = blank_pages(layout, len(keys))
            for key, page in zip(keys, pages):
                page[: layout.page_bytes] = content(layout.page_bytes, key)
            runs.append(PageRun(keys, pages, each.parent_key))
        counts = self._backends[space].write(runs)
        assert self.plan.tight or counts == [each.length for _, each in chains], f"{counts} of {chains} stored"
        for (name, each), count in zip(chains, counts):
            self.say(f"stored {name} {each.parent or '-'} {space} {each.at} {count} {self.number}")


def open_backends(path: Path, plan: Plan) -> list[LmdbBackend]:
    return [
        LmdbBackend(
            path,
            space.identity,
            plan.budget_bytes,
            plan.values,
            eviction=space.eviction,
            ttl=space.ttl,
            quota_bytes=space.quota_bytes,
        )
        for space in plan.spaces
    ]


def die_at(countdown: int) -> None:
    """Have this process kill itself before or after one of the coming steps that change a file or the index."""

    def step() -> None:
        nonlocal countdown
        countdown -= 1
        if not countdown:
            os.kill(os.getpid(), signal.SIGKILL)

    def mined(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def stepped(*args: Any) -> Any:
            step()
            result = call(*args)
            step()
            return result

        return stepped

    for owner, names in (
        (os, ("pwritev", "posix_fallocate", "truncate", "ftruncate", "fdatasync", "write")),
        (SlabFile, ("release",)),
        (IndexWriter, ("save",)),
        (StoreFolder, ("begin_session", "end_session", "share", "release")),
    ):
        for name in names:
            setattr(owner, name, mined(getattr(owner, name)))


# ---- the checker --------------------------------------------------------------------------------


def check(path: Path, model: Model, writer: int | None) -> Iterator[str]:
    """Open the store, compare everything; yields what is wrong, and how much was looked at."""
    plan = model.plan
    backends = open_backends(path, plan)
    store = backends[0]._store
    records, problems, used = store.view(_look), store.view(audit_view), store.used_bytes
    yield from problems
    if used > plan.budget_bytes:
        yield f"{used} bytes of {plan.budget_bytes} are used"
    looked_at = 0
    for space, backend in zip(plan.spaces, backends):
        looked_at += yield from _check_pages(backend, space, records)
    promised = 0
    for name, each in model.promised(writer):
        missing = [key for key in keys_of(name)[: each.length] if key not in records]
        promised += each.length
        if missing:
            yield f"chain {name}, {each}: lost {len(missing)} pages"
    back = [key.hex() for key in model.gone if key in records]
    if back:
        yield f"{len(back)} pages are back that had been removed, as {back[0]}"
    for backend in backends:
        if not plan.tight and (evicted := backend.usage().evicted_pages):
            yield f"{evicted} pages were evicted: the campaign's budget is too small"
        backend.close()
    if list(path.parent.glob(f"{path.name}.aside-*")):
        yield "the store was set aside"
    yield f"checked {looked_at} {promised}"


def _look(view: IndexView) -> dict[bytes, int]:
    """The namespace of each page that the index names."""
    return {key: PageRecord.unpack(key, raw).space for key, raw in view.txn.cursor(view.databases.pages)}


def _check_pages(backend: LmdbBackend, space: Space, records: dict[bytes, int]) -> Generator[str, None, int]:
    """Read every page of a namespace; returns how many there were."""
    keys = [key for key, number in records.items() if number == backend._number]
    if space.ttl:
        keys = [key for key in keys if backend.contains_prefix([key])]  # the others' time is up
    for start in range(0, len(keys), 256):
        part = keys[start : start + 256]
        count, wrong = read(backend, space.identity.layout, part)
        if wrong:
            yield f"{len(wrong)} pages of {space} have wrong bytes, as {wrong[0].hex()}"
        if count < len(part) and not space.ttl:
            yield f"page {part[count].hex()} of {space} cannot be read"
    return len(keys)


# ---- the campaign -------------------------------------------------------------------------------


@dataclass
class Child:
    """A forked process and the pipe that it says something over."""

    pid: int
    pipe: int
    rest: bytes = b""
    lines: int = 0

    def read_lines(self, seconds: float) -> list[str] | None:
        """What it says within that time; None at its end."""
        if not select.select([self.pipe], [], [], max(0.0, seconds))[0]:
            return []
        data = os.read(self.pipe, 1 << 16)
        *whole, self.rest = (self.rest + data).split(b"\n")
        self.lines += len(whole)
        return [line.decode() for line in whole] if data else None

    def wait(self) -> int:
        """Returns how it ended, as `subprocess` has it."""
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> int:
        """Kill it if it still runs; returns how it ended."""
        os.kill(self.pid, signal.SIGKILL)  # there until it is waited for, even if it has ended
        return self.wait()


def fork(work: Callable[[int], None]) -> Child:
    """Call `work` in a child, with the pipe to write to."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader)
    status = 1
    try:
        os.close(reader)
        work(writer)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class CampaignError(Exception):
    """A promise was broken."""


@dataclass
class Campaign:
    plan: Plan
    path: Path
    seed: int
    kills: int = 0
    rounds: int = 0
    pages: int = 0
    promised: int = 0
    acknowledged: int = 0
    model: Model = field(init=False)
    running: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Model(self.plan)

    def run(self, kills: int) -> None:
        try:
            while self.kills < kills:
                rng = random.Random(f"{self.seed}/{self.rounds}")
                survivor = self._round(rng)
                self.rounds += 1
                # Now and then the next writer finds what the killed one left, not what a checker made of it.
                if rng.random() < 0.75 or self.kills >= kills:
                    self._check(survivor)
        finally:
            for child in self.running:
                child.end()

    def _round(self, rng: random.Random) -> int | None:
        """Kill a writer, and the other if there is one; returns whose newest pages are promised, if not everybody's."""
        two = self.plan.writers == 2 and rng.random() < 0.8
        other = self._start(rng, 1, two, 0) if two else None
        if other is not None:
            self._follow(other, None, lines=1)
        way = rng.choice(("time", "time", "opening", "count"))
        countdown = int(2 ** rng.uniform(0, 8)) if way == "count" else 0
        victim = self._start(rng, 0, two, countdown)
        if way == "time":
            self._follow(victim, other, lines=1)
        seconds = {"time": rng.uniform(0, 0.2), "opening": rng.uniform(0, 0.02), "count": PATIENCE}[way]
        if not self._follow(victim, other, seconds) and way == "count":
            raise CampaignError(f"writer 0 is not at its step {countdown} after {seconds:.0f} s")
        self._kill(victim)
        if other is None:
            return None
        self._follow(other, None, lines=other.lines + rng.randint(3, 20))
        self._kill(other)
        return 1

    def _start(self, rng: random.Random, number: int, two: bool, countdown: int) -> Child:
        name = f"{self.seed}/{self.rounds}"

        def write(pipe: int) -> None:
            if countdown:
                die_at(countdown)
            Writer(number, not two, name, self.path, self.model, pipe).run()

        child = fork(write)
        self.running.append(child)
        return child

    def _follow(self, child: Child, other: Child | None, seconds: float = PATIENCE, lines: int | None = None) -> bool:
        """Take in what a writer says, and the other one, until the time is over or so many lines were said.

        False if the time was over first. Raises CampaignError for a writer that says nothing.
        """
        until = time.monotonic() + seconds
        while lines is None or child.lines < lines:
            left = until - time.monotonic()
            if left <= 0:
                if lines is not None:
                    raise CampaignError(f"a writer hangs after {child.lines} lines")
                return False
            heard = child.read_lines(min(left, 0.02))
            if heard is None:
                return True
            self._take(heard)
            if other is not None:
                self._take(other.read_lines(0) or [])
        return True

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            self.model.follow(line)
            self.acknowledged += line.startswith(("stored", "deleted", "cleared"))

    def _kill(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGKILL)
        while (heard := child.read_lines(PATIENCE)) is not None:
            self._take(heard)
        self.running.remove(child)
        status = child.end()
        if status != -signal.SIGKILL:
            raise CampaignError(f"a writer ended by itself, with {status}")
        self.kills += 1

    def _check(self, writer: int | None) -> None:
        def look(pipe: int) -> None:
            for problem in check(self.path, self.model, writer):
                os.write(pipe, problem[:4000].encode() + b"\n")

        child, said = fork(look), list[str]()
        while (heard := child.read_lines(PATIENCE)) is not None:
            said += heard
        status = child.wait()
        if status or not said or not said[-1].startswith("checked"):
            raise CampaignError(f"the checker ended with {status}: {said}")
        if said[:-1]:
            raise CampaignError("; ".join(said[:-1]))
        looked_at, promised = map(int, said[-1].split()[1:])
        self.pages += looked_at
        self.promised += promised


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill writers of a store and look the store over.")
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    campaign = Campaign(PLANS[options.plan], options.folder / "store", options.seed)
    try:
        campaign.run(options.kills)
    except CampaignError as error:
        sys.exit(f"plan {options.plan}, seed {options.seed}, round {campaign.rounds}: {error}")
    counts = ("kills", "rounds", "acknowledged", "pages", "promised")
    print(json.dumps({name: getattr(campaign, name) for name in counts}))


if __name__ == "__main__":
    main()
