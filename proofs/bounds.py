"""The bounds of a built-in mask, and the mask with one of them moved or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spec.term import TRUE, Term, postorder, substitute, symbols

NAMES = {"window_size_left": ("left", "the window's left bound"),
         "window_size_right": ("right", "the window's right bound"),
         "": ("right", "the causal bound")}


@dataclass(frozen=True, slots=True)
class Bound:
    """One comparison of a formula in absolute positions. Keys on its `side` are hidden."""

    compare: Term
    side: str
    name: str

    @property
    def margin(self) -> Term:
        """How many keys a cell lies inside the bound; negative beyond it."""
        low, high = self.compare.args
        return high - low

    def moved(self, formula: Term, by: Term | int) -> Term:
        """The formula with `by` more keys inside the bound."""
        low, high = self.compare.args
        end = high - -by if isinstance(by, int) and by < 0 else high + by
        return substitute(formula, {self.compare: low <= end})

    def dropped(self, formula: Term) -> Term:
        return substitute(formula, {self.compare: TRUE})


def bounds(formula: Term) -> Iterator[Bound]:
    """Every bound that depends on how far apart query and key are."""
    for node in postorder(formula):
        if node.op == "le" and {"q", "kv"} <= symbols(node):
            name = next((n for n in NAMES if n in symbols(node)), "")
            yield Bound(node, *NAMES[name])


def counted(number: int, what: str = "key") -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"


def up_to(number: int, what: str = "key") -> str:
    return counted(number, what) if number == 1 else f"up to {counted(number, what)}"
