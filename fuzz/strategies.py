"""Hypothesis strategies for parameters, sequences, cases and recipes: valid by construction.

One traversal, written over `choose`, says in which order a case is chosen. With Hypothesis behind
`choose` it draws; with a known case behind it, it writes down the choices that lead to that case,
so that Hypothesis can take up there and shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from fuzz.boundaries import BEYOND, SMALL, edges
from fuzz.case import Case, CaseError, Sequence, check_sequence, free_params, is_shared, stated
from fuzz.recipe import LENGTHS, PLACES, SHAPES, Recipe
from fuzz.targets import Source
from kernels.fa4 import MANY, Call
from spec.domain import INT32_MAX, Param, Table
from spec.from_text import from_text
from spec.masks import Mask
from spec.term import SpecError, bind
from spec.to_numpy import to_numpy

NO_MORE_QUERIES = from_text("seqlen_q <= seqlen_k")
PLAIN, AT_AN_EDGE, LITTLE = range(3)
MOST_ROWS = 4
DOCUMENTS = 4

# low, high, where something changes, and the value that is meant, if one is known.
Choose = Callable[..., int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be drawn for calls like `call`: `constants` are compiled in, `domain` lists the
    values that a field of the call may have, the plainest first, `ranges` narrows parameters to
    what lies between two values. `source` is where its target is found again."""

    call: Call
    mask: Mask
    constants: Mapping[str, int] = field(default_factory=dict)
    domain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    longest: int = 512
    sequences: int = 3
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    source: Source | None = None

    @property
    def rows(self) -> int:
        return min(self.constants.get("num_ranges", MOST_ROWS), MOST_ROWS)


def cases(space: Space) -> st.SearchStrategy[Case]:
    """Small cases: a few sequences, each value plain, at an edge, or little."""

    @st.composite
    def drawn(draw: Any) -> Case:
        case = _case(_drawing(draw), space, None)
        try:
            for sequence in case.sequences:
                check_sequence(space.mask, case.call.params, sequence)
        except SpecError:
            reject()  # facts and assumptions that only a user's own mask has
        return case

    return drawn()


def choices_of(space: Space, case: Case) -> list[int]:
    """The choices by which `cases(space)` comes to `case`. Raises CaseError for one outside."""
    made: list[int] = []

    def choose(low: int, high: int, at: Iterable[int] = (), known: int | None = None) -> int:
        if known is None or not low <= known <= high:
            raise CaseError(f"{known} is not in {low} .. {high}: the case is outside of its space")
        made.extend([PLAIN, known])
        return known

    _case(choose, space, case)
    return made


def _drawing(draw: Any) -> Choose:
    def choose(low: int, high: int, at: Iterable[int] = (), known: int | None = None) -> int:
        kind = draw(st.integers(PLAIN, LITTLE))
        if kind == AT_AN_EDGE and (inside := sorted({e for e in at if low <= e <= high})):
            return draw(st.sampled_from(inside))
        return draw(st.integers(low, high if kind != LITTLE else min(high, low + 8)))

    return choose


def _case(choose: Choose, space: Space, known: Case | None) -> Case:
    call = _call(choose, space, known and known.call)
    wanted = known.sequences if known else None
    count = choose(1, space.sequences, (), wanted and len(wanted))
    sequences: list[Sequence] = []
    for i in range(count):
        one = wanted[i] if wanted else None
        sequences.append(_sequence(choose, space, call, one, tuple(sequences)))
    return Case(call, tuple(sequences))


def _call(choose: Choose, space: Space, known: Call | None) -> Call:
    drawn = {}
    for name, values in space.domain.items():
        at = None if known is None else _index(values, getattr(known, name), name)
        drawn[name] = values[choose(0, len(values) - 1, (), at)]
    params = {}
    for name in free_params(space.mask, space.constants):
        params[name] = _param(choose, space, space.mask.params[name],
                              None if known is None else known.params[name])
    return replace(space.call, params={**space.call.params, **params}, **drawn)


def _index(values: tuple[Any, ...], value: Any, name: str) -> int:
    if value not in values:
        raise CaseError(f"{name} {value!r} is none of {values}")
    return values.index(value)


def _param(choose: Choose, space: Space, param: Param, known: int | None) -> int:
    low, high = space.ranges.get(param.name, (param.low, param.high))
    near = (*edges(space.longest, space.call.page_size), low, high)
    return choose(low, high, near, known)


def _sequence(
    choose: Choose, space: Space, call: Call, known: Sequence | None, before: tuple[Sequence, ...]
) -> Sequence:
    near = edges(space.longest, call.page_size, *call.params.values())
    seqlen_k = choose(0, space.longest, near, known and known.seqlen_k)
    bounded = NO_MORE_QUERIES in space.mask.assume
    around = {seqlen_k - by for by in (*SMALL, -1)} | {1, *near}
    seqlen_q = choose(0, seqlen_k if bounded else space.longest, around,
                      known and known.seqlen_q)
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    tables: dict[str, Any] = {}
    for name, table in stated(space.mask).items():
        have = known.tables[name] if known else None
        shared = next((s.tables[name] for s in before if is_shared(table)), None)
        tables[name] = _entries(choose, space, table, lengths, have, shared, near)
    return Sequence(**lengths, tables=tables)


