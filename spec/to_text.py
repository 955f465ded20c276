"""A term as one line of Python: `kv <= q and q - kv < window`. `from_text` reads it back."""

from __future__ import annotations

from collections.abc import Mapping

from spec.term import MOST_NODES, OPS, Rule, SpecError, Term, fold

# Binding strength, as Python's: a part that binds less tightly than its place gets parentheses.
LOOSEST, TERNARY, OR, AND, NOT, COMPARE, SUM, PRODUCT, ATOM = range(9)
Piece = tuple[str, int]


def wrap(piece: Piece, at_least: int) -> str:
    text, strength = piece
    return text if strength >= at_least else f"({text})"


def infix(sign: str, strength: int) -> Rule:
    def rule(node: Term, a: Piece, b: Piece) -> Piece:
        return f"{wrap(a, strength)} {sign} {wrap(b, strength + 1)}", strength

    return rule


def compare(sign: str) -> Rule:
    def rule(node: Term, a: Piece, b: Piece) -> Piece:
        return f"{wrap(a, SUM)} {sign} {wrap(b, SUM)}", COMPARE

    return rule


def chain(sign: str, strength: int) -> Rule:
    def rule(node: Term, *args: Piece) -> Piece:
        return f" {sign} ".join(wrap(a, strength + 1) for a in args), strength

    return rule


def call(name: str) -> Rule:
    return lambda node, *args: (f"{name}({', '.join(text for text, _ in args)})", ATOM)


def _const(node: Term) -> Piece:
    return str(node.value), PRODUCT if node.value is not True and node.value < 0 else ATOM


def _read(node: Term, *args: Piece) -> Piece:
    return f"{node.value}[{', '.join(text for text, _ in args)}]", ATOM


def _any(node: Term, count: Piece, body: Piece) -> Piece:
    inner = f"{wrap(body, TERNARY)} for {node.value} in range({count[0]})"
    return f"any({inner})", ATOM


def _ite(node: Term, c: Piece, a: Piece, b: Piece) -> Piece:
    return f"{wrap(a, OR)} if {wrap(c, OR)} else {wrap(b, TERNARY)}", TERNARY


def _not(node: Term, a: Piece) -> Piece:
    inner = node.args[0]
    if inner.op == "any" and inner.args[1].op == "not":
        count, body = inner.args[0], inner.args[1].args[0]
        return f"all({to_text(body)} for {inner.value} in range({to_text(count)}))", ATOM
    return f"not {wrap(a, NOT)}", NOT


RULES: Mapping[str, Rule] = {
    "const": _const,
    "sym": lambda node: (node.value.removeprefix("%"), ATOM),
    "add": infix("+", SUM),
    "sub": infix("-", SUM),
    "mul": infix("*", PRODUCT),
    "floordiv": infix("//", PRODUCT),
    "floormod": infix("%", PRODUCT),
    "truncdiv": call("truncdiv"),
    "truncmod": call("truncmod"),
    "min": call("min"),
    "max": call("max"),
    "lt": compare("<"),
    "le": compare("<="),
    "eq": compare("=="),
    "and": chain("and", AND),
    "or": chain("or", OR),
    "not": _not,
    "ite": _ite,
    "read": _read,
    "any": _any,
}
assert RULES.keys() == OPS.keys()


def to_text(term: Term) -> str:
    """One line of Python that `spec.from_text.from_text` turns back into the same object.

    Raises SpecError for a term that would fill a book.
    """
    if term.size > MOST_NODES:
        raise SpecError(f"the term is too long to print: {term.size:.2g} parts")
    return fold(term, RULES)[0]
