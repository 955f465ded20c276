"""Obligations of compile keys: same-key-same-mask.

One unit is one aspect of the calls of one host function: an argument, or a part of its value. Calls
that differ in it alone and share a key are traced; where the kernels differ, whichever call comes
first decides what the other is given. The claim holds for the calls that are listed, no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

from kernels.compile_keys import ARCH as NUMBER
from kernels.compile_keys import Aspect, Call, Captured, Host, Kernel, aspects, hosts
from kernels.machine import CannotLift
from kernels.provider import Provider
from proofs.checks import REAL, Announce, Options, Row
from proofs.diagnosis import Diagnosis
from proofs.obligation import Obligation, Result, Verdict, Witness
from spec.term import const

LAYER, ARCH, NAME = "keys", f"sm_{NUMBER}", "same-key-same-mask"
# Parts that are proved apart, each with some aspects that change the kernel.
PARTS, ALL_PARTS = 6, 16
# The host function whose arguments have no prefix in the names of targets.
FORWARD = "_flash_attn_fwd"


class Compared(Obligation):
    """An obligation on finitely many calls, each of them looked at."""

    __slots__ = ()

    @property
    def theory(self) -> str:
        return "comparison of traced kernels, call by call"


Calls = Mapping[Call, Captured]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two calls with one key, and the kernel that each asks for."""

    first: Call
    second: Call
    kernel: Kernel
    other: Kernel


@dataclass
class Unit:
    """One aspect of one host function. Unless `every_base`, the first base is enough in which the
    compiler is given other things. `traced` keeps kernels across units of the host."""

    provider: Provider
    host: Host
    aspect: Aspect
    bases: Sequence[Call]
    every_base: bool = False
    traced: dict[Hashable, Kernel | CannotLift] = field(default_factory=dict)

    @property
    def target(self) -> str:
        prefix = "" if self.host.name == FORWARD else f"{self.host.name}."
        return f"{self.provider.name}/compile-key/{prefix}{self.aspect.name}"

    def kernel(self, call: Call, captured: Captured) -> Kernel | None:
        """None where the compiler refuses the call."""
        if captured.given not in self.traced:
            try:
                self.traced[captured.given] = self.host.kernel(call)
            except CannotLift as refusal:
                self.traced[captured.given] = refusal
        found = self.traced[captured.given]
        return found if isinstance(found, Kernel) else None

    def faults(self, calls: Calls, without: frozenset[int] = frozenset()) -> Iterator[Pair]:
        """Calls that share a key although their kernels differ. `without` are entries that are
        left out of the key."""
        for (first, one), (second, two) in combinations(calls.items(), 2):
            if one.given == two.given or _cut(one, without) != _cut(two, without):
                continue
            kernels = self.kernel(first, one), self.kernel(second, two)
            if kernels[0] and kernels[1] and kernels[0].text != kernels[1].text:
                yield Pair(first, second, *kernels)

    def mutants(self, calls: Calls) -> Iterator[frozenset[int]]:
        """For each pair of calls the entries of the key that tell them apart."""
        found = {_apart(one, two): None for one, two in combinations(calls.values(), 2)
                 if one.given != two.given}
        yield from (entries for entries in found if entries)


def _cut(captured: Captured, without: frozenset[int]) -> tuple[object, ...]:
    return tuple(entry for i, entry in enumerate(captured.key) if i not in without)


def _apart(one: Captured, two: Captured) -> frozenset[int]:
    """Empty where the keys are equal, or of different lengths."""
    if len(one.key) != len(two.key):
        return frozenset()
    entries = enumerate(zip(one.key, two.key, strict=True))
    return frozenset(i for i, (a, b) in entries if a != b)


