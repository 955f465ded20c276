"""`python -m fuzz.bisect FINDING.json --releases A..B`: since when, and until when, it is wrong."""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fuzz.replay import loaded
from fuzz.run import CannotRun, Parser, Usage, expected, positive, said

HELP = """\
A fault in a mask_mod, in flags or in tiles is proved, of each release, on the CPU. Where the fault
is in a mask_mod, the case is run on it as well. What no proof explains is run again with the
kernels of each release, on a GPU: `--repeat` says how often. A release of which nothing can be told
is never good.

examples:
  python -m fuzz.bisect findings/finding-0123456789ab.json --releases 0.24.0..0.33.0
  python -m fuzz.bisect FINDING.json --releases 0.32.0,0.33.0,path/to/a/tree
  python -m fuzz.bisect FINDING.json --releases 0.27.0..0.33.0 --by replay --repeat 100

exit status: 0 it came or went in some release; 1 it did not; 2 bad usage or no sound finding; 3 it
could not be told.
"""
# A proof takes about a second for each release: up to so many are all tried, for a fault may come,
# go, and come again.
MOST = 24
BAD, GOOD, UNDECIDED = "bad", "good", "undecided"
# A flaky fault that would stay away so often by chance is not known to be gone.
CHANCE = 0.05
PROOF, REPLAY = "proof", "replay"
# Seconds for an FA4 to be imported in.
IMPORTING = 120.0


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of one release. `verdict` is that of a proof, or ABSENT; `agrees` says whether
    proof and replay do; `chance` is that of a flaky fault to stay away from as many runs."""

    release: str
    state: str
    verdict: str | None = None
    obligation: str = ""
    diagnosis: str | None = None
    reason: str | None = None
    replay: Mapping[str, Any] | None = None
    agrees: bool | None = None
    chance: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a fault came (`kind` broke) or went (fixed): `before` and `after` are known, releases
    `between` are not."""

    kind: str
    before: str
    after: str
    between: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        verb, last, first = {"fixed": ("fixed", "bad", "good"),
                             "broke": ("broken", "good", "bad")}[self.kind]
        where = " or ".join((*self.between, self.after))
        known = "" if not self.between else f" (nothing is known of {', '.join(self.between)})"
        return (f"{verb} in {where}: {self.before} is the last {last} release, {self.after} the "
                f"first {first} one{known}")


@dataclass(frozen=True, slots=True)
class Bisected:
    """All that was asked, in the order of the releases. `question` is the part of the call that was
    proved, None where the case was run; `home` is what is known of the finding's own release."""

    by: str
    question: str | None
    home: Told
    told: tuple[Told, ...]
    left_out: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = field(default=())

    @property
    def status(self) -> int:
        return 0 if self.edges else 1 if any(t.state != UNDECIDED for t in self.told) else 3

    @property
    def monotone(self) -> bool:
        return len(self.edges) <= 1


def edges(told: Sequence[Told]) -> tuple[Edge, ...]:
    """Every change between neighbours of which something is known."""
    found: list[Edge] = []
    before: Told | None = None
    between: list[str] = []
    for one in told:
        if one.state == UNDECIDED:
            between.append(one.release)
            continue
        if before is not None and before.state != one.state:
            kind = "fixed" if one.state == GOOD else "broke"
            found.append(Edge(kind, before.release, one.release, tuple(between)))
        before, between = one, []
    return tuple(found)


def halved(names: Sequence[str], ask: Callable[[str], Told]) -> dict[str, Told]:
    """Both ends, and by halves what lies between two that differ; what is undecided is passed
    over."""
    told: dict[str, Told] = {}

    def first(indices: Sequence[int]) -> int | None:
        for i in indices:
            told[names[i]] = told.get(names[i]) or ask(names[i])
            if told[names[i]].state != UNDECIDED:
                return i
        return None

    low = first(range(len(names)))
    high = first(range(len(names) - 1, -1, -1))
    if low is None or high is None or told[names[low]].state == told[names[high]].state:
        return told
    while True:
        middle = (low + high) / 2
        inside = sorted(range(low + 1, high), key=lambda i: abs(i - middle))
        found = first(inside)
        if found is None:
            return told
        if told[names[found]].state == told[names[low]].state:
            low = found
        else:
            high = found


