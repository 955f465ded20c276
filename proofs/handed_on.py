"""Lengths, offsets and page tables that a call hands on: each is what the metadata has for it.

What the kernel is told of a sequence is an element of a field of the metadata, any number at all:
two fields are told apart by it, a sequence from another, and a field from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kernels.forward import COMPUTED, WHERE
from proofs.calls import Case
from spec.term import Term, and_, const, eq, implies, read, sym

Handed = Mapping[str, str | None]
TABLES = {"query_start_loc": 1, "seq_lens": 1, "block_table": 2}
# No element of a field that is in use.
NOTHING = const(-(2**40))
B, PAGE = sym("b"), sym("page")


def told(field: str | None, sequence: Term = B) -> Term:
    """What a kernel reads of a sequence."""
    if field is None:
        return NOTHING
    if field.startswith("max_"):
        return sym(field)
    return read(field, *(sequence, PAGE)[: TABLES.get(field, 1)])


def claims(case: Case) -> Iterator[Term]:
    """Each parameter is its own field, on every way through the host's code."""
    for condition, handed in case.handed:
        yield implies(condition, and_(*(eq(told(field), told(WHERE[name]))
                                        for name, field in handed.items())))


def wrong(case: Case) -> list[str]:
    """What is handed on in place of what, in words."""
    return list(dict.fromkeys(_said(name, field) for _, handed in case.handed
                              for name, field in handed.items() if field != WHERE[name]))


def _said(name: str, field: str | None) -> str:
    if field == COMPUTED:
        return f"{name} has other values than {WHERE[name]}"
    return f"{name} is {field or 'left out'} in place of {WHERE[name] or 'nothing'}"


def faults(case: Case) -> Iterator[tuple[str, Term]]:
    """Claims of a call that hands on something else in one place."""
    if not case.handed or wrong(case):
        return
    (condition, right), *rest = case.handed

    def put(**others: str | None) -> Term:
        return and_(*claims(replace(case, handed=((condition, {**right, **others}), *rest))))

    for name, field in WHERE.items():
        if field is not None:
            yield f"{name} dropped", put(**{name: None})
    for one, two in (("cu_seqlens_q", "seqused_k"), ("seqused_k", "page_table"),
                     ("max_seqlen_q", "max_seqlen_k")):
        yield f"{one} and {two} exchanged", put(**{one: right[two], two: right[one]})
    yield "seqused_q is seq_lens", put(seqused_q="seq_lens")
    for name in ("cu_seqlens_q", "seqused_k", "page_table"):
        field = right[name]
        of_next = eq(told(field, B + 1), told(field))
        yield f"{name} of the next sequence", implies(condition, of_next)
