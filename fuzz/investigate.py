"""From a launch that went wrong to findings: tell faults apart, isolate, shrink, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuzz.backends import KINDS, Outcome, Wrong
from fuzz.case import Case, CaseError, canonical
from fuzz.diagnose import Diagnoses
from fuzz.findings import Signature, document, path_of, save
from fuzz.regions import regions
from fuzz.sequences import Sequences, pack, unpack
from fuzz.shrink import shrink
from fuzz.strategies import Space
from fuzz.targets import Source
from fuzz.worker import SKIP, Deadlines, Failure, Worker
from kernels.fa4 import Call
from spec.masks import Mask

Result = Outcome | Failure
# New faults of one launch that are looked into; the others will come again.
MOST_NEW = 4
# Sequences tried alone, and the most that are shrunk together.
ALONE, TOGETHER = 4, 8
SHRINKING = 15.0
# A case of a few sequences is done in milliseconds.
QUICK = 2.0


def signatures(
    mask: Mask, call: Call, packed: Sequences, result: Result, backend: str
) -> dict[Signature, Any]:
    """The faults that a result shows: for each the indices of its wrong cells, or the failure."""
    provider, path = call.provider, path_of(call, backend)
    if isinstance(result, Failure):
        if result.kind == SKIP:
            return {}
        return {Signature(provider, path, result.kind, result.stage): result}
    found: dict[Signature, list[int]] = {}
    texts = regions(mask, call.params, packed, result.wrong.cells)
    for i, (kind, text) in enumerate(zip(result.wrong.kind, texts, strict=True)):
        found.setdefault(Signature(provider, path, KINDS[kind], text), []).append(i)
    order = sorted(found, key=lambda one: -len(found[one]))
    return {one: np.array(found[one]) for one in order}


@dataclass(frozen=True, slots=True)
class Isolated:
    """The smallest case of a fault that was found, its wrong cells, and what a failure said."""

    case: Case
    wrong: Wrong | None
    text: str
    shrunk: bool
    calls: int = 0


@dataclass(slots=True)
class Investigator:
    """Looks into launches with a worker of its own; `until` is the end of its time. `source` is
    that of spaces which name none."""

    worker: Worker
    source: Source
    folder: Any
    origin: Mapping[str, Any]
    until: float
    diagnoses: Diagnoses
    announce: Callable[[str], None] = lambda text: None
    known: set[str] = field(default_factory=set)
    most_new: int = MOST_NEW
    interrupted: Callable[[], bool] = lambda: False
    save: Callable[[Any, Mapping[str, Any]], Any] = save

    def look_into(
        self, space: Space, call: Call, packed: Sequences, result: Result, n: int
    ) -> dict[str, Any]:
        """Saves what is new. Returns what to add to the totals: how often each fault was seen."""
        found = signatures(space.mask, call, packed, result, self.worker.backend.name)
        seen: dict[str, int] = {}
        faults: dict[str, int] = {}
        new = [one for one in found if one.fingerprint not in self.known]
        for signature in new[:self.most_new]:
            if isinstance(found[signature], Failure) and not self._again(space, call, packed,
                                                                        signature):
                reason = self.worker.backend.probe() or "it did not happen again"
                faults[f"{signature.kind} ({found[signature].text}): {reason}"] = 1
                continue
            self._save(space, call, packed, result, signature, found[signature], n)
        for signature in found:
            if signature.fingerprint in self.known:
                seen[signature.fingerprint] = 1
        return {"findings": seen, "infrastructure": faults}

    def _again(self, space: Space, call: Call, packed: Sequences, signature: Signature) -> bool:
        result = self._run(call, packed)
        return signature in signatures(space.mask, call, packed, result, self.worker.backend.name)

    def _save(
        self, space: Space, call: Call, packed: Sequences, result: Result, signature: Signature,
        which: Any, n: int,
    ) -> None:
        self.announce(f"{signature.kind} in {signature.path}: shrinking")
        died = isinstance(result, Failure) and result.died
        most = max(SHRINKING, self.worker.backend.patience if died else 0)
        until = min(self.until, time.monotonic() + most)
        for one in self._smaller(space, call, packed, result, signature, which, until):
            finding = document(
                signature, one.case, one.wrong, one.text, space.source or self.source, launch=n,
                shrunk=one.shrunk, shrink_calls=one.calls, **self.origin,
            )
            said = None
            explained = one.wrong is not None or signature.kind == "crash"
            if one.shrunk and explained and self.until - time.monotonic() > 1 and not self._over():
                said = self.diagnoses.of_call(call, self.until - time.monotonic())
            self.save(self.folder, {**finding, "diagnosis": said})
            self.known.add(signature.fingerprint)

    def _smaller(
        self, space: Space, call: Call, packed: Sequences, result: Result, signature: Signature,
        which: Any, until: float,
    ) -> Any:
        """The fault isolated, which is saved at once, and then shrunk."""
        backend, mask = self.worker.backend.name, space.mask
        said_of: dict[str, Result] = {}

        def fails(case: Case) -> bool:
            try:
                at = pack(mask, case.sequences)
            except CaseError:
                return False
            said = self._run(case.call, at, QUICK)
            if signature not in signatures(mask, case.call, at, said, backend):
                return False
            said_of[canonical(case)] = said
            return True

        def late() -> bool:
            return self._over() or time.monotonic() > until

        def holds(indices: List[int]) -> bool:
            return not late() and fails(Case(call, unpack(mask, packed, indices)))

        chosen = isolate(packed, _suspects(packed, result, which), holds, late)
        case = Case(call, unpack(mask, packed, chosen))
        yield _isolated(case, said_of.get(canonical(case), result), False)
        if len(chosen) <= TOGETHER:
            left = max(until - time.monotonic(), 0.0)
            small = shrink(space, case, fails, left, self.interrupted)
            yield _isolated(small.case, said_of.get(canonical(small.case), result),
                            small.finished, small.calls)

    def _over(self) -> bool:
        return self.interrupted() or time.monotonic() > self.until

    def _run(self, call: Call, packed: Sequences, run: float | None = None) -> Result:
        usual = self.worker.deadlines
        if run is not None:
            self.worker.deadlines = Deadlines(usual.compile, min(run, usual.run))
        try:
            return self.worker.run(call, packed, self._over)
        finally:
            self.worker.deadlines = usual


def _isolated(case: Case, said: Result, shrunk: bool, calls: int = 0) -> Isolated:
    if isinstance(said, Failure):
        return Isolated(case, None, said.text, shrunk, calls)
    text = f"{said.wrong.total} of {said.cells} cells are wrong"
    return Isolated(case, said.wrong, text, shrunk, calls)


def _suspects(packed: Sequences, result: Result, which: Any) -> list[int]:
    """Sequences that may show the fault alone, the smallest first."""
    some = np.flatnonzero(packed.cells) if isinstance(result, Failure) else np.unique(
        result.wrong.b[which])
    return [int(i) for i in some[np.argsort(packed.cells[some], kind="stable")]]


def isolate(
    packed: Sequences, suspects: List[int], holds: Callable[[List[int]], bool],
    late: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Few sequences that show the fault: one, if one does alone."""
    for i in suspects[:ALONE]:
        if holds([i]):
            return [i]
    left = list(range(len(packed)))
    size = len(left) // 2
    while size and not late():
        parts = [left[i:i + size] for i in range(0, len(left), size)]
        kept = next((part for part in parts if len(part) < len(left) and holds(part)), None)
        if kept is None:
            others = (sorted({*left} - {*part}) for part in parts
                      if len(parts) > 2 and not late())
            kept = next((rest for rest in others if holds(rest)), None)
        if kept is not None:
            left = kept
            size = max(1, len(left) // 2) if len(left) > 1 else 0
        else:
            size //= 2
    return left
