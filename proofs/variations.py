"""Every way to get a formula slightly wrong: one operator, constant, bound, frame or term.

The same list serves twice. As mutants it shows that a proof can fail; as diagnosis it names, in an
engineer's words, the variation of the spec that a piece of code equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from spec.from_text import from_text
from spec.masks import WORDS
from spec.term import (
    BOOL,
    Term,
    and_,
    const,
    ite,
    not_,
    or_,
    postorder,
    rebuild,
    substitute,
    sym,
)
from spec.to_text import to_text


@dataclass(frozen=True, slots=True)
class Variation:
    """`phrase` completes "equals the spec ..."; a lower `cost` is a more usual fault."""

    phrase: str
    term: Term
    cost: int


Q, KV, Q_IDX, B, TOKEN = map(sym, ("q", "kv", "q_idx", "b", "token"))
CAUSAL = from_text("kv <= q")
OFFSET = sym("seqlen_k") - sym("seqlen_q")
# What a kernel author may take for the absolute query position.
QUERY_FRAMES: tuple[tuple[str, Term, int], ...] = (
    ("chunk-local q", Q_IDX, 1),
    ("q one too high", Q + 1, 2),
    ("q one too low", Q - 1, 2),
    ("q offset by seqlen_k alone", Q_IDX + sym("seqlen_k"), 3),
    ("the offset of q subtracted", Q_IDX - OFFSET, 3),
    ("q counted in the packed batch", Q_IDX + sym("offset_q"), 3),
)
KEY_FRAMES: tuple[tuple[str, Term, int], ...] = (
    ("kv one too high", KV + 1, 3),
    ("kv one too low", KV - 1, 3),
    ("kv offset by seqlen_k - seqlen_q", KV + OFFSET, 3),
    ("kv offset by seqlen_q - seqlen_k", KV - OFFSET, 3),
)


def named(part: Term) -> str:
    """"the window term" where the part has a name, "the causal term and the window term" where
    its parts have, else its text."""
    if (word := WORDS.get(substitute(part, {Q_IDX: Q}))) is not None:
        return f"the {word}"
    if part.op in ("and", "or"):
        return f" {part.op} ".join(
            f"({named(arg)})" if arg.op in ("and", "or") else named(arg) for arg in part.args
        )
    return f"`{to_text(part)}`"


def mirrored(part: Term) -> Term:
    return substitute(part, {Q: KV, KV: Q})


def atoms(formula: Term) -> list[Term]:
    """The distinct comparisons that stand on their own, outside any `any`."""
    inside = {t for a in postorder(formula) if a.op == "any" for t in postorder(a)}
    found = [t for t in postorder(formula) if t.op in ("lt", "le", "eq") and t not in inside]
    return list(dict.fromkeys([*found, *map(mirrored, found)]))


def places(root: Term) -> Iterator[tuple[Term, Callable[[Term], Term]]]:
    """Every occurrence of a subterm, with the function that puts another in its place."""
    stack: list[tuple[Term, Callable[[Term], Term]]] = [(root, lambda new: new)]
    while stack:
        node, put = stack.pop()
        yield node, put
        for i, arg in enumerate(node.args):
            stack.append((arg, partial(_put_into, node, i, put)))


def _put_into(node: Term, i: int, put: Callable[[Term], Term], new: Term) -> Term:
    return put(rebuild(node, *node.args[:i], new, *node.args[i + 1:]))


def variations(formula: Term, *, absolute: bool = True) -> list[Variation]:
    """All single variations, most usual first; distinct as terms, not yet as functions.

    `absolute` says that the formula is a mask over q and kv, which could be made causal.
    """
    found: dict[Term, Variation] = {}
    causal = (CAUSAL,) if absolute else ()
    cuts = list(dict.fromkeys([*atoms(formula), *causal]))
    for node, put in places(formula):
        whole = node is formula
        found_here = (*_local(node), *_frames(node, whole), *_cut(node, cuts, causal, whole))
        for phrase, new, cost in found_here:
            if new is not node and (term := put(new)) is not formula:
                old = found.get(term)
                if old is None or cost < old.cost:
                    found[term] = Variation(phrase, term, cost)
    return sorted(found.values(), key=lambda v: (v.cost, not v.phrase.startswith("without")))


Rewrite = tuple[str, Term, int]


def _instead(old: Term, new: Term, cost: int) -> Rewrite:
    say = named if old.op in ("and", "or") else lambda part: f"`{to_text(part)}`"
    return f"with {say(new)} in place of {say(old)}", new, cost


TWINS: Mapping[str, str] = {
    "add": "sub", "sub": "add", "mul": "add", "min": "max", "max": "min",
    "floordiv": "truncdiv", "truncdiv": "floordiv", "floormod": "truncmod", "truncmod": "floormod",
}


def _local(node: Term) -> Iterator[Rewrite]:
    a, b = (*node.args, None, None)[:2]
    match node.op:
        case "const":
            if node.sort == BOOL:
                yield _instead(node, const(not node.value), 3)
            else:
                yield _instead(node, const(node.value + 1), 2)
                if node.value != 0:
                    yield _instead(node, const(node.value - 1), 2)
        case "sym" if node.value not in ("q", "kv", "b", "h", "token") and node.value[0] != "%":
            yield _instead(node, node + 1, 2)
            yield _instead(node, node - 1, 2)
        case "and" | "or":
            yield from _connective(node)
        case "not":
            yield f"without the `not` before {named(a)}", a, 2
        case "lt":
            yield _instead(node, a <= b, 1)
            yield _instead(node, a < b - 1, 2)
            yield _instead(node, b < a, 3)
            yield _instead(node, b <= a, 3)
        case "le":
            yield _instead(node, a < b, 1)
            yield _instead(node, a <= b + 1, 2)
            yield _instead(node, b <= a, 3)
            yield _instead(node, b < a, 3)
        case "eq":
            yield _instead(node, not_(node), 2)
            yield _instead(node, a <= b, 3)
            yield _instead(node, b <= a, 3)
        case "ite":
            for other in (node.args[1], node.args[2], ite(a, node.args[2], node.args[1])):
                yield _instead(node, other, 2)
        case "read":
            for i, index in enumerate(node.args):
                swaps = {B: (const(0),), TOKEN: (Q_IDX, Q)}.get(index, ())
                for other in swaps:
                    index_changed = (*node.args[:i], other, *node.args[i + 1:])
                    yield _instead(node, rebuild(node, *index_changed), 2)
        case op if op in TWINS:
            yield _instead(node, Term(TWINS[op], node.args), 3)
            if node.op in ("min", "max"):
                yield _instead(node, a, 2)
                yield _instead(node, b, 2)


def _connective(node: Term) -> Iterator[Rewrite]:
    for part in node.args:
        rest = [p for p in node.args if p is not part]
        yield f"without {named(part)}", rebuild(node, *rest), 1
    twin = or_ if node.op == "and" else and_
    yield _instead(node, twin(*node.args), 2)
    inner = "and" if node.op == "or" else "or"
    outer, within = (and_, or_) if node.op == "or" else (or_, and_)
    for i, part in enumerate(node.args):
        rest = [*node.args[:i], *node.args[i + 1:]]
        if part.op == inner:
            for lifted in part.args:
                kept = rebuild(part, *[p for p in part.args if p is not lifted])
                yield (f"with {named(lifted)} applied to the whole of {named(node)}",
                       outer(within(kept, *rest), lifted), 2)


def _frames(node: Term, whole: bool) -> Iterator[Rewrite]:
    if node.sort != BOOL or not (whole or node.op in ("lt", "le", "eq", "any") or node in WORDS):
        return
    where = "" if whole else f" in {named(node)}"
    for phrase, other, cost in QUERY_FRAMES:
        yield f"with {phrase}{where}", substitute(node, {Q: other}), cost + (not whole)
    for phrase, other, cost in KEY_FRAMES:
        yield f"with {phrase}{where}", substitute(node, {KV: other}), cost + (not whole)
    yield f"with q and kv exchanged{where}", mirrored(node), 2 + (not whole)
    if B in postorder(node):
        yield f"with sequence 0's tables{where}", substitute(node, {B: const(0)}), 2


def _cut(
    node: Term, cuts: Sequence[Term], causal: tuple[Term, ...], whole: bool
) -> Iterator[Rewrite]:
    if node.sort != BOOL or not (whole or node.op in ("any", "or") or node in WORDS):
        return
    name = "the whole mask" if whole else named(node)
    for cut in cuts:
        yield f"with {name} cut by {named(cut)}", and_(node, cut), 2
    for wide in causal:
        yield f"with {named(wide)} added to {name}", or_(node, wide), 3
