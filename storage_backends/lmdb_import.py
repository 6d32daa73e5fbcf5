"""Taking the pages of a file into a store, beside engines that use it. The file: `lmdb_exchange`."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hicache.errors import ConfigError, StoreCorruptError
from hicache.hashing import DIGEST_BYTES, Field
from hicache.layout import KVLayout, round_up
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import BudgetPlan, ValuesMode, inline_cost
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.codecs import create_codec
from hicache.storage_backends.lmdb_exchange import End, FrameReader, Header, Page, SpaceInfo
from hicache.storage_backends.lmdb_index import POLICIES, IndexView
from hicache.storage_backends.lmdb_schema import BLOCK_BYTES, Encoded, NewPage, Space
from hicache.storage_backends.lmdb_spaces import space_of
from hicache.storage_backends.lmdb_store import Store
from hicache.storage_backends.lmdb_verify import READ_BYTES, Progress

BATCH_PAGES = 512
"""Pages written at a time, if they have no more than READ_BYTES together and take no more than an eighth of the store:
nothing of a batch makes room for the rest of it."""


@dataclass
class Imported:
    """Pages of the file: `stored` now, `present` before, `damaged` in the file, `left_out` because there was no room
    or their parent is missing. `evicted`: pages that went meanwhile, of the file or not.
    `trouble`: why the file was not read to its end, "" if it was."""

    stored: int = 0
    present: int = 0
    damaged: int = 0
    left_out: int = 0
    nbytes: int = 0
    evicted: int = 0
    trouble: str = ""

    @property
    def pages(self) -> int:
        return self.stored + self.present + self.damaged + self.left_out


@dataclass(frozen=True)
class SpaceForm:
    """`slots`: sizes, ascending, of the slots that a namespace's pages are put in."""

    info: SpaceInfo
    slots: tuple[int, ...]


class _Read(NamedTuple):
    """A page of the file that matches its checksum. `place`: its bytes, and the rest of its slot."""

    page: Page
    place: memoryview


def space_forms(header: Header) -> dict[int, SpaceForm]:
    """What the namespaces of a file need. Raises ConfigError if this version does not know one of them."""
    return {info.number: SpaceForm(info, _slots(info)) for info in header.spaces}


def plan_for(forms: Mapping[int, SpaceForm], values: ValuesMode, budget_bytes: int) -> BudgetPlan:
    """How a store for the pages of a file is begun."""
    largest = max((form.slots[-1] for form in forms.values()), default=BLOCK_BYTES)
    return BudgetPlan(values, budget_bytes, inline_cost(largest) if values == "inline" else largest)


def import_pages(
    store: Store,
    reader: FrameReader,
    forms: Mapping[int, SpaceForm],
    progress: Progress = lambda pages, nbytes: None,
) -> Imported:
    """Write the pages of a file whose header has been read. Can be repeated: what is there is not written again.

    Memory: 64 MiB, and 200 bytes for each page with several children. Raises StoreUnavailableError, as when the disk
    is full, and OSError if the file cannot be read: what was written until then stays.
    """
    return _Import(store, reader, forms, progress).run()


