"""What must hold between values that are each well-formed: order, divisibility, limits, options that go together."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.config.document import KeyPath, Problem
from hicache.config.models import Admission, CacheConfig, HostTier, StorageTier, TierSection, tier_of
from hicache.config.units import Size, format_bytes
from hicache.errors import ConfigError
from hicache.host_pool.pinning import resolve_pinned
from hicache.storage_backends.codecs import create_codec
from hicache.types import Tier

MAX_PAGES = 2**31 - 1
"""Page numbers are int32."""


def problems(config: CacheConfig) -> list[Problem]:
    """Everything that is wrong, in the order of the sections; the later rules need the earlier ones to hold."""
    sections = [*_model(config), *_order(config)] or [*_codec(config)]
    return sections or [*_limits(config), *_pinning(config), *_options(config)]


def _model(config: CacheConfig) -> Iterator[Problem]:
    model = config.model
    for axis, rank, size in (("tp", model.tp_rank, model.tp_size), ("pp", model.pp_rank, model.pp_size)):
        if rank >= size:
            yield Problem(("model", f"{axis}_rank"), f"{rank} must be less than {axis}_size, which is {size}")
    if model.kind == "mla" and model.kv_heads != 1:
        yield Problem(("model", "kv_heads"), f"{model.kv_heads} must be 1 for kind mla, it has one latent per token")
    if model.kv_heads % model.tp_size and model.tp_size % model.kv_heads:
        yield Problem(("model", "tp_size"), f"{model.tp_size} ranks cannot share {model.kv_heads} KV heads evenly")


def _order(config: CacheConfig) -> Iterator[Problem]:
    """Each tier once, fastest first, with nothing missing in between."""
    present = [tier_of(section) for section in config.tiers]
    for index, tier in enumerate(present):
        if tier in present[:index]:
            yield Problem(("tiers", index), f"a second {tier.name.lower()} tier, there can be one: remove it")
        elif index and tier < max(present[:index]):
            before = present[index - 1].name.lower()
            yield Problem(("tiers", index), f"{tier.name.lower()} after {before}: the order is device, host, storage")
    if Tier.DEVICE not in present:
        yield Problem(("tiers",), "there is no device tier, it must be the first")
    if Tier.STORAGE in present and Tier.HOST not in present:
        yield Problem(
            ("tiers", present.index(Tier.STORAGE)), "a storage tier needs a host tier before it: copies pass it"
        )


def _codec(config: CacheConfig) -> Iterator[Problem]:
    """A codec must suit the dtype, and its package must be there; what is quantised already is stored as it is."""
    for index, section in enumerate(config.tiers):
        if isinstance(section, (HostTier, StorageTier)):
            try:
                create_codec(section.codec, config.layout())
            except ConfigError as error:
                yield Problem(("tiers", index, "codec"), str(error))
                return
        if isinstance(section, StorageTier) and "codec" in section.model_fields_set:
            if config.stored_codec != section.codec:
                same = f"the host tier has codec {config.stored_codec} and its pages are stored as they are"
                yield Problem(("tiers", index, "codec"), f"{section.codec!r} cannot be, {same}: leave codec out")


def _limits(config: CacheConfig) -> Iterator[Problem]:
    """No limit that comes to nothing."""
    for index, section in enumerate(config.tiers):
        yield from _limit(config, tier_of(section), section.size, ("tiers", index, "size"))
        if isinstance(section, StorageTier):
            yield from _limit(config, Tier.HOST, section.queue, ("tiers", index, "queue"))
            if section.quota is not None:
                yield from _limit(config, Tier.HOST, section.quota, ("tiers", index, "quota"))


def _limit(config: CacheConfig, tier: Tier, size: Size, path: KeyPath) -> Iterator[Problem]:
    capacity = config.capacity_of(tier, size)
    if not capacity.num_pages:
        one = f"one page of {config.page_size} tokens takes {capacity.page_bytes} bytes"
        nothing = f"{size.text} holds no page: {one} ({format_bytes(capacity.page_bytes)})"
        yield Problem(path, config.store_problem(size) or nothing if tier is Tier.STORAGE else nothing)
    if capacity.num_pages > MAX_PAGES and tier is not Tier.STORAGE:
        yield Problem(path, f"{size.text} is {capacity.num_pages} pages, there can be at most {MAX_PAGES}")


def _pinning(config: CacheConfig) -> Iterator[Problem]:
    """Only a CUDA device has a driver to pin memory with; what `auto` comes to shows on the machine."""
    for index, section in enumerate(config.tiers):
        if isinstance(section, HostTier) and config.device.device != "auto":
            try:
                resolve_pinned(section.pinned, config.device.device)
            except ConfigError as error:
                yield Problem(("tiers", index, "pinned"), str(error))


def _options(config: CacheConfig) -> Iterator[Problem]:
    """Options that were written down but would have no effect are mistakes."""
    for index, section in enumerate(config.tiers):
        for key, message in _without_effect(section):
            yield Problem(("tiers", index, *key), message)


def _without_effect(section: TierSection) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(section, HostTier):
        if "selective_hits" in section.model_fields_set and section.write != "write_through_selective":
            yield ("selective_hits",), f"has no effect with write: {section.write}, it is for write_through_selective"
    elif isinstance(section, StorageTier):
        yield from _backend_options(section)
        if "deadline" in section.prefetch.model_fields_set and section.prefetch.policy == "best_effort":
            yield ("prefetch", "deadline"), "has no effect with policy: best_effort, which never waits"
        yield from _admission_options(section.admission)


def _admission_options(admission: Admission) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, policies in (("min_hits", ("hits", "tinylfu")), ("min_priority", ("priority",))):
        if key in admission.model_fields_set and admission.policy not in policies:
            where = " and ".join(policies)
            yield ("admission", key), f"has no effect with policy: {admission.policy}, it is for {where}"


_LMDB_KEYS = {"values", "durability", "eviction", "ttl", "quota", "shrink", "codec"}


def _backend_options(storage: StorageTier) -> Iterator[tuple[tuple[str, ...], str]]:
    if storage.backend == "lmdb" and storage.path is None:
        yield (), "missing key 'path': the folder the lmdb backend keeps its files in"
    without = {"lmdb": {"options"}, "memory": {"path", "options", *_LMDB_KEYS}}.get(storage.backend, _LMDB_KEYS)
    for key in sorted(without & storage.model_fields_set):
        yield (key,), f"has no effect with backend: {storage.backend}"
