"""Tokenizers of the `tokenizers` library: a tokenizer.json, or one put together from the vocabulary in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
from hicache.serving.optional import need

_PURPOSE = "a Hugging Face tokenizer"

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPLITS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3, "gpt-2": None, "default": None, "smollm": None}
"""How GGUF's `tokenizer.ggml.pre` divides text into words: a pattern, or None for GPT-2's."""


class HFTokenizer:
    """A `tokenizers.Tokenizer` whose pieces are bytes: byte-level BPE, or SentencePiece with byte fallback."""

    def __init__(self, inner: Any, place: str, bos: int | None = None) -> None:
        self._inner = inner
        self._bos = bos
        described = json.loads(inner.to_str())
        decoder = json.dumps(described.get("decoder"))
        if '"ByteLevel"' not in decoder and '"ByteFallback"' not in decoder:
            raise ConfigError(f"{place}: its decoder is neither ByteLevel nor ByteFallback")
        self._unpack = _from_byte_level if '"ByteLevel"' in decoder else _from_sentencepiece
        added = described.get("added_tokens") or []
        self._added = {token["id"]: b"" if token["special"] else token["content"].encode() for token in added}

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        highest: int = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        return highest + 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; names of control tokens in `text` become those tokens."""
        ids = list(self._inner.encode(text, add_special_tokens=special).ids)
        return [self._bos, *ids] if special and self._bos is not None else ids

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, b"" for control tokens and unknown ids."""
        if token in self._added:
            return self._added[token]
        piece = self._inner.id_to_token(token) if token >= 0 else None
        return b"" if piece is None else self._unpack(piece)

    def token_id(self, content: str) -> int | None:
        """The id of a token by its name."""
        token: int | None = self._inner.token_to_id(content)
        return token


def load_hf_tokenizer(path: Path) -> HFTokenizer:
    """Read a tokenizer.json. Raises ConfigError if it is unreadable or works on something else than bytes."""
    tokenizers = need("tokenizers", _PURPOSE)
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: {error}") from error
    return HFTokenizer(inner, str(path))


def byte_level_bpe(
    pieces: Sequence[str], merges: Iterable[str], pre: str, added: Iterable[tuple[str, bool]], bos: int | None
) -> HFTokenizer:
    """GPT-2's tokenizer from its parts; `added` are tokens kept whole, each with whether it is a control token.

    Raises ConfigError if `pre` is not one of SPLITS.
    """
    if pre not in SPLITS:
        raise ConfigError(f"pre-tokenizer {pre!r} is unknown, use one of {', '.join(SPLITS)}")
    tokenizers = need("tokenizers", _PURPOSE)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=pairs, fuse_unk=False)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(_words(tokenizers, pre))
    inner.decoder = tokenizers.decoders.ByteLevel()
    for content, special in added:
        token = tokenizers.AddedToken(content, special=special, normalized=False)
        (inner.add_special_tokens if special else inner.add_tokens)([token])
    return HFTokenizer(inner, "the GGUF vocabulary", bos)


def _words(tokenizers: Any, pre: str) -> list[Any]:
    split, steps = SPLITS[pre], tokenizers.pre_tokenizers
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    if split is None:
        return [*digits, steps.ByteLevel(add_prefix_space=False, use_regex=True)]
    words = steps.Split(tokenizers.Regex(split), behavior="isolated")
    return [words, steps.ByteLevel(add_prefix_space=False, use_regex=False)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others for U+0100 and on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(piece: str) -> bytes:
    return b"".join(bytes([_ALPHABET[char]]) if char in _ALPHABET else char.encode() for char in piece)


def _from_sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
