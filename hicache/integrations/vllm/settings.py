"""The operator's YAML of tiers, completed with what the engine knows.

    tiers:
      - {tier: host, size: 32GiB}
      - {tier: storage, path: /var/lib/hicache, size: 500GiB}

The model, the page size and the device tier are the engine's and must not be in the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hicache.config import CacheConfig
from hicache.config.document import Document, KeyPath, Problem, read_document
from hicache.config.loading import validated
from hicache.config.models import HostTier, StorageTier
from hicache.errors import ConfigError
from hicache.layout import KVLayout

EXAMPLE = '"kv_connector_extra_config": {"config": "tiers.yaml"}'


@dataclass(frozen=True)
class EngineFacts:
    """One rank of the engine. A block is opaque: `layers` planes of `plane_bytes` bytes, in whatever order and
    packing the attention backend likes, which `backend` names."""

    model: str
    revision: str | None
    weights_digest: str
    backend: str
    block_size: int
    layers: int
    plane_bytes: int
    num_blocks: int
    device: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def layout(self) -> KVLayout:
        """One plane a layer, of bytes."""
        return KVLayout(self.layers, 1, self.token_bytes, self.block_size, "int8", "mla")

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer. Raises ConfigError for blocks that are not made of tokens."""
        if self.plane_bytes % self.block_size:
            raise ConfigError(
                f"a block of {self.block_size} tokens has {self.plane_bytes} bytes in a layer: use another"
            )
        return self.plane_bytes // self.block_size


_ANY_ENGINE = EngineFacts("any", None, "unknown", "unknown", 1, layers=1, plane_bytes=1, num_blocks=1, device="cpu")
"""Blocks of one byte: every size of a tier has room for some."""


class _TiersDocument(Document):
    """A document whose first tier, the device, is not written in its file."""

    def where(self, path: KeyPath) -> str:
        if path[:1] == ("tiers",) and len(path) > 1 and isinstance(path[1], int):
            path = ("tiers", path[1] - 1, *path[2:])
        return super().where(path)


def config_file(extra: Mapping[str, object]) -> Path:
    """The file named in the connector's extra configuration. Raises ConfigError without one."""
    unknown = sorted(set(extra) - {"config"})
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: unknown key {unknown[0]!r}, the only one is config: {EXAMPLE}")
    if not isinstance(extra.get("config"), str):
        raise ConfigError(f"kv_connector_extra_config: name the file of the tiers: {EXAMPLE}")
    return Path(str(extra["config"])).expanduser()


def check_early(extra: Mapping[str, object]) -> None:
    """Raises ConfigError for what is wrong whatever the engine is: one line on a terminal, without a traceback.

    Sizes that do not fit the engine's blocks are found later, by `load_settings`.
    """
    try:
        load_settings(config_file(extra), _ANY_ENGINE)
    except ConfigError:
        _tell_in_one_line()
        raise


def _tell_in_one_line() -> None:
    """Have the interpreter print the message of a ConfigError that nobody catches, and only that."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            print(f"hicache: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def load_settings(path: Path, facts: EngineFacts) -> CacheConfig:
    """Read and check the file. Raises ConfigError, one line with the place and the mend."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}: {EXAMPLE}") from None
    written = read_document(text, str(path))
    _check_written(written)
    config = validated(_completed(written, facts))
    if found := list(_unsupported(config)):
        raise _TiersDocument(written.source, written.data, written.origins).error(found)
    return config


def _check_written(document: Document) -> None:
    data = document.data
    if not isinstance(data, dict) or not isinstance(data.get("tiers"), list):
        raise ConfigError(f"{document.where(())}: a list of tiers is missing: tiers: [{{tier: host, size: 32GiB}}]")
    for key in data:
        if key != "tiers":
            raise ConfigError(f"{document.where((key,))}: the engine says that itself: remove it, only tiers stay")
    for index, tier in enumerate(data["tiers"]):
        if isinstance(tier, dict) and tier.get("tier") == "device":
            raise ConfigError(f"{document.where(('tiers', index))}: the device tier is the engine's: remove it")


def _completed(document: Document, facts: EngineFacts) -> _TiersDocument:
    assert isinstance(document.data, dict)
    device = {"tier": "device", "device": facts.device, "size": f"{facts.num_blocks * facts.block_size} tokens"}
    data = {
        "model": {
            "name": facts.model,
            "revision": facts.revision,
            "weights_digest": facts.weights_digest,
            "attention_backend": facts.backend,
            "layers": facts.layers,
            "kv_heads": 1,
            "head_dim": facts.token_bytes,
            "dtype": "int8",
            "kind": "mla",
            "tp_rank": facts.tp_rank,
            "tp_size": facts.tp_size,
            "pp_rank": facts.pp_rank,
            "pp_size": facts.pp_size,
        },
        "page_size": facts.block_size,
        "tiers": [device, *document.data["tiers"]],
    }
    return _TiersDocument(document.source, data, document.origins)


def _unsupported(config: CacheConfig) -> list[Problem]:
    """What other engines can have and this one cannot, by position with the device tier first."""
    found = []
    for index, tier in enumerate(config.tiers):
        at = ("tiers", index)
        if isinstance(tier, HostTier) and tier.write != "write_through":
            found.append(Problem((*at, "write"), "only write_through: the engine does not say when it evicts a block"))
        if isinstance(tier, StorageTier):
            if tier.write != "write_through":
                found.append(Problem((*at, "write"), "only write_through with this engine"))
            if tier.path is None:
                found.append(Problem(at, "only a store with a path: all ranks and restarts must find the same one"))
            if tier.codec in ("fp8", "int8"):
                found.append(Problem((*at, "codec"), "a block is opaque bytes here: use none, lz4 or zstd"))
    if config.host is None:
        found.append(Problem(("tiers",), "there is no host tier"))
    return found
