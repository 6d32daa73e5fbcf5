"""A plan for people (rich tables) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.config.units import format_bytes
from hicache.planning.budget import tier_word
from hicache.planning.curves import Curve, Point, TierCurves
from hicache.planning.plan import ENOUGH, Plan
from hicache.planning.suggestion import size_words
from hicache.types import Tier


def seconds_text(seconds: float) -> str:
    """Three digits in ms or s, and from two minutes on in minutes or hours."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _short_bytes(nbytes: int) -> str:
    """Three digits."""
    value, unit = format_bytes(nbytes).split()
    return f"{float(value):.3g} {unit}" if float(value) < 1000 else f"{float(value):.0f} {unit}"


def to_table(plan: Plan) -> RenderableType:
    parts: list[RenderableType] = [_head(plan), Text("")]
    for curves in plan.tiers:
        parts += [_tier_table(plan, curves), Text("")]
    return Group(*parts, _suggestion(plan), *_notes(plan))


def _head(plan: Plan) -> Text:
    pages, model = plan.given.pages, plan.given.model
    reach = plan.explorer.hits.reachable / max(pages.total_tokens, 1)
    footprint = format_bytes(pages.unique_pages * pages.page_size * plan.token_bytes)
    return Text(
        f"{len(pages.trace):,} requests, {pages.total_tokens:,} prompt tokens; {model.name}: "
        f"{plan.token_bytes:,} B of KV a token and rank, {model.dtype}\n"
        f"a cache without limit hits {reach:.1%} and takes {footprint}; without a cache a request takes "
        f"{seconds_text(plan.nothing.ttft_mean)} to its first token, if it waits for no other"
    )


