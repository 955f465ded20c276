"""Pictures as SVG: a mask with its wrong cells, and what changed over time.

Colours are classes of the style sheet. Whatever is text in a picture is escaped; the rest is
numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from fuzz.screen import short

Cells = dict[str, list[tuple[int, int]]]
HIDDEN, VISIBLE, LEAKED, LOST = "hidden", "visible", "leaked", "lost"
# Pixels of the longer side of a picture, and the least and the most of a cell.
SIDE, SMALLEST, LARGEST = 560, 9, 44
LABEL = 34
# A plot: its size, and the room for its labels.
WIDE, HIGH, LEFT, BOTTOM, TOP = 380, 150, 44, 20, 8


def cells_of(expected: Sequence[str], got: Sequence[str]) -> Cells:
    """The (row, column) of every cell by what became of it. Rows are strings in which `#` is
    visible; what one of the two lacks is taken from the other."""
    found: Cells = {HIDDEN: [], VISIBLE: [], LEAKED: [], LOST: []}
    kinds = {(True, True): VISIBLE, (False, False): HIDDEN, (False, True): LEAKED,
             (True, False): LOST}
    for i in range(max(len(expected), len(got))):
        meant = expected[i] if i < len(expected) else got[i]
        seen = got[i] if i < len(got) else meant
        for j, (one, other) in enumerate(zip(meant, seen, strict=False)):
            found[kinds[one == "#", other == "#"]].append((i, j))
    return found


def grids(document: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What was expected and what the code did, as far as a document has them."""
    def rows(name: str) -> list[str]:
        given = document.get(name)
        return [str(row)[:128] for row in given[:128]] if isinstance(given, list) else []

    expected, got = rows("expected"), rows("got")
    return (expected, got) if expected and got else ([], [])


