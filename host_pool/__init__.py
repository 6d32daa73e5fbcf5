"""Host memory: page-aligned arenas, their budget and their pages."""

if __name__ != "hicache.host_pool":
    raise ImportError("import this package as hicache.host_pool; its folder is not a top-level package")
