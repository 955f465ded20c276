"""The state of a walk through the IR, and the values that are no machine words."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.machine import Bits, CannotLift, Num, number
from kernels.simplify import signed_range, span
from spec.term import TRUE, Term, sym


@dataclass(frozen=True, slots=True)
class Strided:
    """An index into memory: terms times strides of one table; the key None is the rest."""

    parts: Mapping[tuple[int, int] | None, Term]


@dataclass(frozen=True, slots=True)
class Pointer:
    """`base`: ("register", id, type), ("table", k), ("out",) of i32 or ("out", k, type)."""

    base: tuple[Any, ...]
    offset: Strided


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's descriptor, or the part of it that lies at `part`."""

    base: tuple[Any, ...]
    part: tuple[int, ...] = ()


POISON = object()
Path = tuple[Term, ...]
Memory = dict[tuple[Any, ...], Any]


@dataclass(slots=True)
class Walk:
    """The state of one walk."""

    layout: tuple[str, ...]
    ranks: tuple[int, ...]
    env: dict[int, Any] = field(default_factory=dict)
    path: Path = ()
    memory: Memory = field(default_factory=dict)
    op: Any = None
    arithmetic: dict[tuple[Term, int], list[tuple[Path, str]]] = field(default_factory=dict)
    conditions: dict[Term, list[tuple[Path, str]]] = field(default_factory=dict)
    reads: dict[Term, list[tuple[Path, str]]] = field(default_factory=dict)
    operations: int = 0
    # Where the mask_mod's own code was last seen: some operations carry no place of their own.
    near: str = "unknown"
    inline_ptx: bool = False
    floats: bool = False
    # The symbol in which the lanes of a warp differ; what the words that they pass on are, and of
    # which lane of its segment each is.
    thread: Term | None = None
    shuffles: dict[Term, tuple[Term, int]] = field(default_factory=dict)

    def shuffled(self, definition: Term, lane: int) -> Term:
        """The symbol of a word that comes from another lane."""
        known = next((s for s, (d, _) in self.shuffles.items() if d is definition), None)
        if known is None:
            known = sym(f"shuffled_{len(self.shuffles)}")
            self.shuffles[known] = definition, lane
        return known

    def fits(self, value: Term, width: int) -> None:
        (low, high), (least, most) = span(value), signed_range(width)
        if low < least or high > most:
            self._note(self.arithmetic, (value, width))

    def needs(self, claim: Term) -> None:
        if claim is not TRUE:
            self._note(self.conditions, claim)

    def loads(self, element: Term) -> None:
        self._note(self.reads, element)

    def _note(self, notes: dict[Any, list[tuple[Path, str]]], what: Any) -> None:
        paths = notes.setdefault(what, [])
        if not any(set(path) <= set(self.path) for path, _ in paths):
            paths.append((self.path, location(self.op)))

    def refuse(self, reason: str) -> CannotLift:
        name = self.op.name if self.op is not None else "function"
        at = location(self.op)
        place = f"near {self.near}" if at.startswith(TRACE) or at == "unknown" else at
        return CannotLift(f"{place}: {name}: {reason}")

    def step(self, op: Any) -> None:
        """Goes on to the next operation."""
        self.op = op
        self.operations += 1
        at = location(op)
        if not at.startswith(TRACE) and at != "unknown":
            self.near = at

    def number(self, value: Any) -> Term:
        if isinstance(value, Num | Bits):
            return number(value)
        raise self.refuse(f"needs an integer, not {kind(value)}")


def kind(value: Any) -> str:
    if value is POISON:
        return "a value that was never set"
    return {Strided: "a stride", Pointer: "a pointer", tuple: "a vector", Tensor: "a tensor"}.get(
        type(value), type(value).__name__
    )


TRACE = "trace.py:"
LOCATION = re.compile(r'"([^"]+\.py)":(\d+):')


def location(op: Any) -> str:
    found = LOCATION.search(str(op.location)) if op is not None else None
    return f"{os.path.basename(found[1])}:{found[2]}" if found else "unknown"
