"""What a caller holds while a copy is under way."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.errors import TransferError
from hicache.streams.base import Event


class CopyTicket:
    """A copy of `nbytes` bytes that is complete when its event is.

    A ticket of a failed copy raises TransferError for ever, also after the streams have recovered.
    """

    def __init__(self, event: Event, nbytes: int) -> None:
        self.nbytes = nbytes
        self._event = event

    def query(self) -> bool:
        """True once all bytes are there, never blocks. Raises TransferError if the copy failed."""
        return self._event.query()

    def synchronize(self) -> None:
        """Block until all bytes are there. Raises TransferError if the copy failed."""
        self._event.synchronize()


class LoadTicket(CopyTicket):
    """A copy to the device that goes layer by layer, so that attention of layer i need not wait for layer i+1."""

    def __init__(self, layer_events: Sequence[Event], nbytes: int) -> None:
        super().__init__(layer_events[-1], nbytes)
        self._layer_events = layer_events

    def failed(self) -> bool:
        """Has a layer failed? Those after it fail too, but their events may say so a moment later: whoever was told by
        the event of one layer must not look at the last one's."""
        try:
            for event in self._layer_events:
                if not event.query():
                    return False
        except TransferError:
            return True
        return False

    def layer_done(self, layer: int) -> Event:
        """Completes once the bytes of this layer, and of all before it, are on the device."""
        return self._layer_events[layer]
