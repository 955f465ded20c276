"""The one table of examples: a term in text, an environment, and the value worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec.from_text import from_text
from spec.term import BOOL, INT, Term

# x is a column and y a row, so that a value over both is a matrix.
X, Y = [[-2], [0], [3]], [-3, -1, 2]
TABLES = {"t": [5, -7, 0, 2], "u": [[1, 4], [6, 6], [-1, -1]]}


@dataclass(frozen=True, slots=True)
class Example:
    """`text` has the value `expected` where x and y take the values X and Y."""

    text: str
    expected: Any
    sort: str = BOOL

    @property
    def term(self) -> Term:
        return from_text(self.text, sort=self.sort)

    @property
    def env(self) -> Mapping[str, Any]:
        return {"x": X, "y": Y, **TABLES}


def _int(text: str, *expected: Any) -> Example:
    return Example(text, list(expected), INT)


def _bool(text: str, *rows: str) -> Example:
    return Example(text, [[cell == "#" for cell in row] for row in rows])


EXAMPLES = (
    _bool("True", "###", "###", "###"),
    _bool("False", "...", "...", "..."),
    _int("-4", [-4, -4, -4], [-4, -4, -4], [-4, -4, -4]),
    _int("x", [-2, -2, -2], [0, 0, 0], [3, 3, 3]),
    _int("x + y", [-5, -3, 0], [-3, -1, 2], [0, 2, 5]),
    _int("x - y", [1, -1, -4], [3, 1, -2], [6, 4, 1]),
    _int("2 - (x - 1)", [5, 5, 5], [3, 3, 3], [0, 0, 0]),
    _int("-x", [2, 2, 2], [0, 0, 0], [-3, -3, -3]),
    _int("x * y", [6, 2, -4], [0, 0, 0], [-9, -3, 6]),
    _int("x * (y + 1) - 2", [2, -2, -8], [-2, -2, -2], [-8, -2, 7]),
    _int("x // y", [0, 2, -1], [0, 0, 0], [-1, -3, 1]),
    _int("x % y", [-2, 0, 0], [0, 0, 0], [0, 0, 1]),
    _int("x // 2 * 2", [-2, -2, -2], [0, 0, 0], [2, 2, 2]),
    _int("y // -2", [1, 0, -1], [1, 0, -1], [1, 0, -1]),
    _int("y % -2", [-1, -1, 0], [-1, -1, 0], [-1, -1, 0]),
    _int("truncdiv(y, 2)", [-1, 0, 1], [-1, 0, 1], [-1, 0, 1]),
    _int("truncmod(y, 2)", [-1, -1, 0], [-1, -1, 0], [-1, -1, 0]),
    _int("truncdiv(x, y)", [0, 2, -1], [0, 0, 0], [-1, -3, 1]),
    _int("truncmod(x, y)", [-2, 0, 0], [0, 0, 0], [0, 0, 1]),
    _int("truncmod(-7, y)", [-1, 0, -1], [-1, 0, -1], [-1, 0, -1]),
    _int("min(x, y)", [-3, -2, -2], [-3, -1, 0], [-3, -1, 2]),
    _int("max(x, y, 1)", [1, 1, 2], [1, 1, 2], [3, 3, 3]),
    _int("min(2, 5) - max(-1, 1)", [1, 1, 1], [1, 1, 1], [1, 1, 1]),
    _bool("x < y", ".##", "..#", "..."),
    _bool("x <= y + 1", "###", ".##", "..#"),
    _bool("x == y - 1", ".#.", "...", "..."),
    _bool("x + y == 0", "..#", "...", "#.."),
    _bool("x != y + 1", ".##", "#.#", "##."),
    _bool("-2 <= x < y <= 2", ".##", "..#", "..."),
    _bool("x < 0 and y < 0", "##.", "...", "..."),
    _bool("x < 0 or y < 0 or x == y + 1", "###", "##.", "###"),
    _bool("x < 0 and y < 0 or x == 3 and y == 2", "##.", "...", "..#"),
    _bool("x < 0 and (y < 0 or x == 3)", "##.", "...", "..."),
    _bool("not x < y", "#..", "##.", "###"),
    _bool("not (x < 0 and y < 0)", "..#", "###", "###"),
    _bool("not 1 < 2 or x == 0", "...", "###", "..."),
    _int("x if x < y else y", [-3, -2, -2], [-3, -1, 0], [-3, -1, 2]),
    _int("(1 if x < 0 else 2 if y < 0 else 3) * 2", [2, 2, 2], [4, 4, 6], [4, 4, 6]),
    _int("7 if 1 < 2 else x", [7, 7, 7], [7, 7, 7], [7, 7, 7]),
    _bool("x < 0 if y < 0 else x < 1", "###", "..#", "..."),
    _bool("(x < 0 if y < 0 else x < 1) and y < 2", "##.", "...", "..."),
    _int("t[max(x, 0)] - t[1]", [12, 12, 12], [12, 12, 12], [9, 9, 9]),
    _int("u[max(y, 0), 1]", [4, 4, -1], [4, 4, -1], [4, 4, -1]),
    _int("u[max(y, 0), min(max(x, 0), 1)]", [1, 1, -1], [1, 1, -1], [4, 4, -1]),
    _int("t[u[0, 0]]", [-7, -7, -7], [-7, -7, -7], [-7, -7, -7]),
    _bool("any(u[r, 0] <= x and x <= u[r, 1] for r in range(3))", "...", "...", "###"),
    _bool("any(t[r] == x for r in range(2 + 2)) and y < 0", "...", "##.", "..."),
    _bool("any(any(u[r, s] == x * s for s in range(2)) for r in range(3))", "...", "...", "..."),
    _bool("any(x < y for r in range(0))", "...", "...", "..."),
    _bool("not any(x < y for r in range(0))", "###", "###", "###"),
    _bool("any(r == 1 for r in range(2))", "###", "###", "###"),
)
