"""Readers of request traces: trie CSV, Mooncake JSONL and Qwen-Bailian JSONL, plain or gzipped.

The format is told from the content, never from the name of the file:

    # block_size=512 ...                                      trie CSV
    t_ms,session,in_tokens,out_tokens,attach,new
    {"timestamp": 0, "input_length": 6758, ...}               Mooncake: ms, blocks of 512 tokens
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.1, …} Bailian: s, blocks of 16 tokens
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.errors import TraceError
from hicache.sim.trie import BlockTrie
from hicache.sim.workload import TOKEN_LIMIT, BlockPrompt, TraceRequest, private_token

GZIP_MAGIC = b"\x1f\x8b"
TRIE_COLUMNS = ("t_ms", "session", "in_tokens", "out_tokens", "attach", "new")
MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
MAX_REQUESTS = 2**24
"""Requests of one trace; leaves TOKEN_LIMIT - MAX_REQUESTS token ids to the blocks."""

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Time = Annotated[float, msgspec.Meta(ge=0, le=4e18)]
"""In the unit of the format, or an epoch in s, ms, µs or ns: 4e18 ns is the year 2096."""

EPOCH = 1e9
"""A first timestamp from here on is an epoch: as seconds 2001-09-09, as ms 11 days after the start of a trace."""

_MS_OF_EPOCH = ((1e11, 1e3), (1e14, 1.0), (1e17, 1e-3), (math.inf, 1e-6))
"""Below which value an epoch is in s, ms, µs or ns, and its unit in ms: any date of 2001 to 2096 is below one only."""

Line = tuple[int, str]
"""Line number from 1, and the line without its end."""


class MooncakeLine(msgspec.Struct):
    timestamp: Time
    input_length: Positive
    output_length: NotNegative
    hash_ids: list[NotNegative]


class BailianLine(msgspec.Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: Time
    input_length: Positive
    output_length: NotNegative
    hash_ids: list[NotNegative]


class TrieLine(msgspec.Struct):
    t_ms: Time
    session: int
    in_tokens: Positive
    out_tokens: NotNegative
    attach: Annotated[int, msgspec.Meta(ge=-1)]
    new: NotNegative


def in_order(requests: Sequence[TraceRequest]) -> tuple[list[TraceRequest], int]:
    """The requests by time of arrival, those of one time in their order, and how many were not in it. An epoch becomes
    time since the first arrival."""
    late = sum(after.arrival_ms < before.arrival_ms for before, after in itertools.pairwise(requests))
    found = sorted(requests, key=lambda request: request.arrival_ms) if late else list(requests)
    start = found[0].arrival_ms if found else 0.0
    if start >= EPOCH:
        found = [replace(request, arrival_ms=request.arrival_ms - start) for request in found]
    return found, late


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests of a trace file, in its order; only compact block ids are held.

    Timestamps are in the unit of the format; a first one that is an epoch says its unit by its size. Raises TraceError,
    naming file and line, at the first line that cannot be used.
    """
    return islice(_requests(path), limit)


def _requests(path: Path) -> Iterator[TraceRequest]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the file is empty; give a trie CSV, Mooncake or Bailian trace")
    parse = _reader(path, first)(path, chain([first], lines))
    request = next(parse, None)
    if request is None:
        raise TraceError(f"{path}:{first[0]}: a header and no request; add request lines below it")
    yield request
    yield from parse