def _tier_table(plan: Plan, tier: TierCurves) -> Table:
    table = Table(title=_title(plan, tier), box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column(f"{tier_word(tier.tier)} size", justify="right")
    for name in tier.curves:
        table.add_column(f"{name} hits", justify="right")
        table.add_column("TTFT mean", justify="right")
        table.add_column("p99", justify="right")
    if tier.bound:
        table.add_column("MIN hits", justify="right")
    bound = dict(tier.bound)
    bend = next(iter(tier.curves.values())).knee
    knees = {bend.size} if bend is not None else set()
    for size in sorted({*tier.sizes(), *knees}):
        row = [f"{_short_bytes(size)} {'*' if size in knees else ' '}"]
        for curve in tier.curves.values():
            row += _cells(curve, size)
        if tier.bound:
            row.append(f"{bound[size]:.1%}" if size in bound else "")
        table.add_row(*row, style="bold" if size in knees else None)
    return table


def _title(plan: Plan, tier: TierCurves) -> str:
    above = [f"{tier_word(upper)} {size_words(plan.sizes.of(upper))}" for upper in Tier if upper < tier.tier]
    below = f" below {', '.join(above)}" if above else ""
    alone = f", which hits {tier.without.hit_rate:.1%} alone" if above else ""
    return f"{tier_word(tier.tier)}{below}{alone}"


def _cells(curve: Curve, size: int) -> Sequence[str]:
    point = next((point for point in curve.points if point.size == size), None)
    if point is None:
        return "", "", ""
    return f"{point.hit_rate:.1%}", seconds_text(point.ttft_mean), seconds_text(point.ttft_p99)


def suggestion_text(plan: Plan) -> str:
    sizes = ", ".join(f"{tier_word(tier)} {size_words(plan.sizes.of(tier))}" for tier in Tier if plan.sizes.of(tier))
    return f"{sizes}, eviction {plan.policy}"


def _suggestion(plan: Plan) -> RenderableType:
    table = Table(title=f"suggested: {suggestion_text(plan)}", box=None, pad_edge=False, title_justify="left")
    for column in ("", "hits", "TTFT mean", "p50", "p99"):
        table.add_column(column, justify="left" if not column else "right", header_style="bold")
    for what, point in (("no cache", plan.nothing), ("predicted, without waiting", plan.predicted)):
        table.add_row(what, *_point_cells(point))
    simulated = plan.simulated
    if simulated is not None:
        ttft = simulated.ttft
        replayed = Point(0, simulated.replay.hit_rate, ttft.mean, ttft.p50, ttft.p99)
        table.add_row("replayed without bytes, waiting included", *_point_cells(replayed))
    return table


def _point_cells(point: Point) -> Sequence[str]:
    times = (point.ttft_mean, point.ttft_p50, point.ttft_p99)
    return f"{point.hit_rate:.1%}", *(seconds_text(value) for value in times)


def notes(plan: Plan, mark: str) -> list[str]:
    """What a reader has to know of the figures; `mark` is what shows the knee."""
    found = [
        f"suggested is the least size that saves {ENOUGH:.0%} of the mean time to first token that the limit of its "
        f"tier saves; {mark} marks the knee, the point of the lru curve farthest above the line between its "
        "ends (Kneedle)",
        f"sizes are those of one rank; a page of the trace is the unit of sharing, {plan.given.pages.page_size} tokens",
    ]
    found += [*_room(plan), *_waiting(plan)]
    note = plan.given.model.note()
    left_out = [tier_word(tier.tier) for tier in plan.tiers if not plan.sizes.of(tier.tier)]
    if left_out:
        found.append(f"left out, it would save next to nothing here: {', '.join(left_out)}")
    return [*found, note] if note else found


def _room(plan: Plan) -> list[str]:
    """Whether the requests fit into the device tier, those that run together and the longest alone."""
    floor, limit = plan.floor, plan.given.limits[Tier.DEVICE]
    found = [
        f"the longest request takes {floor.longest:,} tokens, {_short_bytes(floor.longest_bytes)}: on a smaller device "
        f"tier it cannot run and counts as a miss; {floor.running} running at a time take about "
        f"{_short_bytes(floor.running_bytes)}"
    ]
    if (cannot := int(plan.explorer.too_long(limit).sum())) > 0:
        share = cannot / len(plan.given.pages.trace)
        found.append(
            f"{cannot:,} requests ({share:.1%}) do not fit into the device limit of {size_words(limit)}, they cannot "
            "run: raise it, shard the model over more ranks (--tp) or use a smaller KV type (--kv-dtype fp8)"
        )
    elif floor.running_bytes > limit:
        found.append(
            f"the device limit of {size_words(limit)} holds fewer than {floor.running} of them: fewer run at a time"
        )
    return found


def _waiting(plan: Plan) -> list[str]:
    """A word of warning if the replayed times are mostly waiting."""
    if plan.simulated is None or plan.simulated.queued.mean <= plan.predicted.ttft_mean:
        return []
    return [
        f"replayed, requests wait {seconds_text(plan.simulated.queued.mean)} for others on average: one such machine "
        "is too slow for this trace, or its device tier has room for too few running requests"
    ]


def _notes(plan: Plan) -> list[RenderableType]:
    return [Text(line, "dim") for line in notes(plan, "*")]


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain values: bytes, tokens, seconds, shares."""
    pages, simulated = plan.given.pages, plan.simulated
    return {
        "model": {
            "name": plan.given.model.name,
            "dtype": plan.given.model.dtype,
            "tp": plan.given.tp,
            "bytes_per_token": plan.token_bytes,
        },
        "trace": {
            "requests": len(pages.trace),
            "prompt_tokens": pages.total_tokens,
            "page_tokens": pages.page_size,
            "unique_pages": pages.unique_pages,
            "reachable_hit_rate": plan.explorer.hits.reachable / max(pages.total_tokens, 1),
        },
        "tiers": {tier_word(tier.tier): _tier_json(tier) for tier in plan.tiers},
        "no_cache": _point_json(plan.nothing),
        "suggested": {
            "sizes": {tier_word(tier): plan.sizes.of(tier) for tier in Tier},
            "eviction": plan.policy,
            "floor": asdict(plan.floor),
            "predicted": _point_json(plan.predicted),
            "replayed": None
            if simulated is None
            else {
                "hit_rate": simulated.replay.hit_rate,
                "skipped_requests": len(simulated.replay.skipped),
                "skipped_tokens": simulated.replay.skipped_tokens,
                "hit_tokens": dict(simulated.replay.hit_tokens),
                "ttft_mean": simulated.ttft.mean,
                "ttft_p50": simulated.ttft.p50,
                "ttft_p99": simulated.ttft.p99,
                "queued_mean": simulated.queued.mean,
            },
            "config": dict(plan.values),
        },
    }


def _tier_json(tier: TierCurves) -> dict[str, Any]:
    return {
        "limit": tier.limit,
        "without": _point_json(tier.without),
        "policies": {
            name: {
                "knee": curve.knee.size if curve.knee is not None else None,
                "points": [_point_json(point, sized=True) for point in curve.points],
            }
            for name, curve in tier.curves.items()
        },
        "min": [{"size": size, "hit_rate": rate} for size, rate in tier.bound],
    }


def _point_json(point: Point, sized: bool = False) -> dict[str, float]:
    size = {"size": point.size} if sized else {}
    times = {"ttft_mean": point.ttft_mean, "ttft_p50": point.ttft_p50, "ttft_p99": point.ttft_p99}
    return {**size, "hit_rate": point.hit_rate, **times}
