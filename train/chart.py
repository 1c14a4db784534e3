"""Line charts over steps as SVG, for a page whose CSS has the colours; dashes and marks tell lines apart without."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 26, 50, 34
_POINTS = 240  # of a line; more are binned
_MARKED = 40  # points of a line up to which each has a mark
_DASHES = ("none", "6 3", "2 2", "8 3 2 3", "1 3", "12 3")
_MARKS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M-3-3h6v6h-6z",
    "M0-4l4 7h-8z",
    "M0-4l4 4l-4 4l-4-4z",
    "M-1-4h2v8h-2z",
    "M-4-1h8v2h-8z",
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line: `points` are (x, y), x ascending, all finite."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(
    title: str, lines: Sequence[Line], steps: tuple[float, float], *, zero: bool = False
) -> Markup:
    """An SVG element of the lines over one another.

    Args:
        title: Above the chart.
        lines: At least one; each has points. Many points are binned: their mean, over a band from the least
            to the greatest.
        steps: The first and the last of the horizontal axis.
        zero: Whether the vertical axis begins at 0.
    """
    head = Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}"><text class="title" x="{}" y="16">{}</text>'
    ).format(WIDTH, HEIGHT, title, _LEFT, title)
    ys = [y for line in lines for _, y in line.points]
    x_ticks, y_ticks = ticks(*steps), ticks(0.0 if zero else min(ys), max(ys))
    scale = _Scale(steps[0], max(steps[1], steps[0] + 1), y_ticks[0], y_ticks[-1])
    parts = [head, *_axes(scale, x_ticks, y_ticks)]
    parts += [part for i, line in enumerate(lines) for part in _drawn(scale, i, line)]
    if len(lines) > 1 or lines[0].name:
        parts += _legend(lines)
    return Markup("").join([*parts, Markup("</svg>")])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Two to `count` + 2 round numbers, the first at or below `low` and the last at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= count)
    return [i * step for i in range(math.floor(low / step), math.ceil((low + span) / step) + 1)]


def binned(
    points: Sequence[tuple[float, float]], count: int = _POINTS
) -> list[tuple[float, float, float, float]]:
    """(x, mean, least, greatest) of up to `count` bins of neighbouring points; x is the bin's last."""
    edges = [i * len(points) // min(count, len(points)) for i in range(min(count, len(points)) + 1)]
    found = []
    for start, end in itertools.pairwise(edges):
        ys = [y for _, y in points[start:end]]
        found.append((points[end - 1][0], math.fsum(ys) / len(ys), min(ys), max(ys)))
    return found


@dataclasses.dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        part = (value - self.x_low) / (self.x_high - self.x_low)
        return round(_LEFT + part * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM), 1)


def _axes(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Iterator[Markup]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for value in y_ticks:
        at = scale.y(value)
        yield Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, at, right)
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            _LEFT - 6, at + 4, number(value)
        )
    for value in x_ticks:
        if scale.x_low <= value <= scale.x_high and value == int(value):
            at = scale.x(value)
            yield Markup('<path class="axis" d="M{} {}v4"/>').format(at, bottom)
            yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                at, bottom + 15, number(value)
            )
    yield Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, bottom, right)
    yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
        right, HEIGHT - 4, "step"
    )


def _drawn(scale: _Scale, index: int, line: Line) -> Iterator[Markup]:
    """A line: its band where it is binned, itself, and its marks where it has few points."""
    bins = binned(line.points)
    if len(bins) < len(line.points):
        over = [f"{scale.x(x)} {scale.y(high)}" for x, _, _, high in bins]
        under = [f"{scale.x(x)} {scale.y(low)}" for x, _, low, _ in reversed(bins)]
        yield Markup('<path class="band s{}" d="M{}z"/>').format(index, "L".join(over + under))
    path = "L".join(f"{scale.x(x)} {scale.y(y)}" for x, y, _, _ in bins)
    yield Markup('<path class="line s{}" stroke-dasharray="{}" d="M{}"/>').format(
        index, _DASHES[index % len(_DASHES)], path
    )
    if len(bins) <= _MARKED:
        for x, y, _, _ in bins:
            yield _mark(index, scale.x(x), scale.y(y), f"{line.name} {number(x)}: {y:.4g}")


def _mark(index: int, x: float, y: float, told: str = "") -> Markup:
    return Markup(
        '<path class="mark s{}" transform="translate({} {})" d="{}"><title>{}</title></path>'
    ).format(index, x, y, _MARKS[index % len(_MARKS)], told)


def _legend(lines: Sequence[Line]) -> Iterator[Markup]:
    """Below the title, from left to right."""
    x = _LEFT
    for index, line in enumerate(lines):
        yield Markup('<path class="line s{}" stroke-dasharray="{}" d="M{} 32h24"/>').format(
            index, _DASHES[index % len(_DASHES)], x
        )
        yield _mark(index, x + 12, 32)
        yield Markup('<text class="tick" x="{}" y="36">{}</text>').format(x + 29, escape(line.name))
        x += 44 + round(6.4 * len(line.name))


def number(value: float) -> str:
    """A tick's label."""
    return f"{value:,.6g}"
