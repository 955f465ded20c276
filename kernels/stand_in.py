"""Modules executed without what they import, and functions of them called on symbolic numbers.

What a module takes from elsewhere is replaced by stand-ins that may be named, called and
subclassed. None has a value: code that asks for one, to branch on it for example, is refused.
Numbers may be symbolic: a comparison that has both answers is answered one way and then, in
another run, the other.
"""

from __future__ import annotations
import __future__

import builtins
import sys
from collections.abc import Callable, Mapping
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType
from typing import Any

from kernels.machine import CannotLift
from spec.term import TRUE, Term, and_, const, eq, not_, term

# Imported as they are; all else is stood in for.
REAL = {*sys.stdlib_module_names, "torch", "numpy"}
MOST_PATHS = 64


class StandIn:
    """Something that an executed module imports. `given` holds the few things that are known."""

    def __init__(self, path: str, given: Mapping[str, Any]) -> None:
        self.__dict__.update(_path=path, _given=given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._given[name] if name in self._given else self._part(f".{name}")

    def _part(self, suffix: str) -> StandIn:
        return StandIn(self._path + suffix, self._given)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CannotLift(f"{self._path}.{name} is set, which is not modelled")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part("()")

    def __getitem__(self, index: Any) -> Any:
        return self._part("[]")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self._part("|")

    __ror__ = __or__

    def _refused(self, *rest: Any) -> Any:
        raise CannotLift(f"the value of {self._path} is asked for, which is not known")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused  # type: ignore
    __len__ = __iter__ = __contains__ = __index__ = __int__ = __float__ = _refused  # type: ignore

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self._path}>"


def executed(path: Path, module: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The names that a file defines when it runs as `module`; raises CannotLift.

    `given` maps names to what an import of them gives, from whatever module.
    """
    package = module.rpartition(".")[0]

    def importer(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (),
                 level: int = 0) -> Any:
        name = resolve_name("." * level + name, package) if level else name
        if name.partition(".")[0] in REAL:
            return builtins.__import__(name, globals, locals, fromlist)
        return StandIn(name if fromlist else name.partition(".")[0], given)

    names = {
        "__name__": module, "__file__": str(path), "__package__": package,
        "__builtins__": {**vars(builtins), "__import__": importer},
    }
    before = sys.modules.get(module)
    sys.modules[module] = _Namespace(names)  # type: ignore[assignment]
    try:
        exec(_compiled(path), names)
    except CannotLift as refusal:
        raise CannotLift(f"{path.name}: {refusal}") from None
    except Exception as error:
        raise CannotLift(f"{path.name} does not run alone: {said(error)}") from None
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before
    return names


class _Namespace:
    """What dataclasses look up of the module that they are defined in."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def _compiled(path: Path) -> CodeType:
    try:
        # Annotations are not evaluated: they would compare what stands in for types.
        flags = __future__.annotations.compiler_flag
        return compile(path.read_bytes(), str(path), "exec", flags, dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise CannotLift(f"it cannot be read: {said(error)}") from None


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


class Number:
    """An integer of which a term and an interval, both ends inclusive, are known."""

    __slots__ = ("high", "low", "paths", "term")

    def __init__(self, value: Term, low: int, high: int, paths: Paths) -> None:
        self.term, self.low, self.high, self.paths = value, low, high, paths

    def _with(self, other: Any) -> Number:
        if isinstance(other, Number):
            return other
        if not isinstance(other, int):
            raise CannotLift(f"a symbolic number meets {type(other).__name__}")
        return Number(const(int(other)), int(other), int(other), self.paths)

    def __add__(self, other: Any) -> Number:
        o = self._with(other)
        # `window - 1 + 1` is the window again.
        value = _sum(self.term, o.term)
        return Number(value, self.low + o.low, self.high + o.high, self.paths)

    __radd__ = __add__

    def __neg__(self) -> Number:
        return Number(-self.term, -self.high, -self.low, self.paths)

    def __sub__(self, other: Any) -> Number:
        o = self._with(other)
        value = _sum(self.term, const(-o.term.value)) if o.term.op == "const" else \
            self.term - o.term
        return Number(value, self.low - o.high, self.high - o.low, self.paths)

    def __rsub__(self, other: Any) -> Number:
        return self._with(other) - self

    def __floordiv__(self, other: Any) -> Number:
        if not isinstance(other, int) or other <= 0:
            raise CannotLift(f"a symbolic number is divided by {other!r}")
        return Number(self.term // other, self.low // other, self.high // other, self.paths)

    def __lt__(self, other: Any) -> bool:
        o = self._with(other)
        return self.paths.ask(self.term < o.term, self.high < o.low, self.low < o.high)

    def __le__(self, other: Any) -> bool:
        o = self._with(other)
        return self.paths.ask(self.term <= o.term, self.high <= o.low, self.low <= o.high)

    def __gt__(self, other: Any) -> bool:
        return self._with(other) < self

    def __ge__(self, other: Any) -> bool:
        return self._with(other) <= self

    def __eq__(self, other: Any) -> bool:
        if other is None or isinstance(other, str):
            return False
        o = self._with(other)
        if self.term is o.term:
            return True
        meet = self.low <= o.high and o.low <= self.high
        return self.paths.ask(eq(self.term, o.term), False, meet)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def __hash__(self) -> int:
        return hash(self.term)

    def _refused(self, *rest: Any) -> Any:
        raise CannotLift("the value of a symbolic number is asked for")

    __int__ = __index__ = __float__ = _refused

    def __repr__(self) -> str:
        return f"Number({self.term!r})"


def _sum(a: Term, b: Term) -> Term:
    """a + b with the constants of nested sums taken together."""
    rest, constant = _parts(a)
    more, other = _parts(b)
    both = rest if more is None else more if rest is None else rest + more
    total = constant + other
    if both is None:
        return const(total)
    return both if total == 0 else both + total if total > 0 else both - (-total)


def _parts(value: Term) -> tuple[Term | None, int]:
    if value.op == "const":
        return None, value.value
    if value.op in ("add", "sub") and value.args[1].op == "const":
        sign = 1 if value.op == "add" else -1
        return value.args[0], sign * value.args[1].value
    return value, 0


class Paths:
    """The answers that one run was given, and the condition under which they are right."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers, self.asked = answers, 0
        self.known: dict[Term, bool] = {}
        self.taken: list[bool] = []

    def ask(self, claim: Term, always: bool, possible: bool) -> bool:
        if always or not possible:
            return always
        if claim not in self.known:
            answer = self.answers[self.asked] if self.asked < len(self.answers) else True
            self.asked += 1
            self.taken.append(answer)
            self.known[claim] = answer
        return self.known[claim]

    def number(self, value: Term | int, low: int, high: int) -> Number:
        return Number(term(value), low, high, self)

    @property
    def condition(self) -> Term:
        asked = [claim if answer else not_(claim) for claim, answer in self.known.items()]
        return and_(*asked) if asked else TRUE


def explore(run: Callable[[Paths], Any]) -> list[tuple[Term, Any]]:
    """What `run` gives, under each condition on its symbolic numbers. The conditions are disjoint
    and one of them always holds."""
    found: list[tuple[Term, Any]] = []
    answers: list[bool] | None = []
    while answers is not None:
        if len(found) == MOST_PATHS:
            raise CannotLift(f"more than {MOST_PATHS} ways through the code")
        paths = Paths(answers)
        result = run(paths)
        found.append((paths.condition, result))
        answers = paths.taken
        while answers and not answers[-1]:
            answers = answers[:-1]
        answers = [*answers[:-1], False] if answers else None
    return found