def of_aspect(unit: Unit, notes: str = "") -> list[Row]:
    """One row, or none where the aspect does not change the kernel. The provider is served."""
    start = time.perf_counter()
    faults: list[Pair] = []
    looked_at: list[Calls] = []
    killed = 0
    for base in unit.bases:
        calls = unit.host.captured(base, unit.aspect)
        if len({each.given for each in calls.values()}) < 2:
            continue
        looked_at.append(calls)
        if faults := list(unit.faults(calls)):
            break
        if not killed:
            # Of each key one mutant that is found out is enough: a kernel takes half a second.
            killed = int(any(next(unit.faults(calls, without), None)
                             for without in unit.mutants(calls)))
        if not unit.every_base:
            break

    def row(verdict: Verdict, **more: Any) -> Row:
        made = _obligation(unit.target, _bounds(unit.host, looked_at, notes))
        return Row(Result(made, verdict, time.perf_counter() - start, killed, **more), REAL,
                   fa4=unit.provider.name)

    if faults:
        return [_refuted(unit, row, faults[0])]
    if killed:
        return [row(Verdict.PROVED)]
    kernels = [unit.traced.get(each.given) for calls in looked_at for each in calls.values()]
    refused = [str(each) for each in kernels if isinstance(each, CannotLift)]
    return [row(Verdict.UNSUPPORTED, reason=refused[0])] if refused else []


def _refuted(unit: Unit, row: Callable[..., Row], found: Pair) -> Row:
    if unit.host.kernel(found.first).text != found.kernel.text:
        return row(Verdict.ERROR, reason=f"{found.first} is traced to another kernel each time")
    calls: Any = {"first": str(found.first), "then": str(found.second)}
    made = row(Verdict.REFUTED, witness=Witness(calls, {}))
    sentence = (f"the compile key does not hold {unit.aspect.phrase}: of two calls that differ in "
                "it alone, the later is given the kernel compiled for the earlier")
    return replace(made, diagnosis=Diagnosis(
        sentence, found.kernel.first_difference(found.other), Verdict.PROVED))


def _bounds(host: Host, looked_at: Sequence[Calls], notes: str) -> str:
    calls = ", ".join(str(call) for calls in looked_at for call in calls)
    return f"these calls, pair by pair: {calls}; each with {host.says}{notes}"


def _obligation(target: str, bounds: str) -> Obligation:
    return Compared(target=target, name=NAME, spec="traced kernel", claim=const(True),
                    assumptions=(), bounds=bounds, layer=LAYER, arch=ARCH)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Every `of`-th aspect from `part` on; of each host function, at every base, if `full`."""

    part: int
    of: int
    full: bool = False

    @property
    def name(self) -> str:
        return f"{self.part + 1}-of-{self.of}"


def configurations(provider: Provider, *, full: bool = False) -> list[Configuration]:
    """The parts into which the aspects are dealt, whatever these are."""
    parts = ALL_PARTS if full else PARTS
    return [Configuration(part, parts, full) for part in range(parts)]


# Kernels that were traced in this process, by provider and host function.
_traced: dict[tuple[Provider, str], dict[Hashable, Kernel | CannotLift]] = {}


def prepare(provider: Provider) -> None:
    """Imports what every part needs."""
    try:
        with provider.served():
            provider.module("interface")
    except CannotLift:
        return  # each part says so


def units(provider: Provider, *, full: bool = False) -> Iterator[tuple[Unit, str]]:
    """Every unit, and what its bounds say of arguments that none is about; those of the host
    functions behind the first only if `full`. The provider is served."""
    for host in hosts(provider)[: None if full else 1]:
        found, unknown = aspects(host, provider)
        notes = f"; not varied: {', '.join(unknown)}" if unknown else ""
        traced = _traced.setdefault((provider, host.name), {})
        for aspect in found:
            yield Unit(provider, host, aspect, host.calls, full, traced), notes


def of_configuration(
    provider: Provider, configuration: Configuration, options: Options = Options(),
    announce: Announce = lambda text: None,
) -> list[Row]:
    """The rows of one part. The provider is served."""
    if options.obligations and NAME not in options.obligations:
        return []
    found: list[Row] = []
    try:
        every = units(provider, full=configuration.full)
        for unit, notes in islice(every, configuration.part, None, configuration.of):
            announce(f"{unit.target} {NAME}")
            found += of_aspect(unit, notes)
    except CannotLift as refusal:
        nothing = _obligation(f"{provider.name}/compile-key", "none")
        # It is the same for every part.
        if configuration.part == 0:
            found.append(Row(Result(nothing, Verdict.UNSUPPORTED, reason=str(refusal)),
                             fa4=provider.name))
    return found


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None,
         *, full: bool = False) -> Iterator[Row]:
    with provider.served():
        yield from of_configuration(provider, Configuration(0, 1, full), options, announce)