def _entries(
    choose: Choose, space: Space, table: Table, lengths: Mapping[str, int], known: Any,
    shared: Any, near: tuple[int, ...],
) -> Any:
    """A sequence's entries of a table; `shared` are those of the sequence before it."""
    chunk = lengths["seqlen_k"] - lengths["seqlen_q"]
    ends = {end + by for end in (0, chunk, lengths["seqlen_k"]) for by in (-1, 0, 1)} | {*near}
    if table.name == "ranges":
        return _ranges(choose, space, lengths["seqlen_k"], known, ends)
    if table.name == "prefix_lens":
        return choose(0, lengths["seqlen_k"] + BEYOND, ends, known)
    if table.name == "dynamic_causal":
        return choose(0, 1, (), known)
    if table.name == "document_ids":
        return _runs(choose, lengths["seqlen_k"], known, shared or (), ends)
    sizes = [int(to_numpy(bind(dim, {**lengths, **space.constants}), {}))
             for dim in table.dims[not is_shared(table):]]
    return _other(choose, sizes, known, shared, ends)


def _ranges(
    choose: Choose, space: Space, seqlen_k: int, known: Any, ends: Iterable[int]
) -> tuple[tuple[int, int], ...]:
    """Rows in any order: of more than one token disjoint, of one token anywhere, or (-1, -1)."""
    rows: list[tuple[int, int]] = []
    most = seqlen_k + BEYOND
    starts = [end + 1 for end in ends]
    for r in range(choose(0, space.rows, (), None if known is None else len(known))):
        row = known[r] if known is not None else None
        touching = [last + 2 for _, last in rows]
        first = choose(0, most + 1, [*starts, *touching], row and row[0] + 1) - 1
        if first < 0:
            rows.append((-1, -1))
            continue
        lengths = [end - first for end in ends]
        last = first + choose(0, most - first, lengths, row and row[1] - row[0])
        taken = [other for other in rows if other[0] < other[1]]
        free = min((start - 1 for start, _ in taken if start > first), default=last)
        inside = any(start <= first <= end for start, end in taken)
        rows.append((first, first if inside else min(last, free)))
    return tuple(rows)


def _runs(
    choose: Choose, length: int, known: Any, shared: tuple[int, ...], ends: Iterable[int]
) -> tuple[int, ...]:
    """Documents one after the other; positions that a sequence before has keep theirs."""
    found = list(shared[:length])
    while len(found) < length:
        left = length - len(found)
        run = None
        if known is not None:
            document = known[len(found)]
            run = next((i for i in range(left) if known[len(found) + i] != document), left)
        few = range(DOCUMENTS)
        document = choose(0, INT32_MAX, few, None if known is None else known[len(found)])
        # Counted from the end: the plainest choice is one document for all that is left.
        cuts = [length - end for end in ends]
        kept = choose(0, left - 1, cuts, None if run is None else left - run)
        found += [document] * (left - kept)
    return tuple(found)


def _other(
    choose: Choose, sizes: list[int], known: Any, shared: Any, ends: Iterable[int]
) -> Any:
    if not sizes:
        return shared if shared is not None else choose(-1, INT32_MAX, ends, known)
    return tuple(
        _other(choose, sizes[1:], None if known is None else known[i],
               shared[i] if shared is not None and i < len(shared) else None, ends)
        for i in range(sizes[0])
    )


def recipes(space: Space, count: int) -> st.SearchStrategy[Recipe]:
    """A call, and how `count` sequences for it are to be drawn in bulk (`fuzz.recipe.expand`), or
    as many as it takes where it is one for few."""
    count = min(count, MANY) if space.call.few else count

    @st.composite
    def drawn(draw: Any) -> Recipe:
        choose = _drawing(draw)
        call = _call(choose, space, None)
        weights = st.integers(0, 3)

        def mix(names: tuple[str, ...]) -> tuple[int, ...]:
            found = draw(st.tuples(*[weights] * len(names)))
            return found if any(found) else (1,) * len(names)

        longest = draw(st.sampled_from([space.longest, *_shorter(space.longest)]))
        return Recipe(
            call=call, seed=draw(st.integers(0, 2**32 - 1)), count=count, longest=longest,
            edge=draw(st.sampled_from(edges(longest, call.page_size, *_near(call, longest)))),
            rows=draw(st.integers(0, space.rows)),
            lengths=mix(LENGTHS), shapes=mix(SHAPES), places=mix(PLACES),
        )

    return drawn()


def _shorter(longest: int) -> list[int]:
    return [n for n in (8, 24, 64, 130, 200, 400) if n < longest]


def _near(call: Call, longest: int) -> list[int]:
    return [value for value in call.params.values() if value <= longest]
