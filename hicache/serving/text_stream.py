"""Text of an answer as it is streamed, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.serving.tokenizer import Detokenizer, Tokenizer


class TextStream:
    """Gives out the text of an answer token by token.

    Text that may be the beginning of a stop string is held back until it is known not to be one. Nothing of a
    stop string or of what follows is given out. Of several, the one that begins first counts.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """True once a stop string is complete."""

    def push(self, token: int) -> str:
        """The text that is certain now that `token` has come."""
        return self._add(self._detokenizer.push(token))

    def finish(self) -> str:
        """What was held back, at the end of an answer."""
        text = self._add(self._detokenizer.finish())
        text, self._held = text + self._held, ""
        return text

    def _add(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
