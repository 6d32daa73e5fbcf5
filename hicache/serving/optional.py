"""Packages that only some models need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hicache.errors import ConfigError


def need(module: str, purpose: str) -> Any:
    """The module. Raises ConfigError, with the command that installs it, where it is absent."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ConfigError(f"{purpose} needs {package}: pip install 'hicache[serving]'") from error
