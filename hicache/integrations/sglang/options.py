"""What an operator writes into --hicache-storage-backend-extra-config, checked as our YAML is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from hicache.config.loading import section_from_mapping
from hicache.config.models import SizeField, Word
from hicache.config.section import Duration, Section
from hicache.config.units import Size
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import Eviction
from hicache.storage_backends.lmdb_env import Durability

SOURCE = "hicache-storage-backend-extra-config"

ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""Keys of the same mapping that SGLang reads, or puts there."""


def _in_bytes(size: Size) -> Size:
    if size.unit != "bytes":
        raise ValueError(f"{size.text!r}: the store is shared by pools and ranks, give bytes, such as 500GiB")
    return size


class StorageOptions(Section):
    """`size` bounds the folder `path`, all ranks and models in it together; the rest is as in a storage tier.

    SGLang tells a backend the served name of the model and nothing of its weights: `revision` and `weights_digest`
    keep apart what has one name.
    """

    path: Word
    size: Annotated[SizeField, AfterValidator(_in_bytes)]
    values: ValuesMode = "slab"
    durability: Durability = "batch"
    eviction: Eviction = "lru"
    ttl: Duration | None = None
    codec: Literal["none", "zstd", "lz4"] = "none"
    tenant: Word | None = None
    revision: Word | None = None
    weights_digest: Word | None = None
    attention_backend: Word | None = None

    @property
    def folder(self) -> Path:
        """`path` with ~ expanded; a relative one starts at the current folder."""
        return Path(self.path).expanduser()


def parse_options(extra_config: Mapping[str, object] | None) -> StorageOptions:
    """Raises ConfigError, one line with the key and the mend."""
    own = {key: value for key, value in (extra_config or {}).items() if key not in ENGINE_KEYS}
    return section_from_mapping(StorageOptions, own, source=SOURCE)