def bisect(
    given: Mapping[str, Any], names: Sequence[str], *, by: str = "auto", fast: bool = False,
    repeat: int = 3, note: Callable[[str], None] = lambda text: None,
) -> Bisected:
    """A finding through releases by name. Raises FindingError, Usage or CannotRun."""
    from fuzz.findings import checked

    case, source, signature = checked(given)
    asked = Asked(given, case, source, signature.kind, repeat, note)
    question, at_home = asked.start(by)

    def ask(name: str) -> Told:
        note(f"{name} ({len(done) + 1} of {len(names)})")
        done[name] = asked.of(name, question)
        return done[name]

    done: dict[str, Told] = {}
    if fast:
        halved(names, ask)
    else:
        for name in names:
            ask(name)
    told = tuple(done[name] for name in names if name in done)
    return Bisected(REPLAY if question is None else PROOF, question, at_home, told,
                    tuple(name for name in names if name not in done), edges(told))


@dataclass(slots=True)
class Asked:
    """A finding, of which each release is asked the same. `rate` is the share of runs in which it
    shows where it is from."""

    given: Mapping[str, Any]
    case: Any
    source: Any
    kind: str
    repeat: int
    note: Callable[[str], None]
    rate: float = 1.0

    def start(self, by: str) -> tuple[str | None, Told]:
        """The part of the call to be proved, None for a replay; and what is known where the
        finding is from."""
        from fuzz.questions import explaining, home, opened
        from kernels.fa4 import Fa4Error

        try:
            place = home(self.source, self.case.call)
        except Fa4Error as error:
            raise CannotRun(str(error)) from None
        told: Mapping[str, Any] = {}
        if by != REPLAY and find_spec("z3") is not None:
            with opened(place, self.source) as at:
                question, told = explaining(self.case, self.kind, place, at, self.note)
                if question is not None:
                    return question, self._proved(place, at, question, told[question])
        elif by == PROOF:
            raise CannotRun("z3 is not installed, and nothing can be proved: install z3-solver")
        if by == PROOF:
            raise CannotRun(f"no proof about {place.name} explains the finding: {_list(told)}")
        return None, self._at_home(place, told)

    def _at_home(self, place: Any, told: Mapping[str, Any]) -> Told:
        from fuzz.backends import has_gpu
        from fuzz.questions import opened

        if self.given["backend"] == "gpu" and not has_gpu():
            why = f"; no proof explains the finding: {_list(told)}" if told else ""
            raise CannotRun("the case has to be run with the kernels of each release, and there is "
                            f"no GPU here (no /dev/nvidia*){why}")
        with opened(place, self.source) as at:
            found = self._run(place, at)
        if found.replay is None:
            raise CannotRun(f"{place.name}: {found.reason}")
        self.rate = found.replay["faulty"] / found.replay["runs"]
        if not self.rate:
            raise CannotRun(f"the case is right in {self.repeat} of {self.repeat} runs where it "
                            f"was found, on {place.name}: raise --repeat")
        return found

    def of(self, name: str, question: str | None) -> Told:
        """What is known of a release by its version or path."""
        from fuzz.questions import Place, opened
        from fuzz.releases import release
        from kernels.fa4 import VLLM, Fa4Error
        from kernels.release import ReleaseError
        from kernels.vllm import VllmError

        begun = time.monotonic()
        shown = f"{VLLM}-{name}" if name[:1].isdigit() else name
        try:
            files = release(name, self.note)
            place = Place(files.name if shown != name else name, files)
            with opened(place, self.source) as at:
                found = self._run(place, at) if question is None else \
                    self._proved(place, at, question)
        except (ReleaseError, Fa4Error, VllmError) as error:
            found = Told(shown, UNDECIDED, "UNSUPPORTED", reason=str(error))
        except Exception as error:  # one release that cannot be taken apart hides no other
            found = Told(shown, UNDECIDED, "ERROR", reason=f"{type(error).__name__}: {error}")
        return replace(found, seconds=round(time.monotonic() - begun, 3))

    def _proved(self, place: Any, at: Any, question: str, known: Any = None) -> Told:
        from fuzz.questions import ABSENT, PROVED, QUESTIONS, Answer

        answer = known or QUESTIONS[question](self.case, self.kind, place, at) or Answer(ABSENT)
        state = {True: GOOD, False: BAD, None: UNDECIDED}[answer.good]
        found = Told(place.name, state, answer.verdict, answer.obligation, answer.diagnosis,
                     answer.reason or None)
        if question != "mask_mod" or answer.good is None:
            return found
        ran = self._run(place, at, backend="cpu", repeat=1)
        if ran.replay is None:
            found = replace(found, replay=None, reason=f"not run: {ran.reason}")
            return self._as_given(place, at, found) if found.state == GOOD else found
        agrees = (ran.state == GOOD) == answer.good
        reason = found.reason
        if not agrees and answer.verdict == PROVED:
            state, reason = UNDECIDED, "proof and replay disagree: proved, and the case is wrong"
        elif not agrees:
            reason = "proof and replay disagree: refuted, and the finding's own case is right there"
        return replace(found, state=state, reason=reason, replay=ran.replay, agrees=agrees)

    def _as_given(self, place: Any, at: Any, found: Told) -> Told:
        """A right mask_mod says nothing of the flags beside it, of which a case that is not run
        shows nothing either."""
        from fuzz.questions import QUESTIONS

        answer = QUESTIONS["flags"](self.case, self.kind, place, at)
        if answer is None or answer.good:
            return found
        state = BAD if answer.good is False else UNDECIDED
        return replace(found, state=state, verdict=answer.verdict, obligation=answer.obligation,
                       diagnosis=answer.diagnosis, reason=answer.reason or found.reason)

    def _run(self, place: Any, at: Any, backend: str | None = None, repeat: int = 0) -> Told:
        """The case with the mask_mod and the kernels of a place, run `repeat` times."""
        from fuzz.replay import replay

        backend, repeat = backend or self.given["backend"], repeat or self.repeat
        moved = self._moved(place, at, backend)
        if isinstance(moved, str):
            return Told(place.name, UNDECIDED, "ABSENT", reason=moved)
        try:
            found = replay(moved, backend=backend, repeat=repeat)
        except CannotRun as error:
            return Told(place.name, UNDECIDED, "UNSUPPORTED", reason=str(error))
        counts = {name: getattr(found, name)
                  for name in ("runs", "seen", "faulty", "wrong", "cells")}
        reason = "another fault than the finding's" if found.faulty and not found.seen else None
        if found.faulty:
            return Told(place.name, BAD, reason=reason, replay=counts)
        chance = (1 - self.rate) ** repeat
        if chance <= CHANCE:
            return Told(place.name, GOOD, replay=counts, chance=chance)
        return Told(place.name, UNDECIDED, replay=counts, chance=chance, reason=(
            f"a fault in {self.rate:.0%} of runs stays away from {repeat} with a chance of "
            f"{chance:.0%}: raise --repeat"))

    def _moved(self, place: Any, at: Any, backend: str) -> dict[str, Any] | str:
        """The finding with the mask_mod and the kernels of a place, or why it has none."""
        from fuzz.case import to_json
        from fuzz.questions import alike
        from fuzz.targets import provider_of
        from kernels.fa4 import UPSTREAM, release_of

        call, source = self.case.call, self.source
        if place.release is None:
            return dict(self.given)
        if provider_of(call.mask_mod or "") != UPSTREAM:
            target = alike(self.case, at.targets, place)
            if target is None or target.unsupported:
                return (target and target.unsupported) or f"{place.name} has no such mask_mod"
            call = replace(call, mask_mod=target.target)
            source = replace(source, vllm=str(place.release.root))
        own = place.release.root.resolve()
        if backend == "gpu" and release_of(place.release.name).root.resolve() != own:
            return f"kernels are taken from $VLLM_TREES/<version>, not from {own}"
        if backend == "gpu" and (why := not_its_own(place.release.name)):
            return why
        call = replace(call, provider=place.release.name)
        return {**self.given, "case": to_json(replace(self.case, call=call)),
                "source": asdict(source)}


