"""From text to a checked configuration. All ways in (file, text, mapping, overrides) meet in one validation."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hicache.config import rules
from hicache.config.costs import CostsSection, LinkCosts, LoadSection, PrefillCosts
from hicache.config.document import Document, KeyPath, Problem, override, read_document
from hicache.config.models import CacheConfig, DeviceTier, HostTier, ModelSection, Prefetch, StorageTier
from hicache.config.section import Section
from hicache.config.units import closest
from hicache.errors import ConfigError

SECTIONS: dict[str | int, type[Section]] = {
    "model": ModelSection,
    "device": DeviceTier,
    "host": HostTier,
    "storage": StorageTier,
    "prefetch": Prefetch,
    "costs": CostsSection,
    "load": LoadSection,
    "prefill": PrefillCosts,
    **dict.fromkeys(("to_device", "to_host", "disk_read", "disk_write"), LinkCosts),
}
"""By the last name in the location that pydantic gives to a section."""

AnySection = TypeVar("AnySection", bound=Section)

MESSAGES = {
    "missing": "this key is missing",
    "union_tag_not_found": "the key 'tier' is missing: device, host or storage",
    "string_pattern_mismatch": "{value} is not auto, cpu, cuda or cuda:N",
    "model_type": "should be a mapping of keys to values, got {value}",
    "model_attributes_type": "should be a mapping of keys to values, got {value}",
    "tuple_type": "should be a list, got {value}",
}
"""What pydantic's kinds of error mean in a YAML file."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CacheConfig:
    """Read a YAML file; `overrides` are assignments such as "tiers.1.size=1GiB".

    Raises ConfigError, one line with the file, the line and the mend.
    """
    return parse_config(_text_of(path), source=str(path), overrides=overrides)


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from None


def load_costs(path: str | Path) -> CostsSection:
    """The section `costs` of a YAML file that may have nothing else. Raises ConfigError with the file and the mend."""
    document = read_document(_text_of(path), str(path))
    if not isinstance(document.data, dict) or not isinstance(document.data.get("costs"), dict):
        raise ConfigError(f"{path}: there is no section 'costs', as hicache bench calibrate --out writes it")
    return section_from_mapping(CostsSection, document.data["costs"], source=f"{path}: costs")


def parse_config(text: str, *, source: str = "config", overrides: Sequence[str] = ()) -> CacheConfig:
    """As `load_config`, for YAML text that calls itself `source` in messages."""
    return validated(override(read_document(text, source), overrides))


def config_from_mapping(data: Mapping[str, object], *, source: str = "config") -> CacheConfig:
    """As `load_config`, for plain data as YAML would give it: sizes are text with units."""
    return validated(Document(source, dict(data)))


def validated(document: Document) -> CacheConfig:
    """The configuration in a document. Raises ConfigError naming the place of what is wrong."""
    if not isinstance(document.data, dict):
        raise ConfigError(f"{document.where(())}: a configuration is a mapping with the keys model, page_size, tiers")
    try:
        config = CacheConfig.model_validate(document.data)
    except ValidationError as error:
        raise document.error(_problems(error)) from None
    if found := rules.problems(config):
        raise document.error(found)
    config.attach(document)
    return config


def section_from_mapping(kind: type[AnySection], data: Mapping[str, object], *, source: str) -> AnySection:
    """One section by itself, as the configuration of an engine holds it; checked as those of a file are."""
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise Document(source, dict(data)).error(_problems(error, kind)) from None


def _problems(error: ValidationError, root: type[Section] = CacheConfig) -> list[Problem]:
    """Misspelt keys come before missing ones: mending the first often mends the second."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] == "missing")
    return [Problem(_path(detail["loc"]), _message(detail, root)) for detail in details]


def _path(loc: KeyPath) -> KeyPath:
    """pydantic's location without the kind of tier it chose: tiers.1.host.size -> tiers.1.size."""
    return (*loc[:2], *loc[3:]) if loc[:1] == ("tiers",) else loc


def _message(detail: ErrorDetails, root: type[Section]) -> str:
    kind, value = detail["type"], reprlib.repr(detail["input"])
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"], root)
    if kind in ("literal_error", "union_tag_invalid"):
        return _unknown_word(detail)
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "string_type" and isinstance(detail["input"], (int, float)):
        return f"{value} is read as a number, put it in quotes"
    if kind in MESSAGES:
        return MESSAGES[kind].format(value=value)
    return f"{detail['msg'].removeprefix('Input ')}, got {value}"


def _unknown_key(loc: KeyPath, root: type[Section]) -> str:
    names = [part for part in loc[:-1] if part in SECTIONS]
    known = sorted((SECTIONS[names[-1]] if names else root).model_fields)
    near = closest(str(loc[-1]), known)
    return f"unknown key, did you mean {near[0]!r}?" if near else f"unknown key, the keys here are {', '.join(known)}"


def _unknown_word(detail: ErrorDetails) -> str:
    context = detail["ctx"]
    expected = str(context.get("expected") or context["expected_tags"])
    value = context.get("tag", detail["input"])
    near = closest(str(value), re.findall(r"'([^']+)'", expected))
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"{reprlib.repr(value)} is not one of {expected}{hint}"
