"""Every error hicache raises on purpose.

HiCacheError
├── BadInput               the caller's input; one line with the place and the mend (CLI: exit 2)
│   ├── ConfigError        YAML, units, tier order, sizes
│   ├── TraceError         a malformed trace line, with its number
│   ├── TokenError         a token id that no prefix key can hold
│   └── StoreIdentityError a store written for another model, dtype, layout or format
├── ProtocolError          a caller broke the cache's contract (double release, illegal transition): a bug
├── IntegrityError         an invariant does not hold, or a wrong byte was found: a bug
├── CapacityError          memory that was asked for is not to be had
├── TransferError          a copy on a stream failed; its destination pages hold nothing usable
└── StorageError           a storage backend failed
    ├── StoreCorruptError      index or data cannot be trusted
    ├── StoreReplacedError     files were removed or replaced while they were open
    └── StoreUnavailableError  disk full, read-only, closed, gone
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Base of all errors raised by hicache."""


class BadInput(HiCacheError):
    """The input is wrong; the message names the place and how to mend it."""


class ConfigError(BadInput):
    """The configuration cannot be used."""


class TraceError(BadInput):
    """A trace file cannot be read."""


class TokenError(BadInput):
    """A token id is no integer from 0 to 2**31 - 1."""


class StoreIdentityError(BadInput):
    """A store on disk was written with another identity."""


class ProtocolError(HiCacheError):
    """A caller broke the protocol. Always a bug, never a load condition."""


class IntegrityError(HiCacheError):
    """The cache's state contradicts itself. Always a bug."""


class CapacityError(HiCacheError):
    """Memory that was asked for is not available."""


class TransferError(HiCacheError):
    """A copy failed; what it was to fill must not be read."""


class StorageError(HiCacheError):
    """A storage backend failed. `reason` is one word for counters: disk_full, io_error, closed, ..."""

    default_reason = "failed"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason if reason is not None else self.default_reason


class StoreCorruptError(StorageError):
    """The store's index or data cannot be trusted."""

    default_reason = "corrupt"


class StoreReplacedError(StorageError):
    """Files of the store were removed or replaced while it was open: what was opened is not what lies at the path."""

    default_reason = "folder_replaced"


class StoreUnavailableError(StorageError):
    """The store cannot be used now: disk full, read-only, closed or gone."""

    default_reason = "unavailable"
