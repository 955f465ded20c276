"""A failing case, however it was found, made small by Hypothesis."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from hypothesis import Phase, find, settings
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import HypothesisException

from fuzz.case import Case, CaseError, canonical
from fuzz.strategies import Space, cases, choices_of

KEY = b"fuzz.shrink"
# Planted under the key itself a case would count as minimal already.
SECONDARY = KEY + b".secondary"
CALLS = 2000


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest failing case; `finished` is False where time ended the search."""

    case: Case
    calls: int
    finished: bool


def shrink(
    space: Space, case: Case, fails: Callable[[Case], bool], seconds: float,
    over: Callable[[], bool] = lambda: False,
) -> Shrunk:
    """The simplest case of `cases(space)` found on which `fails`, from `case`, on which it does.

    After `seconds`, or when `over`, no new case is tried: what is known already ends the search.
    """
    until = time.monotonic() + seconds
    known: dict[str, bool] = {canonical(case): True}
    best, late = case, False

    def failing(tried: Case) -> bool:
        nonlocal best, late
        text = canonical(tried)
        if text not in known:
            if late or time.monotonic() > until or over():
                late = True
                return False
            known[text] = fails(tried)
        if known[text]:
            best = min(best, tried, key=lambda one: order(space, one))
        return known[text]

    database = InMemoryExampleDatabase()
    try:
        database.save(SECONDARY, choices_to_bytes(choices_of(widened(space, case), case)))
    except CaseError:  # found with options that this space does not have
        return Shrunk(case, 0, False)
    # A case that fails now and then ends the search: the best that is known stands.
    with suppress(HypothesisException):
        best = find(
            cases(widened(space, case)), failing, random=Random(0), database_key=KEY,
            settings=settings(
                database=database, max_examples=CALLS, deadline=None,
                phases=(Phase.reuse, Phase.generate, Phase.shrink),
            ),
        )
    return Shrunk(best, len(known) - 1, not late)


def widened(space: Space, case: Case) -> Space:
    """A space that holds the case, and hardly more."""
    lengths = [n for s in case.sequences for n in (s.seqlen_q, s.seqlen_k)]
    return replace(space, longest=max(*lengths, 8), sequences=len(case.sequences))


def order(space: Space, case: Case) -> tuple[int, int, list[int]]:
    """Hypothesis's own: fewer choices first, then smaller ones."""
    choices = choices_of(widened(space, case), case)
    return len(case.sequences), len(choices), choices
