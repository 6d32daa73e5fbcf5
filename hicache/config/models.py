"""The sections of a configuration and what follows from them: page layout, store identity, capacities."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from hicache.config.costs import CostsSection, LoadSection
from hicache.config.document import Document
from hicache.config.known_models import KNOWN_MODELS
from hicache.config.section import Duration, Section
from hicache.config.units import Size, parse_size
from hicache.errors import ConfigError
from hicache.hashing import StoreIdentity
from hicache.layout import MAX_PAGE_SIZE, HostFormat, KVLayout, LayoutKind
from hicache.policies.eviction import known_evictions
from hicache.storage_backends.budget import BudgetPlan, page_cost
from hicache.storage_backends.codecs import LOSSY_CODECS
from hicache.types import Tier

SizeField = Annotated[Size, PlainValidator(parse_size), PlainSerializer(lambda size: size.text, return_type=str)]
DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Word = Annotated[str, Field(min_length=1)]
Dtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
HostWritePolicy = Literal["write_through", "write_through_selective", "write_back"]
StorageWritePolicy = Literal["write_through", "write_back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
AdmissionMode = Literal["all", "hits", "tinylfu", "priority"]


def _known_eviction(name: str) -> str:
    known = known_evictions()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is not one of {', '.join(map(repr, known))}{hint}")
    return name


EvictionPolicy = Annotated[str, AfterValidator(_known_eviction)]


def _dividing(page_size: int) -> int:
    if not (1 <= page_size <= MAX_PAGE_SIZE and MAX_PAGE_SIZE % page_size == 0):
        raise ValueError(f"{page_size} does not divide {MAX_PAGE_SIZE}: use a power of two from 1 to {MAX_PAGE_SIZE}")
    return page_size


PageSize = Annotated[int, AfterValidator(_dividing)]


def _numa(value: object) -> int | str | None:
    if value is None or value == "auto" or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"{value!r} is not auto, the number of a NUMA node or null")


NumaNode = Annotated[int | Literal["auto"] | None, PlainValidator(_numa)]


class ModelSection(Section):
    """Whose KV is cached. The geometry may be left out for a model of `KNOWN_MODELS`.

    `kv_heads` is the model's, as in its config.json: tensor parallelism divides it. `layers` is what this
    pipeline stage holds, starting at `first_layer`. All fields separate stores on disk.
    """

    name: Word
    revision: Word | None = None
    layers: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    dtype: Dtype = "bfloat16"
    kind: LayoutKind = "mha"
    weights_digest: Word | None = None
    tokenizer_digest: Word | None = None
    first_layer: NonNegativeInt = 0
    tp_rank: NonNegativeInt = 0
    tp_size: PositiveInt = 1
    pp_rank: NonNegativeInt = 0
    pp_size: PositiveInt = 1
    attention_backend: Word | None = None
    rope_scaling: Word | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_geometry(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            return data
        known = dict(KNOWN_MODELS.get(data["name"], {}))
        if data.get("pp_size", 1) != 1:
            known.pop("layers", None)  # how a pipeline divides the layers is the engine's choice
        return {**known, **data}

    @property
    def kv_heads_per_rank(self) -> int:
        """Heads held by one rank; ranks beyond the number of heads hold a replica of one, as do all MLA ranks."""
        return max(1, self.kv_heads // self.tp_size)


class DeviceTier(Section):
    tier: Literal["device"]
    size: SizeField
    device: DeviceName = "auto"
    eviction: EvictionPolicy = "adaptive"
    queue_aware: bool = False


class HostTier(Section):
    """`size` is per process; `local_ranks` processes of this machine each take as much. A `codec` is lossy."""

    tier: Literal["host"]
    size: SizeField
    codec: Literal["none", "fp8", "int8"] = "none"
    pinned: Literal["auto", True, False] = "auto"
    huge_pages: bool = False
    numa: NumaNode = "auto"
    eviction: EvictionPolicy = "lru"
    queue_aware: bool = False
    write: HostWritePolicy = "write_through"
    selective_hits: PositiveInt = 2
    local_ranks: PositiveInt = 1


class Prefetch(Section):
    """When a request may start while pages of it still come from storage. `deadline` is in seconds."""

    policy: PrefetchPolicy = "timeout"
    deadline: Duration = 0.2
    min_pages: PositiveInt = 1


class Admission(Section):
    """Which pages are worth a place on storage."""

    policy: AdmissionMode = "all"
    min_hits: PositiveInt = 2
    min_priority: int = 1


class StorageTier(Section):
    """`queue` bounds the bytes that wait to be written, `queue_time` their wait in seconds; the rest is shed. A call of
    the backend that runs past its deadline, in seconds, stops further calls for a while. `options` are those of a
    backend that does not ship with hicache."""

    tier: Literal["storage"]
    size: SizeField
    backend: Word = "lmdb"
    path: Word | None = None
    eviction: Literal["lru", "slru", "fifo"] = "lru"
    ttl: Duration | None = None
    quota: SizeField | None = None
    shrink: bool = False
    tenant: Word | None = None
    codec: Literal["none", "zstd", "lz4", "fp8", "int8"] = "none"
    values: Literal["slab", "inline"] = "slab"
    durability: Literal["none", "batch", "always"] = "batch"
    options: dict[str, Any] = Field(default_factory=dict)
    write: StorageWritePolicy = "write_through"
    threads: PositiveInt = 2
    queue: SizeField = parse_size("256MiB")
    queue_time: Duration = 10.0
    load_deadline: Duration = 5.0
    store_deadline: Duration = 30.0
    admission: Admission = Admission()
    prefetch: Prefetch = Prefetch()

    @property
    def folder(self) -> Path | None:
        """`path` with ~ expanded; a relative one starts at the current folder."""
        return None if self.path is None else Path(self.path).expanduser()


TierSection: TypeAlias = DeviceTier | HostTier | StorageTier
AnyTier = TypeVar("AnyTier", DeviceTier, HostTier, StorageTier)


def tier_of(section: TierSection) -> Tier:
    return Tier[section.tier.upper()]


@dataclass(frozen=True)
class Capacity:
    """What a tier's size comes to: `num_pages` pages of `page_bytes` bytes within `budget_bytes` bytes."""

    num_pages: int
    page_size: int
    page_bytes: int
    budget_bytes: int

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes


