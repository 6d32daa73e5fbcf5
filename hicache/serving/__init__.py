"""A small inference engine to read: it shows how a scheduler, a paged model and the cache work together."""
