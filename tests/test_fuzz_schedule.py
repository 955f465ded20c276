"""Who gets launches: all spaces, and more of them those that still show something new."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fuzz.schedule import BEHIND, Schedule


def turns(schedule: Schedule, ready: list[bool], count: int) -> list[int | None]:
    return [schedule.next(ready) for _ in range(count)]


def test_equals_take_turns_from_behind_the_last() -> None:
    assert turns(Schedule(3), [True] * 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert turns(Schedule(3, last=1), [True] * 3, 4) == [2, 0, 1, 2]


def test_nothing_is_ready() -> None:
    assert Schedule(2).next([False, False]) is None and Schedule(0).next([]) is None


def test_what_shows_something_new_gets_four_turns_for_one() -> None:
    schedule, seen = Schedule(3), Counter[int | None]()
    for _ in range(600):
        which = schedule.next([True] * 3)
        assert which is not None
        schedule.learned(which, new=which == 1)
        seen[which] += 1
    assert seen[0] == seen[2] and 3.9 < seen[1] / seen[0] < 4.1


def test_what_fails_again_and_again_gets_ever_fewer_turns() -> None:
    schedule, seen = Schedule(2), Counter[int | None]()
    for _ in range(512):
        which = schedule.next([True] * 2)
        assert which is not None
        schedule.learned(which, failed=which == 0)
        seen[which] += 1
    assert 6 <= seen[0] <= 10
    schedule.learned(0)  # it does no longer
    schedule.had = [0.0, 0.0]
    assert turns(schedule, [True] * 2, 4).count(0) == 2


def test_what_comes_late_catches_up_and_no_more() -> None:
    schedule = Schedule(2)
    turns(schedule, [True, False], 1000)
    alone = turns(schedule, [True] * 2, 200)
    assert alone.index(0) in (BEHIND, BEHIND + 1)
    assert abs(alone[100:].count(0) - 50) <= 1


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6),
       st.integers(0, 5))
def test_nobody_starves(what: list[tuple[bool, bool]], last: int) -> None:
    """Whoever is new or usual has a turn within as many turns as four times all the others."""
    schedule = Schedule(len(what), last % len(what))
    waited = [0] * len(what)
    for _ in range(200):
        which = schedule.next([True] * len(what))
        assert which is not None
        new, failed = what[which]
        schedule.learned(which, new=new, failed=failed)
        waited = [0 if i == which else n + 1 for i, n in enumerate(waited)]
        assert all(n <= 8 * len(what) for n, (_, bad) in zip(waited, what, strict=True) if not bad)
