"""A term as Triton code: two device functions that say which cells of a block are visible.

    row = of_row(b, q_idx, seqlen_q, seqlen_k, offset_q, offset_k, numbers)
    visible(h, kv_idx, row)

`of_row` computes and reads once what no head and no key changes; `row` is a tuple of it. Its
coordinates are [rows], `h` and `kv_idx` are [1, keys] or numbers, and the answer is of a shape that
broadcasts to [rows, keys]. Everything else that the term names comes out of `numbers`, one int64
tensor that `numbers_of` lays out: the value of each symbol, then for each table its address and its
sizes. A table holds int32, contiguous.
"""

from __future__ import annotations

import hashlib
import linecache
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from typing import Any

from spec.term import BOOL, OPS, Rule, SpecError, Term, expand, fold, postorder, sym
from spec.term import symbols as symbols_of
from spec.to_numpy import unexpanded

OF_ROW = ("b", "q_idx", "seqlen_q", "seqlen_k", "offset_q", "offset_k")
OF_CELL = ("h", "kv_idx")
COORDINATES = (*OF_ROW, *OF_CELL)

# Triton's `//` and `%` round to zero, as C's. A quotient by zero is 0, and a read outside a table
# gives 0: both sides of an `ite` are computed.
HEAD = """\
import triton
import triton.language as tl

WORD = tl.constexpr(tl.int{bits})


@triton.jit
def truncated(a, b):
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))


@triton.jit
def floored(a, b):
    quotient = truncated(a, b)
    return tl.where((a != quotient * b) & ((a < 0) != (b < 0)) & (b != 0), quotient - 1, quotient)


@triton.jit
def of_row({of_row}, numbers):
{first}

@triton.jit
def visible({of_cell}, row):
{second}"""


def infix(sign: str) -> Rule:
    return lambda node, *args: f" {sign} ".join(args)


def literal(node: Term) -> str:
    # Not a bare number, for Triton computes on two of these as Python does.
    return f"tl.cast({node.value}, {'tl.int1' if node.sort == BOOL else 'WORD'})"


def symbol(node: Term) -> str:
    if node.value[0] == "%":
        unexpanded(node)
    return node.value if node.value in COORDINATES else f"symbol_{node.value}"


def element(node: Term, *index: str) -> str:
    table, at, inside = f"table_{node.value}", "", []
    for axis, i in enumerate(index):
        at = f"({at}) * {table}_{axis} + {i}" if at else i
        inside += [f"({i} >= 0)", f"({i} < {table}_{axis})"]
    # Triton's interpreter takes no truth value for a mask that was broadcast: hence the comparison.
    mask = f"({' & '.join(inside)}) != 0"
    return f"tl.load({table} + ({at}), mask={mask}, other=0).to(WORD)"


RULES: Mapping[str, Rule] = {
    "const": literal,
    "sym": symbol,
    "add": infix("+"),
    "sub": infix("-"),
    "mul": infix("*"),
    "floordiv": lambda node, a, b: f"floored({a}, {b})",
    "floormod": lambda node, a, b: f"{a} - {b} * floored({a}, {b})",
    "truncdiv": lambda node, a, b: f"truncated({a}, {b})",
    "truncmod": lambda node, a, b: f"{a} - {b} * truncated({a}, {b})",
    "min": lambda node, a, b: f"tl.minimum({a}, {b})",
    "max": lambda node, a, b: f"tl.maximum({a}, {b})",
    "lt": infix("<"),
    "le": infix("<="),
    "eq": infix("=="),
    "and": infix("&"),
    "or": infix("|"),
    "not": lambda node, a: f"~{a}",
    "ite": lambda node, c, a, b: f"tl.where({c}, {a}, {b})",
    "read": element,
    "any": unexpanded,
}
assert RULES.keys() == OPS.keys()


def tables_of(term: Term) -> dict[str, int]:
    """The tables that are read, with their numbers of axes."""
    found = {node.value: len(node.args) for node in postorder(term) if node.op == "read"}
    return dict(sorted(found.items()))


def to_triton_source(term: Term, bits: int = 64) -> str:
    """Python text that defines `visible`, in integers of so many bits, for a formula in kernel
    indices."""
    term = expand(term)
    if term.sort != BOOL:
        raise SpecError("a mask is a truth value")
    names, tables = _names(term)
    cells, rows = _changing(term, OF_CELL), _changing(term, OF_ROW)
    blocks = set(OF_ROW)
    lines, inner, slot = [], [], count()
    for name in names:
        lines.append(f"symbol_{name} = tl.load(numbers + {next(slot)}).to(WORD)")
    for name, axes in tables.items():
        address = f"tl.load(numbers + {next(slot)})"
        lines.append(f"table_{name} = {address}.to(tl.pointer_type(tl.int32))")
        lines += [
            f"table_{name}_{i} = tl.load(numbers + {next(slot)}).to(WORD)" for i in range(axes)
        ]
    local = count()

    def named(rule: Rule) -> Rule:
        def assign(node: Term, *args: str) -> str:
            if not args:
                return rule(node)
            into = inner if node in cells else lines
            into.append(f"part{(i := next(local))} = {rule(node, *args)}")
            if node in rows:
                blocks.add(f"part{i}")
            return f"part{i}"

        return assign

    answer = fold(term, {op: named(rule) for op, rule in RULES.items()})
    inner.append(f"return {answer}")
    # What is passed on, and one thing at least.
    known = [*OF_ROW, *(line.partition(" = ")[0] for line in lines)]
    used = set(re.findall(r"\w+", " ".join(inner)))
    passed = [name for name in known if name in used] or ["b"]
    given = [f"{name}[:, None]" if name in blocks else name for name in passed]
    lines.append(f"return ({', '.join(given)},)")
    inner.insert(0, f"({', '.join(passed)},) = row")
    first, second = ("".join(f"    {line}\n" for line in each) for each in (lines, inner))
    return HEAD.format(
        bits=bits, of_row=", ".join(OF_ROW), of_cell=", ".join(OF_CELL), first=first, second=second
    )


