"""What becomes of a finding: pure functions over its state and what happens to it.

A finding closes when its replay has passed on every tracked release since it was last seen there,
and by itself reopens as `regressed` when one fails again. A person may set it aside, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

NEW, OPEN, FIXED, REGRESSED = "new", "open", "fixed", "regressed"
INFRASTRUCTURE, WONT_FIX = "infrastructure", "wontfix"
STATES = (NEW, OPEN, FIXED, REGRESSED, INFRASTRUCTURE, WONT_FIX)
ASIDE = (INFRASTRUCTURE, WONT_FIX)
# What a person may still have to do something about.
LIVE = (NEW, OPEN, REGRESSED)


class TriageError(Exception):
    """What cannot be done with a finding; the message is one line."""


@dataclass(frozen=True, slots=True)
class Triage:
    """`results` says of each release whether the finding was gone there when it was last looked
    for. `fixed_in` is the first release without it."""

    state: str = NEW
    reason: str = ""
    fixed_in: str = ""
    results: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """A launch showed it in a release."""

    release: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """Its case was run again with a release."""

    release: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """A person says that it is one."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A person, or what is known of the machine, says that it is not to be fixed."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reopened:
    """A person wants it looked into again: what passed before counts no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tracked:
    """Other releases are tracked from now on."""


Event = Seen | Replayed | Accepted | SetAside | Reopened | Tracked


def after(at: Triage, event: Event, tracked: Collection[str]) -> Triage:
    """The state after an event, while these releases are `tracked`. Raises TriageError."""
    match event:
        case Accepted():
            if at.state != NEW:
                raise TriageError(f"only a new finding can be accepted, and this one is {at.state}")
            return replace(at, state=OPEN)
        case SetAside(state, reason):
            if state not in ASIDE:
                raise TriageError(f"a finding can be set aside as {' or '.join(ASIDE)}")
            return replace(at, state=state, reason=_given(reason), fixed_in="")
        case Reopened(reason):
            if at.state in LIVE:
                raise TriageError(f"only what is closed can be reopened, and this is {at.state}")
            return Triage(OPEN, _given(reason))
        case Seen(release):
            return _settled(replace(at, results={**at.results, release: False}), tracked, "")
        case Replayed(release, passed):
            found = replace(at, results={**at.results, release: passed})
            if not passed and at.state in (NEW, INFRASTRUCTURE):
                return replace(found, state=OPEN, reason=f"its replay fails on {release}")
            return _settled(found, tracked, release)
    return _settled(at, tracked, "")


def _given(reason: str) -> str:
    if not reason.strip():
        raise TriageError("a reason is needed")
    return " ".join(reason.split())


def _settled(at: Triage, tracked: Collection[str], release: str) -> Triage:
    """Closes what passes on every tracked release, and reopens what fails on one."""
    results = [at.results.get(one) for one in tracked]
    if at.state in LIVE and results and all(results):
        fixed = fixed_in(at.results, tracked, release)
        return replace(at, state=FIXED, fixed_in=fixed, reason=f"its replay passes on {fixed}")
    if at.state == FIXED and False in results:
        where = next(one for one in sorted(tracked) if at.results.get(one) is False)
        return replace(at, state=REGRESSED, fixed_in="", reason=f"it is there again on {where}")
    return at


def fixed_in(results: Mapping[str, bool], tracked: Collection[str], last: str = "") -> str:
    """The first tracked release after the last that fails; of names without a version, the one
    that was looked at last."""
    order = sorted(tracked, key=_version)
    bad = [_version(release) for release, passed in results.items() if not passed]
    if not bad or not all(_version(one)[0] for one in order):
        return last or order[0]
    return next((one for one in order if _version(one) > max(bad)), last or order[-1])


def _version(release: str) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, re.findall(r"\d+", release))), release
