"""Configuration: one YAML of tiers, checked key by key, with every error naming its line."""

from hicache.config.loading import config_from_mapping, load_config, parse_config
from hicache.config.machine import check_machine
from hicache.config.models import CacheConfig, Capacity, DeviceTier, HostTier, ModelSection, Prefetch, StorageTier
from hicache.config.units import Size, parse_duration, parse_size

__all__ = [
    "CacheConfig",
    "Capacity",
    "DeviceTier",
    "HostTier",
    "ModelSection",
    "Prefetch",
    "Size",
    "StorageTier",
    "check_machine",
    "config_from_mapping",
    "load_config",
    "parse_config",
    "parse_duration",
    "parse_size",
]
