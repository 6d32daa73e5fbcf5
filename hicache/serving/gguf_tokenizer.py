"""The tokenizer and chat template that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
from hicache.serving.chat import ChatFormat
from hicache.serving.tokenizer import Tokenizer
from hicache.serving.tokenizer_hf import byte_level_bpe
from hicache.serving.tokenizer_pieces import PieceTokenizer

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of token_type

Field = Callable[[str, Any], Any]


def gguf_tokenizer(path: Path, field: Field) -> Tokenizer | None:
    """The file's tokenizer, None if it has none. Raises ConfigError, with the path, for kinds not understood."""
    kind = field(_KEY + "model", None)
    if kind is None:
        return None
    pieces = field(_KEY + "tokens", None)
    if not pieces:
        raise ConfigError(f"{path}: {_KEY}tokens is missing")
    types = field(_KEY + "token_type", None) or [1] * len(pieces)
    bos = field(_KEY + "bos_token_id", None) if field(_KEY + "add_bos_token", kind == "llama") else None
    try:
        return _make(kind, field, pieces, types, bos)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _make(kind: str, field: Field, pieces: list[str], types: list[int], bos: int | None) -> Tokenizer:
    if kind == "gpt2":
        whole = [(piece, t == _CONTROL) for piece, t in zip(pieces, types) if t in (_CONTROL, _USER_DEFINED)]
        merges = field(_KEY + "merges", None) or []
        return byte_level_bpe(pieces, merges, field(_KEY + "pre", "default"), whole, bos)
    if kind == "llama":
        scores = field(_KEY + "scores", None) or [0.0] * len(pieces)
        control = frozenset(token for token, t in enumerate(types) if t in (_UNKNOWN, _CONTROL))
        return PieceTokenizer(pieces, scores, control, bos, "▁", field(_KEY + "add_space_prefix", True))
    raise ConfigError(f"tokenizer {kind!r} is unknown, use gpt2 or llama")


def gguf_chat_format(field: Field) -> ChatFormat:
    """The template and the names of BOS and EOS."""
    pieces = field(_KEY + "tokens", None) or []
    tokens = {name: _piece(pieces, field(f"{_KEY}{name}_id", None)) for name in ("bos_token", "eos_token")}
    return ChatFormat(field("tokenizer.chat_template", None), {name: token for name, token in tokens.items() if token})


def _piece(pieces: list[str], token: int | None) -> str:
    return pieces[token] if token is not None and token < len(pieces) else ""
