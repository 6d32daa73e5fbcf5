"""What the engine needs of a tokenizer, streaming of text, and the tokenizer of the random model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size-1."""
        ...

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`. `special` adds what the model expects around a prompt, such as BOS; chat templates
        write that themselves."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The piece of UTF-8 text that a token stands for, maybe not whole characters; b"" for control tokens and
        for ids that the tokenizer does not know."""
        ...

    def token_id(self, content: str) -> int | None:
        """The id of a token by its name, such as "<|im_end|>"; None without it."""
        ...


class Detokenizer:
    """Text of one answer as its tokens come. A character is given out once all of its bytes are there; bytes that
    are no UTF-8 become U+FFFD. The pieces joined are `decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes, maybe none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left of an incomplete character: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of all `tokens`; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


class ByteTokenizer:
    """Ids 0 .. 255 are bytes; then BOS, EOS and padding."""

    BOS, EOS, PAD = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str, special: bool = True) -> list[int]:
        """UTF-8 bytes of `text`, after BOS if `special`."""
        return [self.BOS] * special + list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        """The byte, b"" for the other ids."""
        return bytes([token]) if 0 <= token < 256 else b""

    def token_id(self, content: str) -> int | None:
        """Ids of "<s>", "</s>" and "<pad>"."""
        return {"<s>": self.BOS, "</s>": self.EOS, "<pad>": self.PAD}.get(content)
