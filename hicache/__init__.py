"""Hierarchical KV cache for LLM serving: device, host and disk tiers under one radix tree."""

__version__ = "0.1.0"
