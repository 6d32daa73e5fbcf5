"""Storage tiers: the backend contract, the registry and the backends that ship."""

if __name__ != "hicache.storage_backends":
    raise ImportError("import this package as hicache.storage_backends; its folder is not a top-level package")