class CacheConfig(Section):
    """A whole configuration. Make one with `load_config`, `parse_config` or `config_from_mapping`."""

    model: ModelSection
    page_size: PageSize = 64
    poison: bool = False
    decision_log: NonNegativeInt = 0
    tiers: Annotated[
        tuple[Annotated[TierSection, Field(discriminator="tier")], ...],
        Field(strict=False),
    ]
    costs: CostsSection = CostsSection()
    load: LoadSection = LoadSection()
    _document: Document = PrivateAttr(default_factory=lambda: Document("config", None))

    def where(self, *path: str | int) -> str:
        """Place of a value for messages: "tiers.yaml:7: tiers[1].size"."""
        return self._document.where(path)

    @property
    def device(self) -> DeviceTier:
        tier = self._find(DeviceTier)
        assert tier is not None  # a rule of every configuration that was made
        return tier

    @property
    def host(self) -> HostTier | None:
        return self._find(HostTier)

    @property
    def storage(self) -> StorageTier | None:
        return self._find(StorageTier)

    def index_of(self, tier: Tier) -> int | None:
        """Position of a tier in `tiers`."""
        return next((index for index, section in enumerate(self.tiers) if tier_of(section) is tier), None)

    def layout(self) -> KVLayout:
        """Pages of one rank."""
        model = self.model
        return KVLayout(
            num_layers=model.layers,
            num_kv_heads=model.kv_heads_per_rank,
            head_dim=model.head_dim,
            page_size=self.page_size,
            dtype=model.dtype,
            kind=model.kind,
        )

    def host_format(self) -> HostFormat:
        """Pages in host memory."""
        return HostFormat(self.layout(), self.host.codec if self.host is not None else "none")

    @property
    def stored_codec(self) -> str:
        """How pages are encoded on storage: as a host tier that quantises has them already."""
        host = self.host_format()
        if host.quantised or self.storage is None:
            return host.codec
        return self.storage.codec

    @property
    def lossy_codec(self) -> tuple[str | int, ...] | None:
        """Where the first codec stands that does not give back every bit of a page; None if all do."""
        for index, section in enumerate(self.tiers):
            if isinstance(section, (HostTier, StorageTier)) and section.codec in LOSSY_CODECS:
                return ("tiers", index, "codec")
        return None

    def identity(self) -> StoreIdentity:
        """What a stored page depends on besides its tokens."""
        geometry = {"layers", "kv_heads", "head_dim", "dtype", "kind"}
        fields = self.model.model_dump(exclude=geometry)
        if self.storage is not None:
            fields |= {"tenant": self.storage.tenant, "codec": self.stored_codec}
        return StoreIdentity(self.layout(), model=fields.pop("name"), **fields)

    def capacity(self, tier: Tier) -> Capacity | None:
        """What the size of a tier comes to in whole pages, None without that tier."""
        index = self.index_of(tier)
        return None if index is None else self.capacity_of(tier, self.tiers[index].size)

    def capacity_of(self, tier: Tier, size: Size) -> Capacity:
        """What `size` comes to on `tier`. Device pages are packed, host pages are aligned; storage adds its index."""
        if tier is Tier.STORAGE and self.storage is not None and self.storage.backend == "lmdb":
            plan = self._store_plan(self.storage, size)
            return Capacity(plan.pages, self.page_size, plan.page_cost, plan.budget_bytes)
        page_bytes = self.layout().page_bytes if tier is Tier.DEVICE else self.host_format().page_stride
        num_pages = size.pages(page_bytes, self.page_size)
        budget = size.amount if size.unit == "bytes" else num_pages * page_bytes
        return Capacity(num_pages, self.page_size, page_bytes, budget)

    def store_plan(self) -> BudgetPlan | None:
        """The budget of the LMDB store; None without one."""
        if self.storage is None or self.storage.backend != "lmdb":
            return None
        return self._store_plan(self.storage, self.storage.size)

    def store_problem(self, size: Size) -> str | None:
        """Why an LMDB store of `size` cannot be; None if it can, or if the store is another one."""
        if self.storage is None or self.storage.backend != "lmdb":
            return None
        try:
            self._store_plan(self.storage, size).split()
        except ConfigError as error:
            return str(error)
        return None

    def _store_plan(self, storage: StorageTier, size: Size) -> BudgetPlan:
        """An LMDB store of `size`: its index comes out of a size in bytes, and on top of a size in pages."""
        cost = page_cost(self.layout(), self.stored_codec, storage.values)
        if size.unit == "bytes":
            return BudgetPlan(storage.values, size.amount, cost)
        return BudgetPlan.for_pages(storage.values, size.pages(cost, self.page_size), cost)

    def queue_bytes(self) -> int:
        """Bound of the store queue in bytes, 0 without a storage tier."""
        return self.capacity_of(Tier.HOST, self.storage.queue).budget_bytes if self.storage else 0

    def storage_options(self) -> dict[str, Any]:
        """What the factory of the storage backend gets beside identity, budget and path."""
        storage = self.storage
        if storage is None or storage.backend != "lmdb":
            return dict(storage.options) if storage is not None else {}
        quota = self.capacity_of(Tier.HOST, storage.quota).budget_bytes if storage.quota is not None else 0
        return {
            "values": storage.values,
            "durability": storage.durability,
            "eviction": storage.eviction,
            "ttl": storage.ttl or 0.0,
            "quota_bytes": quota,
            "encoded": self.host_format().quantised,
            "shrink": storage.shrink,
        }

    def attach(self, document: Document) -> None:
        """Remember where the values were written, for `where`."""
        self._document = document

    def _find(self, kind: type[AnyTier]) -> AnyTier | None:
        return next((section for section in self.tiers if isinstance(section, kind)), None)
