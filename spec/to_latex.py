r"""A term as LaTeX math: `kv <= q` becomes `\mathit{kv} \leq q`.

Only commands that MathJax, KaTeX and matplotlib's mathtext all know.
"""

from __future__ import annotations

from collections.abc import Mapping

from spec.term import OPS, Rule, Term, fold
from spec.to_text import (
    AND,
    ATOM,
    LOOSEST,
    NOT,
    OR,
    PRODUCT,
    SUM,
    TERNARY,
    Piece,
    chain,
    compare,
    infix,
    wrap,
)


def name(text: str) -> str:
    """A symbol, table or index in math."""
    escaped = text.removeprefix("%").replace("_", r"\_")
    return escaped if len(escaped) == 1 else rf"\mathit{{{escaped}}}"


def _call(function: str) -> Rule:
    return lambda node, *args: (rf"{function}({', '.join(text for text, _ in args)})", ATOM)


def _const(node: Term) -> Piece:
    if node.value is True or node.value is False:
        return rf"\mathrm{{{str(node.value).lower()}}}", ATOM
    return str(node.value), SUM if node.value < 0 else ATOM


def _any(node: Term, count: Piece, body: Piece) -> Piece:
    index, last = name(node.value), rf"{wrap(count, SUM)} - 1"
    # The body of a quantifier reaches as far to the right as it can.
    return rf"\exists\, {index} \in \{{0, \ldots, {last}\}} :\; {wrap(body, OR)}", LOOSEST


def _ite(node: Term, c: Piece, a: Piece, b: Piece) -> Piece:
    parts = wrap(a, OR), wrap(c, OR), wrap(b, TERNARY)
    return r"{} \;\mathrm{{if}}\; {} \;\mathrm{{else}}\; {}".format(*parts), TERNARY


def _or(node: Term, *args: Piece) -> Piece:
    # Stricter than Python's precedence: a reader should not have to know which binds tighter.
    return r" \vee ".join(wrap(a, NOT) for a in args), OR


RULES: Mapping[str, Rule] = {
    "const": _const,
    "sym": lambda node: (name(node.value), ATOM),
    "add": infix("+", SUM),
    "sub": infix("-", SUM),
    "mul": infix(r"\cdot", PRODUCT),
    "floordiv": lambda node, a, b: (rf"\lfloor \frac{{{a[0]}}}{{{b[0]}}} \rfloor", ATOM),
    "floormod": infix(r"\;\mathrm{mod}\;", PRODUCT),
    "truncdiv": lambda node, a, b: (rf"\mathrm{{trunc}}(\frac{{{a[0]}}}{{{b[0]}}})", ATOM),
    "truncmod": infix(r"\;\mathrm{rem}\;", PRODUCT),
    "min": _call(r"\min"),
    "max": _call(r"\max"),
    "lt": compare("<"),
    "le": compare(r"\leq"),
    "eq": compare("="),
    "and": chain(r"\wedge", AND),
    "or": _or,
    "not": lambda node, a: (rf"\neg {wrap(a, ATOM)}", NOT),
    "ite": _ite,
    "read": lambda node, *args: (
        rf"{name(node.value)}_{{{', '.join(text for text, _ in args)}}}", ATOM
    ),
    "any": _any,
}
assert RULES.keys() == OPS.keys()


def to_latex(term: Term) -> str:
    """The math of `term`, without the dollar signs around it."""
    return fold(term, RULES)[0]
