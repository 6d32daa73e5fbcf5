"""`hicache bench storage`: the disk tier beside a raw O_DIRECT file, in one run on the same pages.

Every medium gets the same batches: write all, then read all cold. Raw writes are made durable once at the end, those
of "raw synced" after each batch, as the index of a store if `durability` says so. Ratios are to the former.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache.bench.progress import Progress
from hicache.bench.storage_media import (
    GIB,
    Job,
    Measured,
    measure_raw,
    measure_store,
    opaque_layout,
    random_pages,
    scratch_folder,
)
from hicache.errors import ConfigError
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_env import Durability


def run(
    path: Path,
    page_bytes: int = 2 << 20,
    batch: int = 16,
    total_bytes: int = GIB,
    durability: Durability = "batch",
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure in a new folder inside `path`, which is removed at the end.

    Returns {page_bytes, batch, total_bytes, durability, media: {raw, "raw synced", slab, inline: {write, read:
    {gb_per_s, cpu_s_per_gib}}}, ratio_to_raw: {slab, inline: {write, read}}, codecs: as
    `storage_codecs.run_codecs`}. Raises ConfigError for sizes that cannot be measured, IntegrityError if a page comes
    back with other bytes.
    """
    from hicache.bench.storage_codecs import run_codecs

    job = _job(page_bytes, batch, total_bytes)
    media: dict[str, dict[str, Measured]] = {}
    with scratch_folder(Path(path)) as folder:
        progress("raw")
        media["raw"] = measure_raw(folder / "raw", job)
        media["raw synced"] = measure_raw(folder / "raw", job, synced=True)
        values: ValuesMode
        for values in ("slab", "inline"):
            progress(values)
            media[values] = measure_store(folder / values, job, values, durability)
        codecs = run_codecs(folder, job.nbytes // 2, progress)
    ratios = {
        name: {way: media[name][way].gb_per_s / media["raw"][way].gb_per_s for way in ("write", "read")}
        for name in ("slab", "inline")
    }
    return {
        "page_bytes": page_bytes,
        "batch": batch,
        "total_bytes": job.nbytes,
        "durability": durability,
        "media": {name: {way: asdict(figure) for way, figure in ways.items()} for name, ways in media.items()},
        "ratio_to_raw": ratios,
        "codecs": codecs,
    }


def _job(page_bytes: int, batch: int, total_bytes: int) -> Job:
    if page_bytes < 4 or page_bytes % 4 or batch < 1 or total_bytes < page_bytes * batch:
        raise ConfigError(
            f"page_bytes {page_bytes}, batch {batch}, total_bytes {total_bytes}: "
            "a page is a multiple of 4 bytes, and the total is at least one batch"
        )
    layout = opaque_layout(page_bytes)
    return Job(layout, batch, total_bytes // (page_bytes * batch), random_pages(layout, batch))