class _Import:
    def __init__(self, store: Store, reader: FrameReader, forms: Mapping[int, SpaceForm], progress: Progress) -> None:
        self._store = store
        self._file = reader
        self._forms = forms
        self._progress = progress
        self._numbers: dict[int, int] = {}  # of the file's namespaces in the store
        self._forks: Counter[bytes] = Counter()  # pages of which so many children are still to come
        self._arena = memoryview(mmap.mmap(-1, READ_BYTES + max((f.slots[-1] for f in forms.values()), default=0)))
        self._used = 0
        self._most = min(READ_BYTES, store.view(lambda view: view.state().data_bytes) // 8)
        self._done = Imported()

    def run(self) -> Imported:
        evicted = self._store.view(_evicted)
        self._take_all()
        self._done.evicted = max(0, self._store.view(_evicted) - evicted)
        return self._done

    def _take_all(self) -> None:
        batch: list[_Read] = []
        try:
            while not isinstance(frame := self._file.next(), End):
                if isinstance(frame, Header):
                    raise StoreCorruptError("there is a second header")
                if batch and (frame.space != batch[0].page.space or self._is_full(batch)):
                    self._write(batch)
                    batch = []
                read = self._read(frame)
                if read is not None:
                    batch.append(read)
        except (StoreCorruptError, ConfigError) as error:
            self._done.trouble = str(error)
        if batch:
            self._write(batch)

    def _is_full(self, batch: Sequence[_Read]) -> bool:
        return self._used + len(batch) * BLOCK_BYTES >= self._most or len(batch) >= BATCH_PAGES

    def _read(self, page: Page) -> _Read | None:
        """The next page of the file, None if it is damaged."""
        form = self._forms.get(page.space)
        keys = [key for key in (page.key, page.parent) if key is not None]
        if form is None or not 0 < page.length <= form.slots[-1] or any(len(key) != DIGEST_BYTES for key in keys):
            raise StoreCorruptError(f"there is a page that cannot be before byte {self._file.position}")
        place = self._arena[self._used : self._used + _slot_for(form, page)]
        self._file.fill(place[: page.length])
        self._note_family(page)
        if page_checksum(page.key, place[: page.length]) != page.checksum:
            self._done.damaged += 1
            return None
        self._used += place.nbytes
        return _Read(page, place)

    def _note_family(self, page: Page) -> None:
        """A page with children to come is not evicted meanwhile: they could not be stored without it."""
        parent = page.parent
        if parent is not None and parent in self._forks:
            self._forks[parent] -= 1
            if not self._forks[parent]:
                del self._forks[parent]
        if page.children > 1:
            self._forks[page.key] = page.children

    def _write(self, batch: Sequence[_Read]) -> None:
        pages = {read.page.key: read for read in batch}
        number = self._number_of(self._forms[batch[0].page.space].info)
        present = self._store.view(lambda view: sum(view.has(key) for key in pages))

        def encode(page: NewPage) -> Encoded:
            read = pages[page.key]
            return Encoded(read.page.length, read.place.nbytes, read.place, read.page.checksum)

        counts = self._store.write(number, list(_runs(list(pages.values()))), encode, kept=self._forks.keys())
        self._done.present += present + len(batch) - len(pages)
        self._done.stored += max(0, sum(counts) - present)
        self._done.left_out += len(pages) - max(present, sum(counts))
        self._done.nbytes += sum(read.page.length for read in batch)
        self._used = 0
        self._progress(self._done.pages, self._done.nbytes)

    def _number_of(self, info: SpaceInfo) -> int:
        """The store's number of a namespace, which is begun if need be; one that is there keeps its rules."""
        if info.number not in self._numbers:
            number = self._store.view(lambda view: space_of(view, info.label))
            rules = Space(policy=info.policy, quota=info.quota, ttl_us=info.ttl_us)
            self._numbers[info.number] = self._store.join_space(info.label, rules) if number is None else number
        return self._numbers[info.number]


def _evicted(view: IndexView) -> int:
    return sum(space.evicted for space in view.spaces().values())


def _runs(batch: Sequence[_Read]) -> Iterator[PageRun]:
    """The pages, each run of parents and children in one."""
    start = 0
    for number in range(1, len(batch) + 1):
        if number == len(batch) or batch[number].page.parent != batch[number - 1].page.key:
            part = batch[start:number]
            yield PageRun([read.page.key for read in part], [read.place for read in part], part[0].page.parent)
            start = number


def _slot_for(form: SpaceForm, page: Page) -> int:
    """Size of the slot that a page is put in: the one it had, if its codec makes such slots."""
    if page.slot_bytes in form.slots and page.slot_bytes >= page.length:
        return page.slot_bytes
    return next(size for size in form.slots if size >= page.length)


def _slots(info: SpaceInfo) -> tuple[int, ...]:
    layout = _layout(info)
    name = info.label.get("codec")
    if not isinstance(name, str) or not 0 <= info.policy < len(POLICIES):
        raise _unknown(info, "codec or policy")
    codec = create_codec(name, layout)
    return codec.slot_bytes if codec is not None else (round_up(layout.page_bytes, BLOCK_BYTES),)


def _layout(info: SpaceInfo) -> KVLayout:
    prefix = "layout."
    fields: dict[str, Field] = {
        name.removeprefix(prefix): value for name, value in info.label.items() if name.startswith(prefix)
    }
    try:
        return KVLayout(**fields)  # type: ignore[arg-type] # checked by what comes of it
    except TypeError as error:
        raise _unknown(info, "layout") from error


def _unknown(info: SpaceInfo, what: str) -> ConfigError:
    return ConfigError(f"namespace {info.number} of the file has a {what} that this version does not know")
