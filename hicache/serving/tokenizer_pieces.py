"""A tokenizer of scored pieces with byte fallback: llama2.c's, and "llama" in GGUF files (SentencePiece BPE)."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache.errors import ConfigError

_NAMES = ("<unk>", "<s>", "</s>")


@dataclass
class _Piece:
    """A piece of the text, in a list linked in both directions."""

    text: str
    left: int
    right: int


@dataclass(frozen=True)
class PieceTokenizer:
    """Pieces with scores: of neighbours that join to a known piece, the pair with the highest score joins first.

    `space` is how the pieces write a blank. Pieces "<0xNN>" are single bytes. `bos` precedes prompts, if any.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    control: frozenset[int]
    bos: int | None
    space: str = " "
    add_prefix: bool = True
    _ids: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids = {piece: index for index, piece in reversed(list(enumerate(self.pieces)))}
        object.__setattr__(self, "_ids", ids)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; a blank is put before the text, and BOS before that if `special`."""
        start = [self.bos] if special and self.bos is not None else []
        if not text:
            return start
        marked = (" " + text if self.add_prefix else text).replace(" ", self.space)
        return start + [token for piece in self._merge(marked) for token in self._tokens(piece)]

    def token_bytes(self, token: int) -> bytes:
        """The piece as text, the byte it stands for, or b"" for control tokens and unknown ids."""
        if not 0 <= token < len(self.pieces) or token in self.control:
            return b""
        piece = self.pieces[token]
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(self.space, " ").encode()

    def token_id(self, content: str) -> int | None:
        """The id of a piece by its text."""
        return self._ids.get(content)

    def _merge(self, text: str) -> list[str]:
        """Pieces of `text`, joined from characters by descending score, leftmost first among equals."""
        last = len(text) - 1
        pieces = [_Piece(char, i - 1, i + 1 if i < last else -1) for i, char in enumerate(text)]
        queue: list[tuple[float, int, str]] = []
        for index in range(last):
            self._offer(pieces, index, queue)
        while queue:
            _, index, joined = heapq.heappop(queue)
            self._join(pieces, index, joined, queue)
        return [piece.text for piece in pieces if piece.text]

    def _offer(self, pieces: list[_Piece], index: int, queue: list[tuple[float, int, str]]) -> None:
        """Queue the joint of a piece and its right neighbour, if that is a piece."""
        if index < 0 or pieces[index].right < 0:
            return
        joined = pieces[index].text + pieces[pieces[index].right].text
        token = self._ids.get(joined)
        if token is not None:
            heapq.heappush(queue, (-self.scores[token], index, joined))

    def _join(self, pieces: list[_Piece], index: int, joined: str, queue: list[tuple[float, int, str]]) -> None:
        left = pieces[index]
        if not left.text or left.right < 0 or left.text + pieces[left.right].text != joined:
            return  # one of the two has been joined otherwise since
        gone = pieces[left.right]
        left.text, gone.text, left.right = joined, "", gone.right
        if left.right >= 0:
            pieces[left.right].left = index
        self._offer(pieces, left.left, queue)
        self._offer(pieces, index, queue)

    def _tokens(self, piece: str) -> list[int]:
        """The piece's id, else those of its bytes, else that of "<unk>"."""
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        fallback = [self._ids.get(f"<0x{byte:02X}>", self._ids.get("<unk>")) for byte in piece.encode()]
        return [token for token in fallback if token is not None]


def load_llama2c_tokenizer(path: Path, vocab: int) -> PieceTokenizer:
    """Read llama2.c's tokenizer.bin: uint32 longest piece, then for each of `vocab` pieces a float32 score, an int32
    length and its bytes. Ids 1 and 2 are BOS and EOS. Raises ConfigError for another file."""
    data, offset = path.read_bytes(), 4
    pieces, scores = [], []
    try:
        for _ in range(vocab):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8
            pieces.append(struct.unpack_from(f"{length}s", data, offset)[0].decode("utf-8", "replace"))
            scores.append(score)
            offset += length
    except struct.error as error:
        raise ConfigError(f"{path}: piece {len(pieces)} of {vocab} is cut off at byte {offset}") from error
    if offset != len(data):
        raise ConfigError(f"{path}: {len(data) - offset} bytes follow the {vocab} pieces, it is another model's file")
    pieces[:3] = _NAMES
    return PieceTokenizer(pieces, scores, control=frozenset({0, 1, 2}), bos=1)
