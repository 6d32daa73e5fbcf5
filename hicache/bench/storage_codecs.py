"""What each codec costs and gains, on pages of 2 MiB like those of a model: 16 layers, 8 heads of 128, bfloat16."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache.bench.progress import Progress
from hicache.bench.storage_media import Job, measure_store
from hicache.errors import ConfigError
from hicache.layout import KVLayout
from hicache.storage_backends.codecs import CODECS, create_codec
from hicache.storage_backends.codecs_measure import compression_ratio, kv_like_pages, quantisation_error

LAYOUT = KVLayout(num_layers=16, num_kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")
BATCH = 16


def run_codecs(path: Path, total_bytes: int, progress: Progress) -> dict[str, Any]:
    """Write and read `total_bytes` bytes of pages through a store with each codec, in a new folder in `path`.

    Returns {codec: {write, read: {gb_per_s, cpu_s_per_gib}, ratio, slot_ratio, error}}: `ratio` of encoded bytes to
    page bytes, `slot_ratio` of what they take on disk, `error` {max_abs, relative_rms} of a lossy codec, else None.
    A codec whose package is not installed has {note} only. Speeds and CPU time count bytes of pages, not encoded ones.
    """
    pages = kv_like_pages(LAYOUT, BATCH, seed=0)
    job = Job(LAYOUT, BATCH, max(1, total_bytes // (BATCH * LAYOUT.page_bytes)), pages)
    measured = {}
    for name in CODECS:
        progress(f"codec {name}")
        measured[name] = _run_codec(path / f"codec-{name}", job, name)
    return measured


def _run_codec(path: Path, job: Job, name: str) -> dict[str, Any]:
    try:
        codec = create_codec(name, LAYOUT)
    except ConfigError as absent:
        return {"note": str(absent)}
    figures: dict[str, Any] = {way: asdict(each) for way, each in measure_store(path, job, "slab", codec=name).items()}
    if codec is None:
        return {**figures, "ratio": 1.0, "slot_ratio": 1.0, "error": None}
    out = memoryview(bytearray(codec.slot_bytes[-1]))
    lengths = [codec.encode(page, out) for page in job.buffers]
    slots = sum(next(size for size in codec.slot_bytes if size >= length) for length in lengths)
    error = None if codec.exact else asdict(quantisation_error(codec, LAYOUT, job.buffers))
    ratio = compression_ratio(codec, LAYOUT, job.buffers)
    return {**figures, "ratio": ratio, "slot_ratio": slots / (len(lengths) * LAYOUT.page_bytes), "error": error}