def mask_picture(document: Mapping[str, Any]) -> Markup | None:
    """The mask of a finding with every wrong cell marked; queries go down, keys to the right."""
    expected, got = grids(document)
    if not expected:
        return None
    rows, columns = len(expected), max(map(len, expected))
    size = max(SMALLEST, min(LARGEST, SIDE // max(rows, columns, 1)))
    first_q, first_kv = (_number(document.get(name)) for name in ("first_q", "first_kv"))
    cells = cells_of(expected, got)
    width, height = LABEL + columns * size + 2, LABEL + rows * size + 2
    words = (f"{rows} queries by {columns} keys: {len(cells[LEAKED])} leaked, "
             f"{len(cells[LOST])} lost, {len(cells[VISIBLE])} visible and right")
    parts = [
        f'<svg class="mask" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" aria-label="{escape(words)}">',
        _ticks(rows, columns, size, first_q, first_kv),
        f'<g transform="translate({LABEL} {LABEL})">',
        f'<rect class="hidden" width="{columns * size}" height="{rows * size}"/>',
        f'<path class="visible" d="{_runs(cells[VISIBLE], size, 0.5)}"/>',
        f'<path class="grid" d="{_grid(rows, columns, size)}"/>',
    ]
    for kind in (LEAKED, LOST):
        parts += [_wrong(kind, i, j, size, first_q, first_kv) for i, j in cells[kind]]
    return Markup("".join([*parts, "</g></svg>"]))


def _number(given: Any) -> int:
    return given if type(given) is int else 0


def _wrong(kind: str, i: int, j: int, size: int, first_q: int, first_kv: int) -> str:
    """A cell with a sign of its own, so that colour is not all that tells it."""
    x, y, half, arm = j * size, i * size, size / 2, size * 0.24
    sign = f"M{x + half - arm:g} {y + half:g}h{2 * arm:g}"
    if kind == LEAKED:
        sign += f"M{x + half:g} {y + half - arm:g}v{2 * arm:g}"
    said = "visible in the code, hidden in the spec" if kind == LEAKED else \
        "hidden in the code, visible in the spec"
    return (f'<g class="{kind}"><title>query {first_q + i}, key {first_kv + j}: {said}</title>'
            f'<rect x="{x + 1}" y="{y + 1}" width="{size - 2}" height="{size - 2}"/>'
            f'<path d="{sign}"/></g>')


def _ticks(rows: int, columns: int, size: int, first_q: int, first_kv: int) -> str:
    def step(count: int) -> int:
        return next(each for each in (1, 2, 4, 8, 16, 32) if each * size >= 22 or each == 32)

    middle = LABEL + size / 2
    down = "".join(f'<text class="row" x="{LABEL - 6}" y="{middle + i * size:g}">{first_q + i}'
                   "</text>" for i in range(0, rows, step(rows)))
    right = "".join(f'<text class="column" x="{middle + j * size:g}" y="{LABEL - 6}">'
                    f"{first_kv + j}</text>" for j in range(0, columns, step(columns)))
    return (f'<g class="ticks">{down}{right}<text class="axis" x="2" y="11">q \u2193 kv \u2192'
            "</text></g>")


def _grid(rows: int, columns: int, size: int) -> str:
    return ("".join(f"M0 {i * size}h{columns * size}" for i in range(rows + 1))
            + "".join(f"M{j * size} 0v{rows * size}" for j in range(columns + 1)))


def _runs(cells: Iterable[tuple[int, int]], size: float, gap: float = 0.0) -> str:
    """One path over the cells, each run of neighbours in a row as one rectangle."""
    runs: list[list[int]] = []
    for i, j in cells:
        if runs and runs[-1][0] == i and runs[-1][1] + runs[-1][2] == j:
            runs[-1][2] += 1
        else:
            runs.append([i, j, 1])
    return "".join(f"M{j * size + gap:g} {i * size + gap:g}h{n * size - 2 * gap:g}"
                   f"v{size - 2 * gap:g}h-{n * size - 2 * gap:g}z" for i, j, n in runs)


def thumbnail(document: Mapping[str, Any] | None) -> Markup:
    """The same in the size of a line of text; an empty frame where there is no mask."""
    expected, got = grids(document or {})
    cells, side = cells_of(expected, got), max(len(expected), *map(len, expected), 1, 1)
    paths = "".join(f'<path class="{kind}" d="{_runs(cells[kind], 1)}"/>'
                    for kind in (VISIBLE, LEAKED, LOST) if cells[kind])
    return Markup(f'<svg class="thumb" aria-hidden="true" width="44" height="44" '
                  f'viewBox="0 0 {side} {side}"><rect class="hidden" width="{side}" '
                  f'height="{side}"/>{paths}</svg>')


def plot(
    series: Mapping[str, Sequence[tuple[float, float]]], width: int, unit: str = "",
    since: float | None = None, until: float | None = None,
) -> Markup:
    """Steps over time: each point is the start of an interval of `width` seconds and a value of at
    least 0; an interval without a point is a gap."""
    points = [point for some in series.values() for point in some]
    if not points:
        return Markup('<p class="none">Nothing ran in this time.</p>')
    first = min(point[0] for point in points) if since is None else since
    last = max(max(point[0] for point in points) + width, until or 0)
    top = nice(max(point[1] for point in points)) or 1.0
    inside, down = WIDE - LEFT - 4, HIGH - TOP - BOTTOM

    def x(at: float) -> float:
        return round(LEFT + (max(at, first) - first) / max(last - first, 1) * inside, 2)

    def y(value: float) -> float:
        return round(TOP + down * (1 - value / top), 2)

    parts = []
    for k, (name, some) in enumerate(series.items()):
        line, area, end = "", "", None
        for at, value in some:
            a, b = x(at), x(at + width)
            line += f"{'L' if end == at else 'M'}{a} {y(value)}H{b}"
            area += f"M{a} {y(0)}V{y(value)}H{b}V{y(0)}z"
            end = at + width
        words = f"{name}: at most {short(max((value for _, value in some), default=0))}{unit}"
        parts.append(f'<g class="series s{k}"><title>{escape(words)}</title>'
                     f'<path class="area" d="{area}"/><path class="line" d="{line}"/></g>')
    label = "; ".join(f"{name}, at most {short(max((v for _, v in some), default=0))}{unit}"
                      for name, some in series.items())
    return Markup(
        f'<svg class="plot" role="img" viewBox="0 0 {WIDE} {HIGH}" aria-label="{escape(label)}">'
        + "".join(f'<path class="rule" d="M{LEFT} {y(v)}H{WIDE - 4}"/><text class="value" '
                  f'x="{LEFT - 5}" y="{y(v)}">{escape(short(v) if v else "0")}{escape(unit)}'
                  f"</text>" for v in (0, top / 2, top))
        + "".join(parts) + _times(first, last, x) + "</svg>")


def _times(first: float, last: float, x: Any) -> str:
    form = "%H:%M" if last - first <= 2 * 86400 else "%d %b"
    at = [first, (first + last) / 2, last]
    anchors = ("start", "middle", "end")
    return "".join(
        f'<text class="time {anchor}" x="{x(one)}" y="{HIGH - 5}">'
        f"{time.strftime(form, time.gmtime(one))}</text>"
        for one, anchor in zip(at, anchors, strict=True))


def nice(value: float) -> float:
    """The least of 1, 2, 4, 5, 8 times a power of ten that is not below."""
    if value <= 0:
        return 0.0
    size = 1.0
    while size * 10 <= value:
        size *= 10
    while size > value:
        size /= 10
    return next(step * size for step in (1, 2, 4, 5, 8, 10) if step * size >= value)
