"""Small engines for the tests: the stand-in or a tiny random model over tiers of a few pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from serving_models import LLAMA

from hicache.build import build_cache
from hicache.config import config_from_mapping
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import GenerationRequest
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.serving.standin_model import StandInModel
from hicache.serving.weights_random import random_model

PAGE = 4
STANDIN = {"name": "stand-in", "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16"}
TINY = replace(LLAMA, layers=2)

torch.set_num_threads(1)


def tiers_of(device: int, host: int = 0, disk: Path | None = None) -> list[dict[str, object]]:
    """Sizes in pages."""
    tiers: list[dict[str, object]] = [{"tier": "device", "size": f"{device} pages"}]
    if host:
        tiers.append({"tier": "host", "size": f"{host} pages"})
    if disk is not None:
        prefetch = {"policy": "wait_complete", "deadline": "20s"}
        tiers.append({"tier": "storage", "size": "16MiB", "path": str(disk), "prefetch": prefetch})
    return tiers


def standin_engine(
    tiers: list[dict[str, object]], options: SchedulerOptions | None = None, around: Surroundings | None = None
) -> Engine:
    config = config_from_mapping({"model": STANDIN, "page_size": PAGE, "poison": True, "tiers": tiers})
    return Engine(StandInModel(config.layout()), build_cache(config), options, surroundings=around)


def tiny_model() -> LoadedModel:
    return random_model(TINY, seed=7)


def tiny_engine(
    tiers: list[dict[str, object]], options: SchedulerOptions | None = None, around: Surroundings | None = None
) -> Engine:
    loaded = tiny_model()
    config = serving_config(loaded, tiers, PAGE, poison=True)
    return build_engine(loaded, config, options, surroundings=around)


def reference(requests: Sequence[GenerationRequest], around: Surroundings | None = None) -> list[list[int]]:
    """The tokens of each request, served alone and without cache."""
    engine = plain_engine(tiny_model(), TINY.context, surroundings=around)
    tokens = [engine.generate([request])[0].token_ids for request in requests]
    engine.close()
    return tokens


def ask(prompt: Sequence[int], max_tokens: int = 4, **more: object) -> GenerationRequest:
    return GenerationRequest(list(prompt), max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def run(engine: Engine, steps: int = 2000) -> None:
    """Until there is no work."""
    for _ in range(steps):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")
