"""How many device pages are kept free ahead of need."""

from __future__ import annotations

_SHARE = 32
"""At most this fraction of the device tier is kept free."""
_FADE = 16
"""What a step took counts for about as many steps."""


class Headroom:
    """As many pages as steps have taken lately.

    A page whose only copy is on the device is free when its copy down has landed, a step later at the earliest. A
    step that asked for room only when it needs it would wait for that, with its device idle.
    """

    def __init__(self, num_pages: int) -> None:
        self._most = num_pages // _SHARE
        self._taken = 0
        self._lately = 0

    def took(self, pages: int) -> None:
        """The step that is being prepared took `pages` device pages."""
        self._taken += pages

    def next_step(self) -> int:
        """The step goes off: pages to keep free for the next one."""
        self._lately = max(self._taken, self._lately - -(-self._lately // _FADE))
        self._taken = 0
        return min(self._lately, self._most)
