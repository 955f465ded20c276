"""The text form: one Python expression, read by Python's own parser, into a term.

Comparisons may be chained and written either way round; `!=`, `>` and `>=` are accepted. In a Bool
place a name is a mask of the catalogue, in an Int place a symbol, so `window & (q - kv < 8)` and
`q - kv < window` both mean what they say. `&`, `|`, `~` are `and`, `or`, `not`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from spec.term import (
    BOOL,
    INT,
    SpecError,
    Term,
    and_,
    any_,
    bound,
    const,
    eq,
    ite,
    max_,
    min_,
    not_,
    or_,
    read,
    sym,
    truncdiv,
    truncmod,
)

Lookup = Callable[[str], Term]

BINARY = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
COMPARE = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: eq,
    ast.NotEq: lambda a, b: not_(eq(a, b)),
}
CALLS = {"min": min_, "max": max_, "truncdiv": truncdiv, "truncmod": truncmod}
CONNECT = {ast.And: and_, ast.Or: or_, ast.BitAnd: and_, ast.BitOr: or_}


def _no_masks(name: str) -> Term:
    raise SpecError(f"`{name}` stands where True or False is needed, and is no mask")


def from_text(text: str, mask: Lookup = _no_masks, sort: str = BOOL) -> Term:
    """The term of `sort` that `text` spells. `mask` gives the formula of a mask by name.

    Raises SpecError, one line with the column, for anything that is not of the language.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _Reader(text.strip(), mask).sorted(tree, sort)
    except (SyntaxError, ValueError) as error:
        at = f" (column {error.offset})" if isinstance(error, SyntaxError) else ""
        raise SpecError(f"cannot parse {text!r}: {error.args[0]}{at}") from None
    except (RecursionError, MemoryError):
        raise SpecError("cannot parse a text that is nested this deeply") from None


class _Reader:
    def __init__(self, text: str, mask: Lookup) -> None:
        self.text, self.mask = text, mask
        self.bound: list[str] = []

    def fail(self, node: ast.expr, why: str) -> SpecError:
        part = ast.get_source_segment(self.text, node) or self.text
        return SpecError(f"cannot parse {part!r}: {why} (column {node.col_offset + 1})")

    def bool(self, node: ast.expr) -> Term:
        return self.sorted(node, BOOL)

    def int(self, node: ast.expr) -> Term:
        return self.sorted(node, INT)

    def sorted(self, node: ast.expr, sort: str) -> Term:
        term = self.read(node, sort)
        if term.sort != sort:
            kind = {BOOL: "True or False", INT: "a number"}
            raise self.fail(node, f"{kind[sort]} is needed here")
        return term

    def read(self, node: ast.expr, sort: str) -> Term:
        match node:
            case ast.Constant(value=bool() | int() as value):
                return const(value)
            case ast.Name(id=name) if name in self.bound:
                return bound(name)
            case ast.Name(id=name):
                return self.mask(name) if sort == BOOL else sym(name)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=a):
                return not_(self.bool(a))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return const(-value)
            case ast.UnaryOp(op=ast.USub(), operand=a):
                return -self.int(a)
            case ast.BoolOp(op=op, values=values):
                return CONNECT[type(op)](*map(self.bool, values))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()) if sort == INT:
                raise self.fail(node, "a number is needed here; `&` and `|` bind tighter than "
                                "comparisons: put each comparison in parentheses")
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() as op, left=a, right=b):
                return CONNECT[type(op)](self.bool(a), self.bool(b))
            case ast.BinOp(op=op, left=a, right=b) if type(op) in BINARY:
                return BINARY[type(op)](self.int(a), self.int(b))
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp(test=c, body=a, orelse=b):
                return ite(self.bool(c), self.sorted(a, sort), self.sorted(b, sort))
            case ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp() as loop], keywords=[]):
                return self.any(loop)
            case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp() as loop], keywords=[]):
                return not_(self.any(loop, negated=True))
            case ast.Call(func=ast.Name(id=name), args=[a, b, *more], keywords=[]) if (
                name in CALLS and (not more or name in ("min", "max"))
            ):
                return functools.reduce(CALLS[name], map(self.int, [a, b, *more]))
            case ast.Subscript(value=ast.Name(id=table), slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                if not parts:
                    raise self.fail(node, "a table needs an index")
                return read(table, *map(self.int, parts))
        raise self.fail(node, f"{type(node).__name__} is not part of the language")

    def compare(self, node: ast.Compare) -> Term:
        sides = [self.int(side) for side in (node.left, *node.comparators)]
        for op in node.ops:
            if type(op) not in COMPARE:
                raise self.fail(node, f"{type(op).__name__} is not part of the language")
        pairs = zip(sides, sides[1:], node.ops, strict=False)
        return and_(*(COMPARE[type(op)](a, b) for a, b, op in pairs))

    def any(self, loop: ast.GeneratorExp, *, negated: bool = False) -> Term:
        match loop.generators:
            case [ast.comprehension(
                target=ast.Name(id=index), ifs=[],
                iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]),
            )]:
                limit = self.int(count)
                self.bound.append(index)
                try:
                    body = self.bool(loop.elt)
                    return any_(index, limit, not_(body) if negated else body)
                finally:
                    self.bound.pop()
        raise self.fail(loop, "write any(... for r in range(count))")
