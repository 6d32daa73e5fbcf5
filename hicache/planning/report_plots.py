"""The plots of a report, each a card with a heading, a legend and a line that says how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from hicache.config.units import format_bytes
from hicache.planning.budget import tier_word
from hicache.planning.curves import SIMULATED, Point, TierCurves
from hicache.planning.pages import Floats, Ints
from hicache.planning.plan import Plan
from hicache.planning.suggestion import size_words
from hicache.planning.svg import Axis, Plot
from hicache.planning.tables import seconds_text
from hicache.types import Tier

_GIB, _MIB = 1 << 30, 1 << 20
_BINS = 72
_SESSIONS = 40
_COLOURS = 6

_NARROW = 0.6
"""A curve that stays above this share of its highest point is shown without the room below it."""


def card(heading: str, body: str, legend: Sequence[tuple[str, str]] = (), note: str = "", wide: bool = False) -> str:
    """`legend`: CSS class and name of each series."""
    swatches = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for css, name in legend)
    return (
        f'<section class="card{" wide" if wide else ""}"><h2>{escape(heading)}</h2>'
        + (f'<ul class="legend">{swatches}</ul>' if swatches else "")
        + body
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</section>"
    )


def _byte_axis(title: str, low: float, high: float) -> Axis:
    scale, unit = (_GIB, "GiB") if high >= 2 * _GIB else (_MIB, "MiB")
    return Axis(f"{title} ({unit}, log scale)", low / scale, high / scale, log=2)


def _scale(high: float) -> int:
    return _GIB if high >= 2 * _GIB else _MIB


# ---- curves ---------------------------------------------------------------------------------


def tier_cards(plan: Plan) -> list[str]:
    cards = []
    for tier in plan.tiers:
        cards += [_hit_card(plan, tier), _ttft_card(plan, tier)]
    return cards


def _legend(tier: TierCurves, bound: bool) -> list[tuple[str, str]]:
    named = [(_series(index), name) for index, name in enumerate(tier.curves)]
    if next(iter(tier.curves.values())).knee is not None:
        named.append(("s0 ring", "knee of lru"))
    return [*named, ("bound", "MIN, the offline optimum")] if bound and tier.bound else named


def _series(index: int) -> str:
    """CSS classes of a policy: six colours, then the same dotted and dashed."""
    return f"s{index % _COLOURS}" + ("", " dotted", " dashed")[min(index // _COLOURS, 2)]


def _x_axis(tier: TierCurves) -> Axis:
    return _byte_axis(f"size of the {tier_word(tier.tier)} tier", tier.limit / 64, tier.limit)


def _hit_card(plan: Plan, tier: TierCurves) -> str:
    rates = [point.hit_rate for curve in tier.curves.values() for point in curve.points]
    rates += [rate for _, rate in tier.bound]
    reachable = plan.explorer.hits.reachable / max(plan.given.pages.total_tokens, 1)
    high = min(_round_up(1.08 * max([*rates, reachable * 0.5]) * 100), 100.0)
    plot = Plot(
        f"hit rate against {tier_word(tier.tier)} size", _x_axis(tier), Axis("prompt tokens hit (%)", 0, high, most=6)
    )
    scale = _scale(tier.limit)
    if tier.without.hit_rate:
        plot.level(tier.without.hit_rate * 100, f"tiers above alone: {tier.without.hit_rate:.1%}", below=True)
    if tier.bound:
        plot.line([(size / scale, 100 * rate) for size, rate in tier.bound], "bound")
    _lines(plot, tier, scale, lambda point: 100 * point.hit_rate, lambda point: f"{point.hit_rate:.1%}")
    _marks(plan, plot, tier, scale, lambda point: 100 * point.hit_rate)
    word = tier_word(tier.tier).capitalize()
    note = f"A cache without limit hits {reachable:.1%}." + (
        " The lru curve is one pass over the trace; points are simulated." if len(tier.curves) > 1 else ""
    )
    return card(f"{word}: hit rate of it and all tiers above", plot.svg(), _legend(tier, bound=True), note)


def _ttft_card(plan: Plan, tier: TierCurves) -> str:
    times = [point.ttft_mean for curve in tier.curves.values() for point in curve.points]
    high = max([*times, tier.without.ttft_mean])
    low = 0.97 * min(times) if min(times) > _NARROW * high else 0.0
    scale, unit = (1e3, "ms") if high < 1 else (1.0, "s")
    height = _round_up(1.08 * high * scale) if not low else (high + 0.1 * (high - low)) * scale
    plot = Plot(
        f"time to first token against {tier_word(tier.tier)} size",
        _x_axis(tier),
        Axis(f"mean time to first token ({unit})", low * scale, height, most=6),
    )
    size_scale = _scale(tier.limit)
    plot.level(tier.without.ttft_mean * scale, f"without it: {seconds_text(tier.without.ttft_mean)}")
    _lines(plot, tier, size_scale, lambda point: scale * point.ttft_mean, lambda point: seconds_text(point.ttft_mean))
    _marks(plan, plot, tier, size_scale, lambda point: scale * point.ttft_mean)
    word = tier_word(tier.tier).capitalize()
    note = "Modelled for a request that waits for no other: loads, then prefill of what is not cached."
    return card(f"{word}: mean time to first token", plot.svg(), _legend(tier, bound=False), note)


def _lines(
    plot: Plot, tier: TierCurves, scale: int, value: Callable[[Point], float], show: Callable[[Point], str]
) -> None:
    for index, (name, curve) in enumerate(tier.curves.items()):
        plot.line([(point.size / scale, value(point)) for point in curve.points], _series(index))
        simulated = len(curve.points) <= SIMULATED
        for point in curve.points:
            plot.dot(
                (point.size / scale, value(point)),
                _series(index) if simulated else f"{_series(index)} quiet",
                f"{name} at {format_bytes(point.size)}: {show(point)}",
            )


def _marks(plan: Plan, plot: Plot, tier: TierCurves, scale: int, value: Callable[[Point], float]) -> None:
    knee = next(iter(tier.curves.values())).knee
    if knee is not None:
        plot.dot((knee.size / scale, value(knee)), "s0 knee", f"knee of lru: {format_bytes(knee.size)}", 6)
    suggested = plan.sizes.of(tier.tier)
    if suggested:
        plot.mark(suggested / scale, f"suggested {size_words(suggested)}", row=0)


def _round_up(value: float) -> float:
    """A little more, on a tick."""
    step = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * factor >= value)


# ---- over time ------------------------------------------------------------------------------


def time_card(plan: Plan) -> str:
    split = plan.explorer.split(plan.policy, plan.sizes)
    scale, unit = _time_unit(float(plan.given.pages.arrivals[-1]))
    at = plan.given.pages.arrivals / scale
    edges = np.linspace(0, max(float(at[-1]), 1e-9), _BINS + 1)
    asked = np.histogram(at, edges, weights=plan.given.pages.prompt_tokens)[0]
    plot = Plot("hits over time", Axis(f"time since the first request ({unit})", 0, float(edges[-1])), _PERCENT, 1150)
    for start, stop in zip(edges[:-1][asked > 0].tolist(), edges[1:][asked > 0].tolist()):
        plot.bar((start, stop), (0.0, 100.0), "rest", "computed")
    base = np.zeros(_BINS)
    legend = []
    for index, (tier, tokens) in enumerate(zip(Tier, (split.device, split.host, split.storage))):
        if not plan.sizes.of(tier):
            continue
        found = np.histogram(at, edges, weights=tokens)[0]
        share = 100 * np.divide(found, asked, out=np.zeros(_BINS), where=asked > 0)
        for start, stop, low, high in zip(edges[:-1], edges[1:], base, base + share):
            if high > low:
                text = f"{start:.3g} to {stop:.3g} {unit}: {high - low:.1f} % on {tier_word(tier)}"
                plot.bar((float(start), float(stop)), (float(low), float(high)), f"a{index}", text)
        base = base + share
        legend.append((f"a{index}", f"hit on {tier_word(tier)}"))
    return card(
        f"Hits over time, {plan.policy} at the suggested sizes",
        plot.svg(),
        [*legend, ("rest", "computed")],
        f"Shares of the prompt tokens that arrive in each {_duration((edges[1] - edges[0]) * scale)}.",
        wide=True,
    )


_PERCENT = Axis("prompt tokens (%)", 0, 100, most=6)


def _time_unit(seconds: float) -> tuple[float, str]:
    units = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((scale, unit) for scale, unit in units if seconds >= 3 * scale or scale == 1)


def _duration(seconds: float) -> str:
    scale, unit = _time_unit(seconds)
    return f"{seconds / scale:.3g} {unit}"


# ---- reuse ----------------------------------------------------------------------------------


def reuse_cards(plan: Plan) -> list[str]:
    pages, reuse = plan.given.pages, plan.explorer.hits.reuse
    share = 100 * pages.page_size / max(pages.total_tokens, 1)
    size = (reuse.reach * (plan.token_bytes * pages.page_size)).astype(float)
    return [_distance_card(plan, size, share), _idle_card(reuse.idle, share)]


def _distance_card(plan: Plan, size: Floats, share: float) -> str:
    high = float(size.max()) if len(size) else 2.0 * _GIB
    scale = _scale(high)
    low = max(float(size.min()) if len(size) else high / 64, high / 2**16)
    plot, heights = _histogram(
        "reuse distance", size / scale, share, _byte_axis("memory that would have kept it", low, high), "p0"
    )
    memory = plan.sizes.device + plan.sizes.host
    marks = [("device", plan.sizes.device), ("+ host", memory if plan.sizes.host else 0)]
    marks.append(("disk", plan.sizes.storage if plan.sizes.storage > memory else 0))
    for row, (name, value) in enumerate(marks):
        if low <= value <= high:
            plot.mark(value / scale, name, row)
    note = f"{sum(heights):.1f} % of the prompt tokens were seen before; lru hits what lies left of a line."
    return card("Reuse distance", plot.svg(), note=note)


def _idle_card(idle: Floats, share: float) -> str:
    late = np.maximum(idle, 0.1)
    high = float(late.max()) if len(late) else 10.0
    axis = Axis("time since it was last used (s, log scale)", 0.1, max(high, 1.0), log=10)
    plot, _ = _histogram("time to reuse", late, share, axis, "p1")
    note = "How long KV lies idle before it is used again: what a time to live would have to be."
    return card("Time until reuse", plot.svg(), note=note)


def _histogram(label: str, values: Floats, share: float, x: Axis, css: str) -> tuple[Plot, list[float]]:
    """`share`: percent that one value stands for."""
    edges = np.geomspace(x.low, x.high, 41)
    heights = np.histogram(np.clip(values, x.low, x.high), edges)[0] * share
    plot = Plot(label, x, Axis("prompt tokens (%)", 0, _round_up(1.1 * float(heights.max(initial=0.1))), most=6))
    for start, stop, height in zip(edges[:-1].tolist(), edges[1:].tolist(), heights.tolist()):
        plot.bar((start, stop), (0.0, height), css, f"{start:,.3g} to {stop:,.3g}: {height:.2f} %")
    return plot, heights.tolist()


# ---- sessions -------------------------------------------------------------------------------


def session_card(plan: Plan) -> str:
    pages = plan.given.pages
    names = np.array([request.session or "" for request in pages.trace])
    known = np.unique(names[names != ""])
    if not len(known):
        return card(
            "Sessions", '<p class="empty">This trace does not say which requests belong to one session.</p>', wide=True
        )
    split = plan.explorer.split(plan.policy, plan.sizes)
    shown = _largest(names, pages.prompt_tokens, pages.arrivals)
    scale, unit = _time_unit(float(pages.arrivals[-1]))
    high = float(pages.arrivals[-1]) / scale
    plot = Plot(
        "sessions",
        Axis(f"time since the first request ({unit})", 0, high),
        Axis("session (number, by start)", 0, len(shown) + 1, most=5),
        1150,
        90 + 9 * len(shown),
    )
    for row, name in enumerate(shown, 1):
        mine = np.flatnonzero(names == name)
        at = pages.arrivals[mine] / scale
        plot.segment((float(at[0]), row), (float(at[-1]), row), "life")
        for index, time in zip(mine.tolist(), at.tolist()):
            rate = int(split.hits[index]) / max(int(pages.prompt_tokens[index]), 1)
            text = f"session {name}, {int(pages.prompt_tokens[index]):,} tokens, {rate:.0%} hit"
            plot.dot((time, row), f"h{min(int(rate * 5), 4)}", text, 3)
    turns = np.unique(names[names != ""], return_counts=True)[1]
    legend = [(f"h{step}", f"{20 * step} to {20 * step + 20} % hit") for step in range(5)]
    note = (
        f"{len(known):,} sessions, {np.median(turns):.0f} requests in the median one; "
        f"shown are the {len(shown)} with most prompt tokens. Each dot is a request."
    )
    return card("Sessions", plot.svg(), legend, note, wide=True)


def _largest(names: np.ndarray[tuple[int], np.dtype[np.str_]], tokens: Ints, arrivals: Floats) -> list[str]:
    """The sessions with most prompt tokens, by their start."""
    known, index = np.unique(names, return_inverse=True)
    total = np.bincount(index, weights=tokens)
    total[known == ""] = -1
    best = np.argsort(-total, kind="stable")[:_SESSIONS]
    start = np.full(len(known), math.inf)
    np.minimum.at(start, index, arrivals)
    return [str(known[at]) for at in sorted(best.tolist(), key=lambda at: start[at]) if known[at] != ""]
