"""Whose turn it is: every space gets launches, those that still show something new get more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# What a launch costs a space: after one that met a boundary class of its path for the first time,
# after any other, and at most after many failures in a row, each of which doubles it.
NEW, USUAL, FAILED = 0.25, 1.0, 256.0
# How far a space that could not run yet may lie behind: it catches up, and then takes its turns.
BEHIND = 64.0


@dataclass(slots=True)
class Schedule:
    """The space that has had least has its turn, by stride scheduling (Waldspurger and Weihl 1995).

    `had` is what each of `count` spaces has had; among equals the one after the last goes first.
    """

    count: int
    last: int = -1
    running: set[int] = field(default_factory=set)
    had: list[float] = field(init=False)
    cost: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.had, self.cost = [0.0] * self.count, [USUAL] * self.count

    def next(self, ready: Sequence[bool]) -> int | None:
        """The space whose turn it is of those that are ready, or None if none is."""
        able = [which for which in range(self.count) if ready[which]]
        if not able:
            return None
        least = min((self.had[which] for which in self.running), default=0.0) - BEHIND
        for which in {*able} - self.running:
            self.had[which] = max(least, 0.0)
        self.running |= {*able}
        which = min(able, key=lambda i: (self.had[i], (i - self.last - 1) % self.count))
        self.had[which] += self.cost[which]
        self.last = which
        return which

    def learned(self, which: int, *, new: bool = False, failed: bool = False) -> None:
        """What a launch of a space came to."""
        if failed:
            self.cost[which] = min(2 * max(self.cost[which], USUAL), FAILED)
        else:
            self.cost[which] = NEW if new else USUAL
