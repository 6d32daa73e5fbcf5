"""A configuration as plain data that remembers the line every value stands on."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml

from hicache.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value is: ("tiers", 1, "size")."""

MAX_DEPTH = 32
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a document, and how to mend it."""

    path: KeyPath
    message: str


@dataclass(frozen=True)
class Document:
    """Plain data with the origin of each value: a line of `source`, or the override that set it."""

    source: str
    data: object
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """ "tiers.yaml:7: tiers[1].size", with the line of the nearest enclosing value that has one."""
        known = (path[:length] for length in range(len(path), -1, -1) if path[:length] in self.origins)
        nearest = next(known, None)
        origin = self.source if nearest is None else self.origins[nearest]
        return f"{origin}: {dotted(path)}" if path else origin

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """One line for all problems: the first in full and the number of the others."""
        first, *others = problems
        more = f" (and {len(others)} more)" if others else ""
        return ConfigError(f"{self.where(first.path)}: {first.message}{more}")


def dotted(path: KeyPath) -> str:
    """("tiers", 1, "size") as "tiers[1].size"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def read_document(text: str, source: str) -> Document:
    """Parse YAML. Raises ConfigError naming the line: bad syntax, a key twice, a tag that is not plain data."""
    reader = _Reader(source)
    return Document(source, reader.read(text), reader.origins)


def override(document: Document, assignments: Iterable[str]) -> Document:
    """The document with values replaced or added by "tiers.1.size=1GiB"; the value is YAML.

    Raises ConfigError for an assignment without "=" or one that leads through something that is not there.
    """
    data = copy.deepcopy(document.data)
    origins = dict(document.origins)
    for assignment in assignments:
        origin = f"--set {assignment}"
        name, equals, text = assignment.partition("=")
        path = _parse_path(name)
        if not equals or not path:
            raise ConfigError(f"{origin}: write it as key.path=value, such as tiers.1.size=1GiB")
        _assign(data, path, _Reader(origin).read(text), origin)
        origins = {known: line for known, line in origins.items() if known[: len(path)] != path}
        origins[path] = origin
    return Document(document.source, data, origins)


def _parse_path(name: str) -> KeyPath:
    parts = re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts) if all(parts) else ()


def _assign(data: object, path: KeyPath, value: object, origin: str) -> None:
    target = data
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(target, dict) and isinstance(key, str):
            if last:
                target[key] = value
            target = target.setdefault(key, {})
        elif isinstance(target, list) and isinstance(key, int) and key < len(target):
            if last:
                target[key] = value
            target = target[key]
        else:
            raise ConfigError(f"{origin}: there is no {dotted(path[: depth + 1])} to set")


class _Reader:
    """Turns YAML nodes into dicts, lists and scalars, noting the line of each."""

    def __init__(self, source: str) -> None:
        self.origins: dict[KeyPath, str] = {}
        self._source = source

    def read(self, text: str) -> object:
        try:
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
            if root is None:
                return None
            self._note((), root)
            return self._value(root, ())
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise self._error(line, f"not valid YAML: {error.problem or error.context}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError(f"{self._source}: not valid YAML: {' '.join(str(error).split())}") from None

    def _value(self, node: yaml.Node, path: KeyPath) -> object:
        if len(path) > MAX_DEPTH:
            raise self._error(node.start_mark.line + 1, "nested too deeply")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_TAGS:
            raise self._error(node.start_mark.line + 1, f"not valid YAML: the tag {node.tag} is not plain data")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._note((*path, index), item)
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(line, "a key must be a word")
            if key.value in values:
                raise self._error(line, f"{dotted((*path, key.value))}: this key is given twice, remove one")
            self._note((*path, key.value), key)
            values[key.value] = self._value(value, (*path, key.value))
        return values

    def _note(self, path: KeyPath, node: yaml.Node) -> None:
        self.origins[path] = f"{self._source}:{node.start_mark.line + 1}"

    def _error(self, line: int, message: str) -> ConfigError:
        return ConfigError(f"{self._source}:{line}: {message}")
