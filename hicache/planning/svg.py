"""Plots as inline SVG: axes with units, lines, areas, bars, dots. Colours are CSS classes of the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 14, 48

XY = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """`title` names the quantity and its unit in parentheses. `log` is the base of a logarithmic axis, 0 for linear."""

    title: str
    low: float
    high: float
    log: int = 0
    show: Callable[[float], str] = "{:,.6g}".format
    most: int = 7

    def __post_init__(self) -> None:
        if self.high <= self.low:
            object.__setattr__(self, "high", self.low * 2 if self.log else self.low + 1)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; what lies outside is put on the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice_step((self.high - self.low) / (self.most - 1))
            first = math.ceil(self.low / step - 1e-9)
            return [step * index for index in range(first, int(self.high / step + 1e-9) + 1)]
        first, last = (
            round_(math.log(end) / math.log(self.log)) for end, round_ in ((self.low, _ceil), (self.high, _floor))
        )
        every = max(1, -(-(last - first + 1) // self.most))
        return [float(self.log) ** power for power in range(first, last + 1, every)]


def _text(css: str, at: XY, text: str, anchor: str = "middle") -> str:
    return f'<text class="{css}" text-anchor="{anchor}" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(text)}</text>'


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)


def _nice_step(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return next(nice for nice in (scale, 2 * scale, 2.5 * scale, 5 * scale, 10 * scale) if nice >= step * (1 - 1e-9))


@dataclass
class Plot:
    """One plot. What is added first lies below; the axes are drawn under everything."""

    label: str
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    _parts: list[str] = field(default_factory=list)

    def at(self, point: XY) -> XY:
        """Where a point of the data lies in the picture."""
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        return (
            self.left + self.x.place(point[0]) * (right - self.left),
            bottom - self.y.place(point[1]) * (bottom - _TOP),
        )

    def line(self, points: Sequence[XY], css: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        self._parts.append(f'<polyline class="line {css}" points="{path}"/>')

    def dot(self, point: XY, css: str, title: str, radius: float = 3.5) -> None:
        x, y = self.at(point)
        self._parts.append(
            f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(title)}</title></circle>'
        )

    def bar(self, span: XY, heights: XY, css: str, title: str) -> None:
        """A bar over `span` of the x axis, between two heights."""
        (left, bottom), (right, top) = self.at((span[0], heights[0])), self.at((span[1], heights[1]))
        self._parts.append(
            f'<rect class="bar {css}" x="{left + 0.7:.1f}" y="{top:.1f}" width="{max(right - left - 1.4, 0.8):.1f}" '
            f'height="{max(bottom - top, 0):.1f}"><title>{escape(title)}</title></rect>'
        )

    def segment(self, start: XY, stop: XY, css: str) -> None:
        (x1, y1), (x2, y2) = self.at(start), self.at(stop)
        self._parts.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def mark(self, value: float, text: str, row: int = 0) -> None:
        """A vertical line with a word at its top; `row` lowers the word."""
        (x, top), (_, bottom) = self.at((value, self.y.high)), self.at((value, self.y.low))
        left = x < (self.left + self.width) / 2
        anchor, at = ("start", x + 4) if left else ("end", x - 4)
        self._parts.append(
            f'<line class="mark" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
            + _text("note", (at, top + 10 + 13 * row), text, anchor)
        )

    def level(self, value: float, text: str, below: bool = False) -> None:
        """A horizontal line with a word at its left end, above or below it."""
        (left, y), (right, _) = self.at((self.x.low, value)), self.at((self.x.high, value))
        self._parts.append(
            f'<line class="mark" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'
            + _text("note", (left + 6, y + (14 if below else -5)), text, "start")
        )

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self._axes())}{''.join(self._parts)}</svg>"
        )

    def _axes(self) -> list[str]:
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        parts = []
        for value in self.y.ticks():
            y = self.at((self.x.low, value))[1]
            parts.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            parts.append(_text("tick", (self.left - 8, y + 4), self.y.show(value), "end"))
        for value in self.x.ticks():
            x = self.at((value, self.y.low))[0]
            parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}"/>')
            parts.append(_text("tick", (x, bottom + 18), self.x.show(value)))
        middle = (_TOP + bottom) / 2
        parts.append(f'<line class="axis" x1="{self.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        parts.append(_text("title x-title", ((self.left + right) / 2, self.height - 8), self.x.title))
        parts.append(
            f'<text class="title y-title" text-anchor="middle" transform="translate(14 {middle:.1f}) rotate(-90)">'
            f"{escape(self.y.title)}</text>"
        )
        return parts