def _lines(path: Path) -> Iterator[Line]:
    """Lines that are not blank, with their numbers."""
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                if line := _decode(path, number, raw):
                    yield number, line
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; check the path of the trace") from None
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the gzip data is damaged ({error}); fetch the file again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _decode(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError:
        raise TraceError(f"{path}:{number}: not UTF-8 text; give a trie CSV or JSONL trace") from None


def _reader(path: Path, first: Line) -> type[_TrieReader] | type[_MooncakeReader] | type[_BailianReader]:
    number, line = first
    if line.startswith("{"):
        return _BailianReader if '"chat_id"' in line else _MooncakeReader
    if line.startswith("#"):
        return _TrieReader
    raise TraceError(
        f"{path}:{number}: neither a trie CSV ('# block_size=512 ...') nor a JSON object; "
        "the trace formats are trie CSV, Mooncake JSONL and Bailian JSONL"
    )


class _Reader:
    """Iterates over the requests of one file; keeps what later lines refer to."""

    form: ClassVar[str]
    """What a line must look like, for error messages."""

    time_unit: ClassVar[float] = 1.0
    """Of the format's timestamps, in ms."""

    def __init__(self, path: Path, lines: Iterator[Line]) -> None:
        self._path = path
        self._lines = lines
        self._count = 0
        self._unit: float | None = None
        self.block_size = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        return self

    def __next__(self) -> TraceRequest:
        number, line = next(self._lines)
        try:
            request = self._parse(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self._path}:{number}: {error}; a line must be {self.form}") from None
        except ValueError as error:
            raise TraceError(f"{self._path}:{number}: {error}") from None
        self._count += 1
        return request

    def _parse(self, line: str) -> TraceRequest:
        raise NotImplementedError

    def _arrival(self, time: float) -> float:
        """In ms; the first timestamp of the file decides the unit of all."""
        if self._unit is None:
            self._unit = self.time_unit
            if time >= EPOCH:
                self._unit = next(unit for below, unit in _MS_OF_EPOCH if time < below)
        return time * self._unit

    def _prompt(self, blocks: npt.NDArray[np.int32], length: int) -> BlockPrompt:
        whole, rest = divmod(length, self.block_size)
        if not whole <= len(blocks) <= whole + bool(rest):
            expected = f"{whole}" if not rest else f"{whole} or {whole + 1}"
            raise ValueError(
                f"{len(blocks)} blocks for a prompt of {length} tokens; "
                f"at {self.block_size} tokens a block it must have {expected}"
            )
        return BlockPrompt(blocks, self.block_size, length, private_token(self._count))

    def _check_room(self, num_blocks: int) -> None:
        """Token ids of all blocks must fit beside the private ones."""
        if num_blocks * self.block_size > TOKEN_LIMIT - MAX_REQUESTS or self._count >= MAX_REQUESTS:
            raise ValueError(
                f"block {num_blocks - 1} of request {self._count} does not fit int32 token ids; "
                f"read fewer requests (--limit {self._count})"
            )


class _TrieReader(_Reader):
    form = ",".join(TRIE_COLUMNS)

    def __init__(self, path: Path, lines: Iterator[Line]) -> None:
        super().__init__(path, lines)
        self._trie = BlockTrie()
        self.block_size = self._header()

    def _header(self) -> int:
        number, comment = next(self._lines)
        size = re.search(r"\bblock_size=([1-9]\d*)\b", comment)
        if size is None:
            raise TraceError(f"{self._path}:{number}: no block_size in the comment; write '# block_size=TOKENS'")
        number, columns = next(self._lines, (number + 1, ""))
        if tuple(columns.split(",")) != TRIE_COLUMNS:
            raise TraceError(f"{self._path}:{number}: the columns must be {self.form}")
        return int(size[1])

    def _parse(self, line: str) -> TraceRequest:
        values = line.split(",")
        if len(values) != len(TRIE_COLUMNS):
            raise ValueError(f"{len(values)} values instead of {len(TRIE_COLUMNS)}; a line must be {self.form}")
        row = msgspec.convert(dict(zip(TRIE_COLUMNS, values, strict=True)), TrieLine, strict=False)
        if row.attach >= self._trie.num_blocks:
            raise ValueError(
                f"attach is {row.attach} and only {self._trie.num_blocks} blocks came before; "
                "name an earlier block, or -1"
            )
        self._check_room(self._trie.num_blocks + row.new)
        path = self._trie.path(self._trie.add(row.attach, row.new))
        session = None if row.session < 0 else str(row.session)
        return TraceRequest(
            str(self._count), self._arrival(row.t_ms), session, self._prompt(path, row.in_tokens), row.out_tokens
        )


class _JsonlReader(_Reader):
    """JSONL with `hash_ids`: numbered anew in order of appearance, so that large ids fit too."""

    def __init__(self, path: Path, lines: Iterator[Line]) -> None:
        super().__init__(path, lines)
        self._blocks: dict[int, int] = {}

    def _hashed_prompt(self, hash_ids: list[int], length: int) -> BlockPrompt:
        seen = self._blocks
        blocks = np.array([seen.setdefault(block, len(seen)) for block in hash_ids], np.int32)
        self._check_room(len(seen))
        return self._prompt(blocks, length)


class _MooncakeReader(_JsonlReader):
    form = '{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [...]}'

    def __init__(self, path: Path, lines: Iterator[Line]) -> None:
        super().__init__(path, lines)
        self.block_size = MOONCAKE_BLOCK
        self._decoder = msgspec.json.Decoder(MooncakeLine)

    def _parse(self, line: str) -> TraceRequest:
        row = self._decoder.decode(line)
        prompt = self._hashed_prompt(row.hash_ids, row.input_length)
        return TraceRequest(str(self._count), self._arrival(row.timestamp), None, prompt, row.output_length)


class _BailianReader(_JsonlReader):
    time_unit = 1000.0
    form = (
        '{"chat_id": N, "parent_chat_id": N, "timestamp": S, "input_length": N, "output_length": N, "hash_ids": [...]}'
    )

    def __init__(self, path: Path, lines: Iterator[Line]) -> None:
        super().__init__(path, lines)
        self.block_size = BAILIAN_BLOCK
        self._decoder = msgspec.json.Decoder(BailianLine)
        self._root: dict[int, int] = {}

    def _parse(self, line: str) -> TraceRequest:
        row = self._decoder.decode(line)
        prompt = self._hashed_prompt(row.hash_ids, row.input_length)
        parent = row.parent_chat_id
        root = self._root[row.chat_id] = row.chat_id if parent < 0 else self._root.get(parent, parent)
        return TraceRequest(str(self._count), self._arrival(row.timestamp), str(root), prompt, row.output_length)
