"""Long chats through tiers far too small for them, while everything fails that can, against a run without cache.

Every answer is compared, token by token, with one computed without cache. From time to time the engine is closed and
begins anew on the same disk; before that, every page has to be accounted for.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache.build import build_cache
from hicache.config import CacheConfig, config_from_mapping
from hicache.device_pool import resolve_device
from hicache.errors import IntegrityError
from hicache.serving.conversations import Conversation, ConversationOptions, Population
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.executor import Model, TransformerModel
from hicache.serving.faults import FAULTY_DISK, break_copies, register_faulty_disk
from hicache.serving.loaded import LoadedModel
from hicache.serving.metrics import RunMetrics
from hicache.serving.outputs import GenerationHandle, GenerationRequest, TokenOutput
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import serving_config
from hicache.serving.standin_model import StandInModel

Progress = Callable[[str], None]
"""Called with a line of text when a session has ended."""

_MAX_EXAMPLES = 8
_STANDIN = {"name": "stand-in", "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16"}


@dataclass(frozen=True)
class StressOptions:
    """`seconds` of wall clock, and at least `sessions` sessions; a session ends after `session_requests` requests.

    Sizes of the tiers in tokens. `concurrent` requests are in the engine at a time, `aborts` is the chance that a
    step aborts one of them. `disk_faults` and `copy_faults` are chances per call, `disk_delay` is in seconds.
    """

    seconds: float = 60.0
    sessions: int = 2
    session_requests: int = 300
    concurrent: int = 24
    aborts: float = 0.01
    device_tokens: int = 2048
    host_tokens: int = 8192
    disk_tokens: int = 131_072
    page_size: int = 16
    device: str = "auto"
    disk_faults: float = 0.05
    disk_delay: float = 0.001
    copy_faults: float = 0.01
    scheduler: SchedulerOptions = field(default_factory=lambda: SchedulerOptions(policy="lpm", reserve=0.0))
    talk: ConversationOptions = field(default_factory=ConversationOptions)


@dataclass
class StressReport:
    """What a stress run saw; `failures` is empty if all was as it must be.

    In `degraded` sessions so many copies failed in a row that the host tier was given up. `memory_bytes` is what the
    process had resident at the end of each session.
    """

    options: StressOptions
    evidence: dict[str, Any]
    metrics: RunMetrics
    seconds: float = 0.0
    sessions: int = 0
    degraded: int = 0
    conversations: int = 0
    compared: int = 0
    compared_tokens: int = 0
    wrong_outputs: int = 0
    wrong_pages: int = 0
    examples: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)  # failures as the cache saw them
    prefetches: Counter[str] = field(default_factory=Counter)
    memory_bytes: list[int] = field(default_factory=list)

    @property
    def memory_growth(self) -> int:
        """Bytes from the second session, when everything has been used once, to the last."""
        return self.memory_bytes[-1] - self.memory_bytes[1] if len(self.memory_bytes) > 1 else 0

    @property
    def failures(self) -> list[str]:
        """One line for each promise that was broken."""
        broken = {
            f"{self.wrong_outputs} answers differ from those without cache": self.wrong_outputs,
            f"{self.wrong_pages} pages were wrong": self.wrong_pages,
            f"{self.metrics.finished['error']} requests ended with an error": self.metrics.finished["error"],
        }
        return [line for line, count in broken.items() if count]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "evidence": {**self.evidence, "stress": asdict(self.options)},
            "sessions": self.sessions,
            "degraded_sessions": self.degraded,
            "conversations": self.conversations,
            "compared": self.compared,
            "compared_tokens": self.compared_tokens,
            "wrong_outputs": self.wrong_outputs,
            "wrong_pages": self.wrong_pages,
            "examples": self.examples,
            "injected_faults": dict(self.injected),
            "counted_failures": dict(self.counted),
            "prefetches": dict(self.prefetches),
            "memory_bytes": self.memory_bytes,
            "memory_growth_bytes": self.memory_growth,
            "failures": self.failures,
            "run": self.metrics.to_json(self.metrics.started + self.seconds),
        }


def run_stress(
    folder: Path,
    options: StressOptions | None = None,
    loaded: LoadedModel | None = None,
    progress: Progress = lambda line: None,
) -> StressReport:
    """Run in `folder`, which gets the disk tier. Without a model the stand-in of the replay computes.

    Raises IntegrityError if a page is lost, counted twice or kept by nobody's lock.
    """
    register_faulty_disk()
    return _Stress(folder, options or StressOptions(), loaded, progress).run()


class _Stress:
    def __init__(self, folder: Path, options: StressOptions, loaded: LoadedModel | None, progress: Progress) -> None:
        self._options = options
        self._loaded = loaded
        self._folder = folder
        self._progress = progress
        self._random = random.Random(options.talk.seed)
        self._people = Population(options.talk)
        self._asked = 0
        self._active: dict[str, tuple[Conversation, GenerationRequest, GenerationHandle]] = {}
        self._reference = self._reference_engine()
        pages = options.device_tokens // options.page_size
        self._report = StressReport(options, {}, RunMetrics(time.monotonic(), pages))

    def run(self) -> StressReport:
        report, options = self._report, self._options
        start = report.metrics.started = time.monotonic()
        while report.sessions < options.sessions or time.monotonic() - start < options.seconds:
            self._session(start + options.seconds)
            report.seconds = time.monotonic() - start
            report.conversations = self._people.started
            self._progress(self._line())
        self._reference.close()
        return report

    def _line(self) -> str:
        report = self._report
        return (
            f"{report.seconds:.0f} s: session {report.sessions}, {report.compared} answers compared, "
            f"{report.wrong_outputs} wrong, hit rate {report.metrics.hit_rate:.0%}, "
            f"{report.metrics.retractions} retractions, {report.memory_bytes[-1] >> 20} MiB"
        )

    # ---- one session ------------------------------------------------------------------------

    def _session(self, until: float) -> None:
        engine, model = self._engine()
        kernels = break_copies(engine.cache, self._options.copy_faults, self._report.sessions)
        engine.metrics = self._report.metrics
        self._report.evidence = self._report.evidence or engine.report()["evidence"]
        first, wanted = self._asked, self._options.session_requests
        enough = first + wanted // 4  # a session that begins late is a short one
        while self._asked < first + wanted and not (self._asked > enough and time.monotonic() > until):
            self._ask(engine)
            self._take(engine.step())
            self._maybe_abort(engine)
        self._leave(engine)
        self._close(engine)
        self._report.injected["copy"] += kernels.injected
        if isinstance(model, StandInModel):
            self._report.wrong_pages += model.wrong_pages
            self._report.examples += model.examples[: _MAX_EXAMPLES - len(self._report.examples)]
        self._report.sessions += 1
        del engine, model
        gc.collect()
        self._report.memory_bytes.append(resident_bytes())

    def _ask(self, engine: Engine) -> None:
        while len(self._active) < self._options.concurrent and self._people.idle:
            conversation = self._random.choice(self._people.idle)
            request = self._people.next_request(conversation, f"{self._asked}")
            self._asked += 1
            self._active[f"{self._asked - 1}"] = (conversation, request, engine.add_request(request))

    def _maybe_abort(self, engine: Engine) -> None:
        if self._active and self._random.random() < self._options.aborts:
            engine.abort(self._random.choice(list(self._active)))

    def _leave(self, engine: Engine) -> None:
        """Half of the requests are served to their end, the others are aborted: whatever they were doing."""
        for rid in list(self._active)[::2]:
            engine.abort(rid)
        while engine.has_work:
            self._take(engine.step())

    def _close(self, engine: Engine) -> None:
        engine.settle(timeout=120.0)
        stats = engine.cache.stats()
        self._report.counted.update(stats.failures)
        host = engine.cache.tiers.host
        self._report.degraded += host is not None and host.degraded
        self._report.prefetches.update(stats.prefetches)
        engine.close(timeout=120.0)

    # ---- answers ----------------------------------------------------------------------------

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finished:
                conversation, request, handle = self._active.pop(output.rid)
                self._compare(request, handle)
                if handle.finish_reason == "abort":
                    self._people.dropped(conversation)
                else:
                    self._people.answered(conversation, handle.token_ids)

    def _compare(self, request: GenerationRequest, handle: GenerationHandle) -> None:
        """All of an answer, or of an aborted one what there is."""
        aborted, found = handle.finish_reason == "abort", handle.token_ids
        if aborted and not found:
            return
        if aborted:
            request = replace(request, max_tokens=len(found))
        expected = self._reference.generate([request])[0].token_ids
        self._report.compared += 1
        self._report.compared_tokens += len(found)
        if found != expected:
            self._report.wrong_outputs += 1
            if len(self._report.examples) < _MAX_EXAMPLES:
                self._report.examples.append(f"request {handle.rid}: expected {expected}, found {found}")

    # ---- engines ----------------------------------------------------------------------------

    def _engine(self) -> tuple[Engine, Model]:
        options = self._options
        faults = {"rate": options.disk_faults, "seed": self._report.sessions, "delay": options.disk_delay}
        tiers: list[dict[str, object]] = [
            self._device_tier(options.device_tokens),
            {"tier": "host", "size": f"{options.host_tokens} tokens"},
            {
                "tier": "storage",
                "backend": FAULTY_DISK,
                "size": f"{options.disk_tokens} tokens",
                "path": str(self._folder),
                "options": faults,
                "prefetch": {"policy": "timeout", "deadline": "1s"},
            },
        ]
        config = self._config(tiers)
        model = self._model(config)
        around = Surroundings(seed=options.talk.seed)
        return Engine(model, build_cache(config), options.scheduler, surroundings=around), model

    def _reference_engine(self) -> Engine:
        config = self._config([self._device_tier(self._options.talk.context)])
        return Engine(self._model(config), build_cache(config), SchedulerOptions(reuse=False))

    def _device_tier(self, tokens: int) -> dict[str, object]:
        return {"tier": "device", "device": self._options.device, "size": f"{tokens} tokens"}

    def _config(self, tiers: list[dict[str, object]]) -> CacheConfig:
        page_size = self._options.page_size
        if self._loaded is not None:
            return serving_config(self._loaded, tiers, page_size, poison=True)
        return config_from_mapping({"model": _STANDIN, "page_size": page_size, "poison": True, "tiers": tiers})

    def _model(self, config: CacheConfig) -> Model:
        if self._loaded is not None:
            return TransformerModel(self._loaded, device=resolve_device(config.device.device))
        return StandInModel(config.layout())


def check(report: StressReport) -> None:
    """Raise IntegrityError, with examples, if the run broke a promise."""
    if report.failures:
        raise IntegrityError("; ".join([*report.failures, *report.examples]))


def resident_bytes() -> int:
    """Memory that this process has resident now; Linux."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
