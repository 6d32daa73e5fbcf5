"""What was said in a session, as the tokens it was said in.

Text that comes back in the next prompt is not always cut into the tokens that the model chose, and then the KV of the
answer is of no use. A session keeps them, so the next turn goes on exactly where the last one ended.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SESSIONS = 4096
MAX_TOKENS = 1 << 22
"""Of all sessions together; the one that has been silent longest is forgotten first."""

SessionKey = tuple[str | None, str]
"""Cache salt and session id: tenants do not hear each other."""


@dataclass(frozen=True)
class Said:
    """`tokens` are one way to cut `text`; the model has seen or chosen just these."""

    text: str
    tokens: Sequence[int]


class Sessions:
    """The last prompt with its answer of each session. For any thread."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._said: OrderedDict[SessionKey, Said] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._said)

    def recall(self, key: SessionKey, text: str) -> Said | None:
        """What was said, if `text` begins with it."""
        with self._lock:
            said = self._said.get(key)
        return said if said is not None and text.startswith(said.text) else None

    def remember(self, key: SessionKey, text: str, tokens: Sequence[int]) -> None:
        """Replace what the session said last."""
        said = Said(text, array("i", tokens))
        with self._lock:
            self._forget(key)
            self._said[key] = said
            self._tokens += len(said.tokens)
            while len(self._said) > self._max_sessions or self._tokens > self._max_tokens:
                self._forget(next(iter(self._said)))

    def _forget(self, key: SessionKey) -> None:
        said = self._said.pop(key, None)
        self._tokens -= len(said.tokens) if said is not None else 0
