"""A prefix cache for one model of transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hicache.build import build_cache, build_requests
from hicache.cache import HiCache
from hicache.config import CacheConfig, config_from_mapping, load_config
from hicache.device_pool import resolve_device
from hicache.errors import ConfigError, TransferError
from hicache.hashing import RequestNamespace
from hicache.integrations.transformers.identity import model_section
from hicache.integrations.transformers.support import (
    cache_argument,
    check_call,
    check_model,
    check_state,
    model_state,
    token_ids,
)
from hicache.requests import Admission, Request, RequestManager
from hicache.stats import CacheStats
from hicache.streams import record_compute

POLL_SECONDS = 0.0005
ATTEMPTS = 3
"""A prefix whose copy failed is looked for again so often; then the tokens are computed."""


class Past:
    """What is known of one sequence, from `PrefixCache.prefix`.

    `cache` is the DynamicCache to pass to the model; it holds the KV of the first `tokens` tokens. `by_tier`: how many
    of them came from device, host and storage.
    """

    def __init__(self, owner: PrefixCache, request: Request, cache: DynamicCache, by_tier: dict[str, int]) -> None:
        self.cache = cache
        self.by_tier = by_tier
        self.tokens = sum(by_tier.values())
        self._owner = owner
        self._request = request

    def store(self, sequence: Any) -> int:
        """Keep what the model has computed since. `sequence`: the whole of it, prompt and answer, as `generate()`
        returns it. Returns the tokens that are cached now: whole pages, as far as the device tier is large enough.

        Raises ConfigError if it does not begin as the prompt did.
        """
        return self._owner._store(self._request, self.cache, token_ids(getattr(sequence, "sequences", sequence)))


class PrefixCache:
    """KV of the sequences that a model has seen, on the tiers of a configuration; use it from one thread.

    Make one with `open`; close it, or use it in a `with`, so that what only memory holds goes to disk.
    """

    def __init__(self, model: PreTrainedModel, cache: HiCache, requests: RequestManager) -> None:
        self.model = model
        self.hicache = cache
        self._requests = requests
        self._argument = cache_argument(model)
        self._opened = model_state(model)
        self._numbers = itertools.count()

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        config: str | Path | Mapping[str, object],
        *,
        weights_digest: str | None = None,
    ) -> PrefixCache:
        """A cache for `model` with the page size and tiers of `config`: a YAML file, or what it would hold.

        The `model` section comes from the model; one in the file need not be there. Pages on disk are found by
        models with the same weights and settings only: all weights are read for that, unless `weights_digest` says
        which they are. Raises ConfigError for a configuration or a model that cannot be used.
        """
        check_model(model)
        section = model_section(model, weights_digest)
        cache = build_cache(_checked_device(_configuration(config, section), model))
        return cls(model, cache, build_requests(cache, max_requests=16))

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[int] | Mapping[str, Any],
        *,
        namespace: RequestNamespace | None = None,
        **settings: Any,
    ) -> Any:
        """`model.generate(input_ids, **settings)` for one sequence, less the prefill of the longest known prefix.

        `input_ids` may be what a tokenizer returns (BatchEncoding). Nothing is shared between namespaces. Raises
        ConfigError for settings that are not known to leave K and V as they are, `support.ALLOWED`.
        """
        prompt: Any = input_ids
        if isinstance(input_ids, Mapping):
            settings = {**{name: value for name, value in input_ids.items() if name != "input_ids"}, **settings}
            if "input_ids" not in input_ids:
                raise ConfigError(f"generate({{{', '.join(input_ids)}}}): there are no input_ids in it")
            prompt = input_ids["input_ids"]
        tokens = token_ids(prompt)
        check_call(self.model, settings, len(tokens))
        with self.prefix(tokens, namespace) as past:
            inputs = torch.tensor([tokens], device=self.model.device)
            output = self.model.generate(inputs, **{**settings, self._argument: past.cache})
            past.store(output)
        return output

    @contextmanager
    def prefix(
        self, input_ids: torch.Tensor | Sequence[int], namespace: RequestNamespace | None = None
    ) -> Iterator[Past]:
        """The longest known prefix of a prompt, for a loop of your own: pass `past.cache` to the model, then call
        `past.store` with the whole sequence. At least one token of the prompt is left to compute.

        Raises ConfigError if the model has changed since the cache was opened."""
        check_state(self.model, self._opened)
        encoded = namespace.encode() if namespace is not None else b""
        request = Request(f"generate {next(self._numbers)}", token_ids(input_ids), encoded)
        try:
            yield self._restore(request)
        finally:
            if request.admitted:
                self._requests.retract(request)
            self.hicache.poll()

    def stats(self) -> CacheStats:
        """Tokens by tier, drops, failures; see `CacheStats`."""
        return self.hicache.stats()

    def wait(self, timeout: float = 60.0) -> bool:
        """Until what was stored has reached its tiers; False if it has not after `timeout` seconds."""
        return self.hicache.drain(timeout)

    def close(self) -> None:
        """Bring what only memory holds to disk, and release everything. Idempotent."""
        self.hicache.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- restoring ----------------------------------------------------------------------------

    def _restore(self, request: Request) -> Past:
        for _ in range(ATTEMPTS):
            admission = self._admit(request)
            if admission is None:
                break
            try:
                cache = self._read(request, admission)
            except TransferError:  # nothing has arrived: the pages are given back, and what is left is looked for again
                self._requests.retract(request)
                self.hicache.poll()
                continue
            found = {"device": admission.device_len, "host": admission.host_len, "storage": admission.storage_len}
            return Past(self, request, cache, found)
        return Past(self, request, DynamicCache(config=self.model.config), {})

    def _admit(self, request: Request) -> Admission | None:
        cache = self.hicache
        cache.prefetch(request.rid, request.key())
        while not cache.prefetch_ready(request.rid):
            time.sleep(POLL_SECONDS)
            cache.poll()
        cache.poll()
        admission = self._requests.admit(request)
        if admission is None:
            cache.drain(timeout=60.0)  # what leaves the device makes room
            admission = self._requests.admit(request)
        if admission is None:
            cache.cancel_prefetch(request.rid)
        return admission

    def _read(self, request: Request, admission: Admission) -> DynamicCache:
        """A copy of the prefix, layer by layer as it arrives. Raises TransferError."""
        past = DynamicCache(config=self.model.config)
        if not admission.prefix_len:
            return past
        pool, slots = self.hicache.tiers.device_pool, self._slots(request, 0, admission.prefix_len)
        for layer in range(self.hicache.layout.num_layers):
            for load in admission.loads:
                load.layer_done(layer).gate()
            keys, values = (plane[slots].transpose(0, 1)[None] for plane in (pool.k(layer), pool.v(layer)))
            past.update(keys.contiguous(), values.contiguous(), layer)
        return past

    # ---- storing ------------------------------------------------------------------------------

    def _store(self, request: Request, past: DynamicCache, sequence: list[int]) -> int:
        prompt = request.tokens.tolist()
        if sequence[: len(prompt)] != prompt:
            raise ConfigError("store(sequence): it does not begin with the prompt that this prefix is of")
        if not request.admitted and self._admit(request) is None:
            return 0
        computed = min(past.get_seq_length(), len(sequence))
        self._requests.append(request, sequence[len(prompt) :])
        upto = self._make_room(request, computed)
        self._write(request, past, upto)
        self._requests.commit(request, upto)
        cached = upto - upto % self.hicache.page_size
        self._requests.cache_finished_req(request)
        self.hicache.end_step(record_compute(self.hicache.tiers.device_pool.device))
        return cached

    def _make_room(self, request: Request, tokens: int) -> int:
        """Give the request pages for its first `tokens` tokens, or for as many as the device tier has room for."""
        cache = self.hicache
        upto = max(min(tokens, cache.tiers.device_allocator.num_pages * cache.page_size), request.kv_committed_len)
        while not self._requests.extend(request, upto):
            idle = not cache.in_flight
            cache.drain(timeout=60.0)
            if idle:  # others hold the rest of the tier
                upto -= cache.page_size
        return upto

    def _write(self, request: Request, past: DynamicCache, upto: int) -> None:
        """Copy the KV that is not the tree's yet into the request's pages."""
        start, pool = request.kv_committed_len, self.hicache.tiers.device_pool
        slots = self._slots(request, start, upto)
        for layer in range(self.hicache.layout.num_layers):
            held = past.layers[layer]
            for plane, states in ((pool.k(layer), held.keys), (pool.v(layer), held.values)):
                _check_states(states, plane, layer)
                plane[slots] = states[0, :, start:upto].transpose(0, 1)

    def _slots(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """Where tokens start .. stop-1 of the request lie in the planes."""
        row = request.row
        assert row is not None
        slots = self._requests.req_to_token_pool.token_slots(row, start, stop)
        return torch.from_numpy(slots).to(self.hicache.tiers.device_pool.device)


def _check_states(states: torch.Tensor, plane: torch.Tensor, layer: int) -> None:
    if states.shape[0] != 1 or states.shape[1::2] != plane.shape[1:] or states.dtype != plane.dtype:
        raise ConfigError(
            f"the model's cache holds {tuple(states.shape)} {states.dtype} in layer {layer}, not (1, {plane.shape[1]}, "
            f"tokens, {plane.shape[2]}) {plane.dtype}: use the model without autocast, one sequence at a time"
        )


def _configuration(config: str | Path | Mapping[str, object], section: dict[str, object]) -> CacheConfig:
    """The configuration with the model's own section in place of whatever is there."""
    if isinstance(config, Mapping):
        given = config.get("model", {})
        return config_from_mapping({**config, "model": {**(given if isinstance(given, Mapping) else {}), **section}})
    return load_config(config, [f"model.{key}={_yaml(value)}" for key, value in section.items()])


def _yaml(value: object) -> str:
    """A word, or a number, as YAML has it."""
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def _checked_device(config: CacheConfig, model: PreTrainedModel) -> CacheConfig:
    """Raises ConfigError unless the device tier is where the model is."""
    tier, where = resolve_device(config.device.device), resolve_device(str(model.device))
    if tier != where:
        place = config.where("tiers", 0, "device")
        raise ConfigError(f"{place}: the tier is on {tier} and the model on {where}: write device: {where}")
    return config
