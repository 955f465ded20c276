"""What a run does: fuzz for days, look at a pull request, or make stored cases smaller."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.backends import Outcome
from fuzz.case import Case, CaseError, canonical
from fuzz.findings import checked, document, file_of, path_of, save, stored
from fuzz.investigate import QUICK, signatures
from fuzz.screen import figures
from fuzz.sequences import pack
from fuzz.service import known
from fuzz.service.known import Issue, is_known
from fuzz.service.records import AGAIN, GONE
from fuzz.service.replaying import Result
from fuzz.service.running import KNOWN_SHARE, Running
from fuzz.shrink import shrink
from fuzz.worker import Deadlines, Failure
from spec.from_file import resolve

Document = Mapping[str, Any]
PRUNED = "pruned"
# Seconds that one stored case is made smaller for.
SMALLER = 30.0


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What a `pr` run came to: `new` findings, `regressed` ones, which are to be gone and are not,
    and those that are `known`; `replays` of the latter two; `ran` is what the loop did."""

    new: tuple[Document, ...]
    regressed: tuple[Document, ...]
    known: tuple[Document, ...]
    replays: tuple[Result, ...]
    ran: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        if self.new or self.regressed:
            return 1
        return 0 if self.ran.get("sequences") else 3


def batch(run: Running) -> int:
    """Replays what the folder holds, and fuzzes until the time is over."""
    run.replay(stored(run.campaign.findings), KNOWN_SHARE * run.campaign.budget)
    return run.fuzz()


def pr(run: Running) -> Reviewed:
    """Replays known issues and the regression corpus, then fuzzes; fails on what is new."""
    suite = known.load(run.campaign.known) if run.campaign.known else ()
    corpus = stored(run.campaign.regressions) if run.campaign.regressions else {}
    listed = {issue.fingerprint: issue.document for issue in suite}
    replays = run.replay({**corpus, **listed}, KNOWN_SHARE * run.campaign.budget)
    run.loop.investigator.known |= {name for name, one in stored(run.campaign.findings).items()
                                    if one.get("shrunk")}
    run.loop.run()
    return reviewed(stored(run.campaign.findings), suite, corpus, replays, run.loop.now,
                    run.campaign.baseline)


def reviewed(
    found: Mapping[str, Document], suite: tuple[Issue, ...], corpus: Mapping[str, Document],
    replays: list[Result], ran: Mapping[str, Any], baseline: tuple[str, ...] = (),
) -> Reviewed:
    """Tells what is new from what is known."""
    again = {one.fingerprint for one in replays if one.result == AGAIN}
    listed = {issue.fingerprint: issue.document for issue in suite}
    regressed = {name: one for name, one in corpus.items()
                 if name in again and not is_known(one, suite, baseline)}
    new = [one for name, one in found.items()
           if name not in regressed and not is_known(one, suite, baseline)]
    quiet = {**listed, **{name: one for name, one in found.items() if one not in new}}
    return Reviewed(tuple(new), tuple(regressed.values()),
                    tuple(one for name, one in quiet.items() if name not in regressed),
                    tuple(replays), dict(ran),
                    {issue.fingerprint: issue.reason or issue.state for issue in suite})


def lines_of(found: Reviewed, seconds: float) -> list[str]:
    """What a person is told of a `pr` run."""
    results = {one.fingerprint: one.result for one in found.replays}
    gone = [one for one in found.known if results.get(one["fingerprint"]) == GONE]
    lines = ["; ".join(figures(dict(found.ran), seconds)),
             f"{len(found.known)} known, of which {len(gone)} are gone"]
    for title, some in (("new", found.new), ("regressed", found.regressed)):
        for one in some:
            lines += [f"{title}: {one['kind']} {one['path']}", f"  {one['region']}",
                      f"  {one.get('replay', '')}"]
    return lines if found.new or found.regressed else [*lines, "nothing new"]


def prune(run: Running) -> int:
    """Makes the cases of findings smaller that were left large, or can be smaller by now, and puts
    copies in the regression corpus aside. Exit status 0."""
    folder, run.because = run.campaign.findings, "all cases were looked at"
    for name, given in stored(folder).items():
        left = run.until - time.monotonic()
        if left <= 0 or run.stop():
            run.because = "the time is over before all cases were looked at"
            run.screen.line(run.because)
            break
        run.screen.note(f"{name}: making it smaller")
        text, smaller = smaller_of(run, given, min(left, SMALLER))
        run.screen.line(f"{name}: {text}")
        if smaller is not None:
            run.state.patiently(lambda one=smaller: save(folder, one))
            run.state.add({"findings": {name: 0}})
    if run.campaign.regressions:
        for path in copies(run.campaign.regressions):
            run.screen.line(f"{path.name}: a copy of another, now in {PRUNED}/")
            (path.parent / PRUNED).mkdir(exist_ok=True)
            path.rename(path.parent / PRUNED / path.name)
    return 0


def smaller_of(run: Running, given: Document, seconds: float) -> tuple[str, Document | None]:
    """What became of a finding's case, and the finding with a smaller one if there is one."""
    case, source, signature = checked(given)
    name = run.backend.name
    space = next((one for one in run.loop.spaces if one.call.provider == case.call.provider
                  and path_of(one.call, name) == given["path"]), None)
    if space is None:
        return "it is about no target of this campaign", None
    said: dict[str, Any] = {}
    fails = _failing(run, signature, said)
    if not fails(case):
        return "its replay passes", None
    found = shrink(space, case, fails, seconds, run.stop)
    if canonical(found.case) == canonical(case):
        return "as small as it can be" if found.finished else "nothing smaller was found", None
    result = said[canonical(found.case)]
    wrong = result.wrong if isinstance(result, Outcome) else None
    text = result.text if isinstance(result, Failure) else (
        f"{result.wrong.total} of {result.cells} cells are wrong")
    kept = {key: given[key] for key in ("backend", "device", "seed", "launch", "diagnosis")
            if key in given}
    return (f"{_cells(case)} cells before, {_cells(found.case)} now",
            document(signature, found.case, wrong, text, source, **{
                **kept, "shrunk": found.finished, "shrink_calls": found.calls}))


def _failing(run: Running, signature: Any, said: dict[str, Any]) -> Callable[[Case], bool]:
    worker = run.loop.workers[0]

    def fails(case: Case) -> bool:
        mask, usual = resolve(case.call.spec), worker.deadlines
        try:
            packed = pack(mask, case.sequences)
        except CaseError:
            return False
        worker.deadlines = Deadlines(usual.compile, min(QUICK, usual.run))
        result = said[canonical(case)] = worker.run(case.call, packed, run.stop)
        worker.deadlines = usual
        return signature in signatures(mask, case.call, packed, result, run.backend.name)

    return fails


def _cells(case: Case) -> int:
    return sum(sequence.size for sequence in case.sequences)


def copies(folder: Path) -> list[Path]:
    """Files of findings whose case and fault another file before them has, too."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for name, given in stored(folder).items():
        case, _, signature = checked(given)
        key = canonical(case), signature.kind, signature.region
        if key in seen:
            found.append(file_of(folder, name))
        seen.add(key)
    return found
