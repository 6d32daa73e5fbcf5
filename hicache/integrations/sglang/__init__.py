"""SGLang: our disk tier as a storage backend of its hierarchical cache. See docs/sglang.md."""

from hicache.integrations.sglang.storage import HiCacheLMDBStorage

__all__ = ["HiCacheLMDBStorage"]
