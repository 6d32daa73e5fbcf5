"""What a request asks of the cache, in vLLM's `kv_transfer_params` or in its `kv_hints` envelope.

    {"kv_transfer_params": {"hicache": {"store": false}}}

| parameter | kv_hints action, payload | means                                                                       |
|-----------|--------------------------|-----------------------------------------------------------------------------|
| store     | no_store                 | false: its blocks go to no lower tier                                       |
| load      | no_load                  | false: nothing is loaded for it                                             |
| prefetch  | prefetch                 | true: the disk is asked when it arrives, not when its turn comes            |
| priority  | –                        | for `eviction: priority` and `admission: {policy: priority}`; a higher one  |
|           |                          | stays longer. Default: minus vLLM's priority, where a lower one comes first |
| retain    | retain, the same         | {"priority": 0-100, "duration": seconds} for `eviction: retention`          |

A hint is never an error: what is not understood has no effect and is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.policies.retention import Retention, retention_range

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.hicache")

PARAMETER = "hicache"


@dataclass(frozen=True)
class Hints:
    store: bool = True
    load: bool = True
    prefetch: bool = False
    priority: int = 0
    retention: Retention | None = None


_ACTIONS: dict[str, tuple[str, bool]] = {
    "no_store": ("store", False),
    "no_load": ("load", False),
    "prefetch": ("prefetch", True),
}

_complained: set[str] = set()


def hints_of(request: Request) -> Hints:
    """All hints of a request; parameters win over the envelope."""
    hints = Hints(priority=-request.priority)
    for action in request.kv_hints.actions if request.kv_hints is not None else ():
        if action.action_type in _ACTIONS:
            hints = _with_value(hints, *_ACTIONS[action.action_type])
        elif action.action_type == "retain":
            hints = _with_value(hints, "retain", action.payload)
    written = (request.kv_transfer_params or {}).get(PARAMETER, {})
    if not isinstance(written, Mapping):
        _complain(f"kv_transfer_params[{PARAMETER!r}] is no mapping")
        return hints
    for name, value in written.items():
        hints = _with_value(hints, name, value)
    return hints


def _with_value(hints: Hints, name: str, value: object) -> Hints:
    if name == "retain":
        retention = _retention(value)
        return replace(hints, retention=retention) if retention is not None else hints
    wanted = int if name == "priority" else bool
    if name not in ("store", "load", "prefetch", "priority"):
        _complain(f"a hint {name!r} is not known, there are store, load, prefetch, priority and retain")
    elif type(value) is not wanted:
        _complain(f"the hint {name!r} should be of type {wanted.__name__}, not {type(value).__name__}")
    else:
        return replace(hints, **{name: value})  # type: ignore[arg-type]
    return hints


def _retention(value: object) -> Retention | None:
    try:
        assert isinstance(value, Mapping)
        priority, duration = value["priority"], value["duration"]
        return retention_range(0, None, int(priority), float(duration)).retention
    except (AssertionError, KeyError, TypeError, ValueError, ConfigError) as error:
        _complain(f"the hint 'retain' is {{priority: 0-100, duration: seconds}} ({error!r})")
        return None


def _complain(message: str) -> None:
    if message not in _complained and len(_complained) < 100:
        _complained.add(message)
        log.warning("hicache: %s: it has no effect", message)
