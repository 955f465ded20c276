"""Pictures of masks: text, PNG and SVG. Rows are queries and columns keys, in absolute positions.

A cell is `#` visible or `.` hidden. Where two masks are compared, `+` is visible in what was got
only (a leaked key) and `-` is visible in what was expected only (a lost key).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spec.term import SpecError

Array = np.ndarray[Any, Any]

HIDDEN, VISIBLE, LEAKED, LOST = range(4)
SYMBOLS = np.array([".", "#", "+", "-"])
LEGEND = ("hidden", "visible", "leaked: visible in got only", "lost: visible in expected only")
COLOURS = ("#f4f4f4", "#3b6ea5", "#d1495b", "#edae49")
# Text beyond this is not read any more.
MOST_ROWS, MOST_COLUMNS = 200, 200


def cells(expected: Array, got: Array | None = None) -> Array:
    """HIDDEN, VISIBLE, LEAKED or LOST for each cell of one mask or of two."""
    expected = np.asarray(expected, dtype=bool)
    got = expected if got is None else np.asarray(got, dtype=bool)
    return np.where(expected == got, np.where(got, VISIBLE, HIDDEN), np.where(got, LEAKED, LOST))


def rows(seen: Array) -> str:
    """The bare grid, as the catalogue keeps it: a line per query."""
    return "\n".join("".join(SYMBOLS[line]) for line in cells(seen))


def picture(
    expected: Array, got: Array | None = None, *, first_q: int = 0, first_kv: int = 0
) -> str:
    """A labelled grid of `expected`, or of how `got` differs from it, with a legend.

    `first_q` and `first_kv` are the positions of the first row and column. Raises SpecError for a
    grid too large to read.
    """
    grid = cells(expected, got)
    if grid.shape[0] > MOST_ROWS or grid.shape[1] > MOST_COLUMNS:
        raise SpecError(f"{grid.shape[0]} x {grid.shape[1]} cells are too many for text "
                        f"({MOST_ROWS} x {MOST_COLUMNS}): save a picture with --png FILE")
    labels = [str(first_q + i) for i in range(grid.shape[0])]
    margin = max(map(len, [*labels, "q"]))
    lines = [f"{'q':>{margin}} kv {_ruler(first_kv, grid.shape[1])}".rstrip()]
    lines += [f"{label:>{margin}}    {''.join(SYMBOLS[line])}"
              for label, line in zip(labels, grid, strict=True)]
    return "\n".join([*lines, "", _legend(grid, got is not None)])


def _ruler(first: int, length: int) -> str:
    """The position of every fifth column, or of fewer where the numbers are long."""
    width = len(str(first + length)) + 1
    step = next(s for s in (5, 10, 20, 50, 100) if s > width)
    line = ""
    for column in range(length):
        position = first + column
        if (position % step == 0 or column == 0) and (not line or len(line) < column):
            line = line.ljust(column) + str(position)
    return line


def _legend(grid: Array, compared: bool) -> str:
    shown = range(4) if compared else (VISIBLE, HIDDEN)
    text = ", ".join(f"{SYMBOLS[kind]} {LEGEND[kind]}" for kind in shown)
    differing = int((grid >= LEAKED).sum())
    return f"{text}; {differing} of {grid.size} cells differ" if compared else text


def save(
    path: str | Path, expected: Array, got: Array | None = None, *, title: str = "",
    first_q: int = 0, first_kv: int = 0, tile: tuple[int, int] | None = None,
) -> None:
    """Write the picture to a `.png` or `.svg` file.

    With `got`, three pictures side by side: expected, got, differing. `tile` draws the grid of a
    kernel's tiles of (queries, keys), counted from the first row and column.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise SpecError(f"{path}: a picture is a .png or .svg file")
    grids = [("", cells(expected))]
    if got is not None:
        grids = [("expected", cells(expected)), ("got", cells(got)),
                 ("differing", cells(expected, got))]
    height, width = (max(side, 1) for side in np.shape(expected))
    side = (min(max(width * 0.25, 4), 10), min(max(height * 0.25, 3), 10) + 1)
    figure = Figure(figsize=(side[0] * len(grids), side[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, grid) in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids,
                                  strict=True):
        draw(axes, grid, first_q, first_kv, tile)
        axes.set_title(name, fontsize=10)
    figure.suptitle(title, fontsize=10, wrap=True)
    shown = range(4) if got is not None else (VISIBLE, HIDDEN)
    figure.legend(
        handles=[Patch(facecolor=COLOURS[kind], edgecolor="grey", label=LEGEND[kind])
                 for kind in shown],
        loc="outside lower center", ncols=4, fontsize=8, frameon=False,
    )
    # A fixed salt and no date: the same picture is the same file.
    with rc_context({"svg.hashsalt": "maskproof"}):
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None


def draw(axes: Any, grid: Array, first_q: int, first_kv: int,
         tile: tuple[int, int] | None) -> None:
    """`grid` on matplotlib axes; the middle of a cell is at its position."""
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    height, width = grid.shape
    left, top = first_kv - 0.5, first_q - 0.5
    axes.imshow(
        grid, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS) - 1, aspect="auto",
        interpolation="nearest", extent=(left, left + width, top + height, top),
    )
    axes.set_xlabel("key position kv")
    axes.set_ylabel("query position q")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if max(height, width) <= 64:
        axes.vlines([left + i for i in range(1, width)], top, top + height, "white", lw=0.5)
        axes.hlines([top + i for i in range(1, height)], left, left + width, "white", lw=0.5)
    if tile is not None:
        axes.vlines(np.arange(left, left + width, tile[1]), top, top + height, "#222222", lw=0.8)
        axes.hlines(np.arange(top, top + height, tile[0]), left, left + width, "#222222", lw=0.8)
