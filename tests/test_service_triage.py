"""What becomes of a finding, whatever happens to it in which order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fuzz.service.triage import (
    ASIDE,
    FIXED,
    INFRASTRUCTURE,
    LIVE,
    NEW,
    OPEN,
    REGRESSED,
    STATES,
    WONT_FIX,
    Accepted,
    Reopened,
    Replayed,
    Seen,
    SetAside,
    Tracked,
    Triage,
    TriageError,
    after,
    fixed_in,
)

RELEASES = ("vllm-0.9.2", "vllm-0.10.0", "vllm-0.33.0")
releases = st.sampled_from(RELEASES)


class Life(RuleBasedStateMachine):
    """A finding beside a plain account of what happened to it."""

    def __init__(self) -> None:
        super().__init__()
        self.at = Triage()
        self.tracked: set[str] = {RELEASES[-1]}
        self.last: dict[str, bool] = {}  # of each release the result since it was last reopened
        self.was_fixed = False

    def do(self, event: Any) -> None:
        before = self.at
        self.at = after(before, event, self.tracked)
        self.check(before, event)

    def check(self, before: Triage, event: Any) -> None:
        passes = bool(self.tracked) and all(self.last.get(one) for one in self.tracked)
        fails = any(self.last.get(one) is False for one in self.tracked)
        if before.state in LIVE and not isinstance(event, SetAside | Reopened | Accepted):
            # It closes when, and only when, its replay passes on every tracked release.
            assert (self.at.state == FIXED) == passes
        if before.state == FIXED and not isinstance(event, SetAside | Reopened):
            # It reopens by itself, and for no other cause.
            assert (self.at.state == REGRESSED) == fails
        if before.state == WONT_FIX and not isinstance(event, SetAside | Reopened):
            assert self.at.state == WONT_FIX
        if self.at.state == NEW:
            assert before.state == NEW

    @rule(release=releases)
    def seen(self, release: str) -> None:
        self.last[release] = False
        self.do(Seen(release))

    @rule(release=releases, passed=st.booleans())
    def replayed(self, release: str, passed: bool) -> None:
        self.last[release] = passed
        self.do(Replayed(release, passed))

    @rule(tracked=st.sets(releases))
    def tracks(self, tracked: set[str]) -> None:
        self.tracked = tracked
        self.do(Tracked())

    @rule()
    def accepted(self) -> None:
        if self.at.state == NEW:
            self.do(Accepted())
            assert self.at.state == OPEN
        else:
            with pytest.raises(TriageError, match="only a new finding"):
                after(self.at, Accepted(), self.tracked)

    @rule(state=st.sampled_from(STATES), reason=st.sampled_from(["", "  ", "padded\nrows"]))
    def set_aside(self, state: str, reason: str) -> None:
        if state in ASIDE and reason.strip():
            self.do(SetAside(state, reason))
            assert (self.at.state, self.at.reason) == (state, "padded rows")
        else:
            with pytest.raises(TriageError):
                after(self.at, SetAside(state, reason), self.tracked)

    @rule(reason=st.sampled_from(["", "look again"]))
    def reopened(self, reason: str) -> None:
        if self.at.state in LIVE or not reason:
            with pytest.raises(TriageError):
                after(self.at, Reopened(reason), self.tracked)
        else:
            self.last = {}
            self.do(Reopened(reason))
            assert self.at.state == OPEN

    @invariant()
    def is_sound(self) -> None:
        assert self.at.state in STATES
        assert self.at.results == self.last
        # What is set aside has a reason, and what is fixed a release; nothing else has one.
        assert self.at.reason or self.at.state not in ASIDE
        assert bool(self.at.fixed_in) == (self.at.state == FIXED)


Life.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


def lived(*events: Any, tracked: tuple[str, ...] = RELEASES[-1:]) -> Triage:
    at = Triage()
    for event in events:
        at = after(at, event, tracked)
    return at


def test_a_replay_that_fails_confirms_a_new_finding() -> None:
    assert lived(Seen(RELEASES[0])).state == NEW
    assert lived(Replayed(RELEASES[-1], False)).state == OPEN
    aside = lived(SetAside(INFRASTRUCTURE, "a bad card"), Replayed(RELEASES[-1], False))
    assert aside.state == OPEN
    assert lived(SetAside(INFRASTRUCTURE, "a bad card"), Seen(RELEASES[-1])).state == INFRASTRUCTURE


def test_nothing_closes_where_nothing_is_tracked() -> None:
    assert lived(Replayed(RELEASES[-1], True), tracked=()).state == NEW


def test_one_release_that_is_not_tried_keeps_it_open() -> None:
    events = [Replayed(release, True) for release in RELEASES[1:]]
    assert lived(*events, tracked=RELEASES).state == NEW
    assert lived(*events, Replayed(RELEASES[0], True), tracked=RELEASES).state == FIXED


@pytest.mark.parametrize(("bad", "fixed"), [
    ((), "vllm-0.33.0"), (("vllm-0.9.2",), "vllm-0.10.0"), (("vllm-0.10.0",), "vllm-0.33.0"),
])
def test_it_is_fixed_in_the_first_release_after_the_last_bad_one(
    bad: tuple[str, ...], fixed: str
) -> None:
    results = {release: release not in bad for release in RELEASES}
    tracked = [release for release in RELEASES if release not in bad]
    assert fixed_in(results, tracked, "vllm-0.33.0") == fixed


def test_of_trees_without_a_version_the_one_that_was_tried_last_fixed_it() -> None:
    assert fixed_in({"vllm-tree": True, "vllm-0.9.2": False}, ["vllm-tree"], "vllm-tree") == (
        "vllm-tree")


def test_a_regression_that_passes_again_is_fixed_again() -> None:
    release = RELEASES[-1]
    events = (Replayed(release, True), Seen(release), Replayed(release, True))
    assert [lived(*events[:n]).state for n in range(4)] == [NEW, FIXED, REGRESSED, FIXED]