def _changing(term: Term, names: tuple[str, ...]) -> set[Term]:
    """The parts that depend on some of the coordinates."""
    found: set[Term] = set()
    for node in postorder(term):
        is_coordinate = node.op == "sym" and node.value in names
        if is_coordinate or any(isinstance(arg, Term) and arg in found for arg in node.args):
            found.add(node)
    return found


# For sequences of up to so many tokens, in batches of up to so many, `fits_int32` speaks.
LONGEST, LARGEST_BATCH = 2**24, 2**30
INT32 = -(2**31), 2**31 - 1
Span = tuple[int, int]


def _corners(node: Term, a: Span, b: Span) -> Span:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _quotient(node: Term, a: Span, b: Span) -> Span:
    size = max(abs(a[0]), abs(a[1]))
    return -size, size


def _element(node: Term, *index: Span) -> Span:
    return (0, LARGEST_BATCH) if node.value == "cu_seqlens_q" else INT32


SPANS: Mapping[str, Rule] = {
    "const": lambda node: (int(node.value), int(node.value)),
    "sym": lambda node: INT32,
    "add": lambda node, a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda node, a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners,
    "floordiv": _quotient,
    # In between, the quotient is multiplied by the divisor: at most the dividend and one divisor.
    "floormod": lambda node, a, b: (
        min(a[0], 0) - max(abs(b[0]), b[1]), max(a[1], 0) + max(abs(b[0]), b[1])
    ),
    "truncdiv": _quotient,
    "truncmod": lambda node, a, b: (min(a[0], 0), max(a[1], 0)),
    "min": lambda node, a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda node, a, b: (max(a[0], b[0]), max(a[1], b[1])),
    **dict.fromkeys(("lt", "le", "eq", "and", "or", "not"), lambda node, *args: (0, 1)),
    "ite": lambda node, c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "read": _element,
    "any": unexpanded,
}
assert SPANS.keys() == OPS.keys()


def fits_int32(term: Term, params: Mapping[str, int]) -> bool:
    """Whether no value on the way leaves int32, for sequences of up to LONGEST tokens."""
    return _fits_int32(term, tuple(sorted(params.items())))


@lru_cache(maxsize=4096)
def _fits_int32(term: Term, params: tuple[tuple[str, int], ...]) -> bool:
    lengths = (-LONGEST, LONGEST)
    known: dict[Term, Any] = {sym(name): lengths for name in COORDINATES}
    known |= {sym(name): (0, LARGEST_BATCH) for name in ("offset_q", "offset_k")}
    known |= {sym(name): (value, value) for name, value in params}
    term = expand(term)
    fold(term, SPANS, known)
    return all(
        INT32[0] <= low and high <= INT32[1]
        for low, high in (known[node] for node in postorder(term))
    )


@lru_cache(maxsize=1024)
def _names(term: Term) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """The symbols and the tables that `numbers` speaks of, in its order."""
    term = expand(term)
    return tuple(sorted(symbols_of(term) - set(COORDINATES))), tables_of(term)


def numbers_of(term: Term, env: Mapping[str, Any]) -> list[int]:
    """What `numbers` holds: `env` gives an int for each symbol and a tensor for each table."""
    names, tables = _names(term)
    for name in sorted({*names, *tables} - env.keys()):
        raise SpecError(f"no value for {name!r}")
    numbers = [int(env[name]) for name in names]
    for name, axes in tables.items():
        table = env[name]
        if table.dim() != axes or not table.is_contiguous() or table.element_size() != 4:
            raise SpecError(f"table {name!r} must be contiguous int32 with {axes} axes")
        numbers += [table.data_ptr(), *table.shape]
    return numbers


@lru_cache(maxsize=4096)
def to_triton(term: Term, bits: int = 64) -> tuple[Any, Any]:
    """`of_row` and `visible`, to be handed to a Triton kernel as constants."""
    source = to_triton_source(term, bits)
    # The name is part of what Triton compiles, and the same in every process.
    file = f"<visible {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton compiles a function from its source, which it asks `inspect` for.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope: dict[str, Any] = {"__name__": file}
    exec(compile(source, file, "exec"), scope)  # noqa: S102
    return scope["of_row"], scope["visible"]
