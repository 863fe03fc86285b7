"""A line chart as one piece of SVG: no library, no network, colours from the page it stands in.

``Chart.svg`` draws axes at round numbers, an optional band around the first line and an optional target line. The
points travel along in a ``data-chart`` attribute, from which the page's script shows the values under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_POINTS = 800  # per line; more than any screen shows

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 34


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x; ``low`` and ``high``, where given, bound a band around them."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw. ``target`` is a horizontal line to compare with."""

    title: str
    lines: Sequence[Line]
    x_label: str = "frames"
    target: float | None = None
    target_label: str = "target"
    marks: bool = False

    def svg(self, *, width: int = 420, height: int = 236) -> str:
        """The chart in a view box of that size (it scales with its place in the page)."""
        lines = [_thin(line) for line in self.lines if line.x]
        if not lines:
            return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self.title)}: no data"></svg>'
        frame = _Frame(lines, self.target, width, height)
        parts = [
            f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self._words())}"'
            f' data-chart="{escape(json.dumps(self._payload(lines, frame)))}">',
            *frame.axes(self.x_label),
        ]
        if self.target is not None:
            y = frame.y(self.target)
            parts.append(f'<line class="target" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for number, line in enumerate(lines):
            parts += frame.band(line, number)
            parts += frame.path(line, number, marks=self.marks or len(line.x) == 1)
        parts.append('<g class="hover" hidden><line class="cursor"/></g></svg>')
        return "".join(parts)

    def _words(self) -> str:
        told = [f"{line.label} from {compact(line.y[0])} to {compact(line.y[-1])}" for line in self.lines if line.x]
        return f"{self.title}: {'; '.join(told)}"

    def _payload(self, lines: Sequence[Line], frame: _Frame) -> dict[str, object]:
        return {
            "x": self.x_label,
            "lines": [
                {
                    "label": line.label,
                    "points": [
                        [round(frame.x(x), 1), round(frame.y(y), 1), _shown(x), _shown(y)]
                        for x, y in zip(line.x, line.y, strict=True)
                    ],
                }
                for line in lines
            ],
            "top": _TOP,
            "bottom": frame.height - _BOTTOM,
        }


class _Frame:
    """The plane of one chart: from numbers to coordinates, and its axes."""

    def __init__(self, lines: Sequence[Line], target: float | None, width: int, height: int) -> None:
        self.width, self.height = width, height
        xs = [x for line in lines for x in line.x]
        ys = [y for line in lines for values in (line.y, line.low, line.high) for y in values]
        if target is not None:
            ys.append(target)
        self._x0, self._x1 = _widen(min(xs), max(xs), 0.0)
        self._y0, self._y1 = _widen(min(ys), max(ys), 0.06)

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x0) / (self._x1 - self._x0) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self._y1 - value) / (self._y1 - self._y0) * (self.height - _TOP - _BOTTOM)

    def axes(self, x_label: str) -> list[str]:
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        parts = []
        in_thousands = max(abs(self._x0), abs(self._x1)) >= 1e4
        for tick in ticks(self._y0, self._y1, max(3, self.height // 45)):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{compact(tick)}</text>')
        for tick in ticks(self._x0, self._x1, max(2, self.width // 90)):
            x = self.x(tick)
            anchor = "middle" if x < right - 16 else "end"
            text = compact(tick, 1e3 if in_thousands else 1e4)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{text}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{right}" y="{self.height - 2}" text-anchor="end">{escape(x_label)}</text>')
        return parts

    def path(self, line: Line, number: int, *, marks: bool) -> list[str]:
        points = [(self.x(x), self.y(y)) for x, y in zip(line.x, line.y, strict=True)]
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts = [f'<polyline class="line c{number % 4}" points="{steps}"/>']
        if marks:
            parts += [f'<circle class="mark c{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
        return parts

    def band(self, line: Line, number: int) -> list[str]:
        if not line.low or not line.high:
            return []
        there = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(line.x, line.high, strict=True)]
        back = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(line.x, line.low, strict=True)]
        return [f'<polygon class="band c{number % 4}" points="{" ".join(there + back[::-1])}"/>']


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten) within ``[low, high]``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 2.5, 5, 10) if (step := factor * power) >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def compact(value: float, thousands_from: float = 1e4) -> str:
    """A number as a person reads it on an axis: 20k, 1.5M, 0.003, −120."""
    size = abs(value)
    for unit, sign, limit in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", thousands_from)):
        if size >= limit:
            return _trim(value / unit) + sign
    if size and size < 1e-3:
        return f"{value:.1e}".replace("-", "−")
    return _trim(value)


def _trim(value: float) -> str:
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return text.replace("-", "−")


def _shown(value: float) -> str:
    """A number under the pointer: more digits than on an axis."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.5g}"


def _widen(low: float, high: float, margin: float) -> tuple[float, float]:
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = (high - low) * margin
    return low - room, high + room


def _thin(line: Line) -> Line:
    step = math.ceil(len(line.x) / MAX_POINTS)
    if step <= 1:
        return line
    keep = sorted({*range(0, len(line.x), step), len(line.x) - 1})

    def kept(values: Sequence[float]) -> list[float]:
        return [values[index] for index in keep] if values else []

    return Line(line.label, kept(line.x), kept(line.y), kept(line.low), kept(line.high))
