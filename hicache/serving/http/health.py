"""What /health tells: whether the engine answers, and how storage is."""

from __future__ import annotations

from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

from hicache.serving.engine import Engine
from hicache.serving.http.jobs import Gateway
from hicache.serving.outputs import EngineStopped

ANSWER_SECONDS = 5.0
"""An engine that finds no time between two steps for so long is not well."""


def health_of(gateway: Gateway) -> tuple[int, dict[str, Any]]:
    """Status and body. Waits for the engine to come between two steps: not for the event loop.

    ok and degraded (storage is off or being tried again) are 200; stopping, failed and stuck are 503.
    """
    if gateway.stopping:
        return 503, {"status": "stopping"}
    try:
        engine, storage = gateway.engine.call(_look, ANSWER_SECONDS)
    except EngineStopped as error:
        return 503, {"status": "failed", "reason": str(error)}
    except NoAnswer:
        return 503, {"status": "stuck", "reason": f"the engine does not answer within {ANSWER_SECONDS:g} s"}
    well = storage is None or storage["loads"] == storage["stores"] == "on"
    engine |= {"active": gateway.active, "max_active": gateway.max_active}
    return 200, {"status": "ok" if well else "degraded", "engine": engine, "storage": storage}


def _look(engine: Engine) -> tuple[dict[str, Any], dict[str, Any] | None]:
    stats = engine.cache.stats()
    storage = None
    if stats.storage_loads is not None:
        storage = {"loads": stats.storage_loads, "stores": stats.storage_stores, "pages": stats.storage_pages}
    return {"running": engine.running, "waiting": engine.waiting, "steps": engine.metrics.steps}, storage