def not_its_own(name: str) -> str | None:
    """Why the kernels that run under a release's name are not its own; None where they are. Where
    its FA4 does not import with the compiler at hand, that of another release takes its place."""
    from kernels.fa4 import provider
    from kernels.run_cute import CannotRun, in_child

    shared = mmap.mmap(-1, mmap.PAGESIZE)

    def work() -> None:
        with provider(name) as found:
            shared.write(found.fa4.encode())

    try:
        in_child(work, IMPORTING)
    except CannotRun as error:
        return f"the kernels of {name} do not import: {error}"
    found = shared[:].rstrip(b"\0").decode()
    return None if found == f"FA4 of {name}" else (
        f"the FA4 of {name} does not import with the compiler at hand: its kernels cannot be run")


def _list(told: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {answer.verdict}" for name, answer in told.items()) or "none applies"


def document(given: Mapping[str, Any], found: Bisected) -> dict[str, Any]:
    """The outcome as JSON. Of several edges of a kind the names are those of the last."""
    from fuzz.findings import versions

    last = {edge.kind: edge for edge in found.edges}
    fixed, broke = last.get("fixed"), last.get("broke")
    return {
        "schema": 1, "fingerprint": given["fingerprint"], "kind": given["kind"],
        "path": given["path"], "region": given["region"], "by": found.by,
        "question": found.question, "home": asdict(found.home),
        "releases": [asdict(one) for one in found.told], "left_out": list(found.left_out),
        "edges": [{**asdict(edge), "sentence": edge.sentence} for edge in found.edges],
        "monotone": found.monotone, "last_bad": fixed and fixed.before,
        "first_good": fixed and fixed.after, "last_good": broke and broke.before,
        "first_bad": broke and broke.after, "status": found.status, "versions": versions(),
    }


def lines(given: Mapping[str, Any], found: Bisected) -> list[str]:
    """What a person reads: the question, a table, and where the fault came or went."""
    if found.question is None:
        asked = "run again"
    else:
        asked = f"proved: {found.question}; {found.home.obligation} is {found.home.verdict}"
    rows = [("release", "state", "verdict", "replay", "diagnosis"),
            *(_row(one) for one in found.told)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in rows]
    return [f"{given['kind']} {given['fingerprint']}: {given['path']}", f"  {given['region']}",
            f"  {asked}", "", *table, "", *_conclusion(found)]


def _row(one: Told) -> tuple[str, ...]:
    said = "; ".join(part for part in (one.diagnosis, one.reason) if part)
    return one.release, one.state, one.verdict or "", _ran(one.replay), said


def _ran(replay: Mapping[str, Any] | None) -> str:
    if replay is None:
        return ""
    cells = f"{replay['wrong']} of {replay['cells']} cells" if replay["cells"] is not None else \
        "no end"
    return cells if replay["runs"] == 1 else f"{replay['faulty']} of {replay['runs']} runs"


def _conclusion(found: Bisected) -> list[str]:
    said = [edge.sentence for edge in found.edges]
    states = {one.state for one in found.told} - {UNDECIDED}
    if not found.monotone:
        said.insert(0, f"not monotone: it changes {len(found.edges)} times")
    if len(states) == 1:
        (state,) = states
        known = sum(one.state == state for one in found.told)
        said.append(f"{state} in every release that is known ({known} of "
                    f"{len(found.told) + len(found.left_out)})")
    if not states:
        said.append("nothing is known of any of these releases")
    if found.left_out:
        said.append(f"not asked: {', '.join(found.left_out)} (--all asks every one)")
    said += [f"{one.release}: {one.reason}" for one in (*found.told, found.home)
             if one.agrees is False]
    return list(dict.fromkeys(said))


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.bisect", epilog=HELP, allow_abbrev=False,
        description="Find the release in which a finding came, and the one in which it went.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("finding", type=Path, help="finding-<fingerprint>.json")
    add("--releases", required=True, metavar="A..B",
        help="versions from A to B; or some, wheels and trees too, with commas between, in order")
    add("--by", choices=("auto", PROOF, REPLAY), default="auto",
        help="auto: by proof, and what no proof explains by replay (default)")
    which = found.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help=f"every release, also above {MOST}")
    which.add_argument("--fast", action="store_true",
                       help="by halves: may miss a fault that comes and goes between")
    add("--repeat", type=positive, default=3, metavar="N",
        help="runs of a replay, for flaky faults (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the outcome as JSON")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(arguments))
    except Exception as error:
        status = 3 if type(error).__name__ == "Fa4Error" else expected(error)
        if status is None:
            raise
        return said(status, str(error), "fuzz.bisect")
    except KeyboardInterrupt:
        return said(3, "interrupted", "fuzz.bisect")


def run(options: argparse.Namespace) -> int:
    from fuzz.releases import RangeError, named
    from fuzz.screen import Screen

    screen = Screen()
    given = loaded(options.finding)
    try:
        names = named(options.releases, screen.line)
    except RangeError as error:
        raise Usage(f"--releases: {error}") from None
    if options.json is not None:
        try:
            options.json.open("a").close()
        except OSError as error:
            raise CannotRun(f"{options.json}: {error.strerror}") from None
    fast = options.fast or len(names) > MOST and not options.all
    found = bisect(given, names, by=options.by, fast=fast, repeat=options.repeat, note=screen.note)
    screen.note("")
    if options.json is not None:
        options.json.write_text(json.dumps(document(given, found), indent=1) + "\n")
    sys.stdout.write("\n".join(lines(given, found)) + "\n")
    return found.status


if __name__ == "__main__":
    sys.exit(main())
