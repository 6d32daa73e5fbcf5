"""Hugging Face transformers: `generate()` that goes on from the longest known prefix. See docs/transformers.md."""

from hicache.integrations.transformers.prefix_cache import Past, PrefixCache

__all__ = ["Past", "PrefixCache"]
