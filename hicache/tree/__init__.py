"""The radix tree over token prefixes: pure bookkeeping, no torch, threads, clocks or I/O."""
