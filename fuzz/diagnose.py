"""Names a fault by what the code provably does in place of the spec, where z3 is there.

`python -m fuzz.diagnose FINDING.json ...` writes the diagnosis into findings that were made where
it is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.questions import KINDS, Opened, Place, has_flags, home, opened
from fuzz.targets import Source
from kernels.fa4 import Call
from kernels.target import Target

if TYPE_CHECKING:
    from proofs.checks import Row

ROOM = 2**16
# Seconds for one target or call; most take one to three.
MOST = 20.0
Said = dict[str, str]


@dataclass(slots=True)
class Diagnoses:
    """One diagnosis for each target or call, made when it is first asked for, in a child process.
    `source` is where the targets come from."""

    targets: Mapping[str, Target]
    made: dict[str, Said | None] = field(default_factory=dict)
    source: Source = Source()

    def of_call(self, call: Call, seconds: float) -> Said | None:
        """Of a call: what its flags come to in the kernel, or else what its mask_mod does."""
        if not has_flags(call) or importlib.util.find_spec("z3") is None:
            return self.of(call.mask_mod, seconds)
        key = repr(call)
        if key not in self.made:
            self.made[key] = _diagnosed(lambda: self._flags(call), min(seconds, MOST))
        return self.made[key] or self.of(call.mask_mod, seconds)

    def of(self, name: str | None, seconds: float) -> Said | None:
        """Of a target by name."""
        if name is None or name not in self.targets or importlib.util.find_spec("z3") is None:
            return None
        if name not in self.made:
            target = self.targets[name]
            self.made[name] = _diagnosed(lambda: _sentence(_of_target(target)), min(seconds, MOST))
        return self.made[name]

    def _flags(self, call: Call) -> Said | None:
        from proofs.given_call import of_call

        def said(at: Opened) -> Said | None:
            if isinstance(at.provider, str):
                return None
            return _sentence(of_call(at.provider, call, at.targets.get(call.mask_mod or "")))

        place: Place = home(self.source, call)
        if place.release is None:
            from kernels.provider import installed

            return said(Opened(installed(), self.targets))
        with opened(place, self.source) as at:
            return said(at)


def _diagnosed(ask: Callable[[], Said | None], seconds: float) -> Said | None:
    from kernels.run_cute import CannotRun, in_child

    shared = mmap.mmap(-1, ROOM)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        said = ask()
        if said is not None and len(text := json.dumps(said).encode()) < ROOM:
            shared.write(text)

    try:
        in_child(work, seconds)
    except CannotRun:
        return None
    text = shared[:].rstrip(b"\0")
    return json.loads(text) if text else None


def _of_target(target: Target) -> Iterable[Row]:
    from proofs.checks import Options, check
    from spec.from_file import resolve

    options = Options(obligations=("equals-spec", "reads-in-bounds"))
    return check([target], resolve, options)


def _sentence(rows: Iterable[Row]) -> Said | None:
    for row in rows:
        if row.diagnosis is not None:
            return {"sentence": row.diagnosis.sentence, "variation": row.diagnosis.variation,
                    "verdict": row.diagnosis.verdict.value,
                    "obligation": row.result.obligation.name}
    return None


def diagnosis(given: Mapping[str, Any], seconds: float = MOST) -> Said | None:
    """What is behind a finding. Raises FindingError, or what `gathered` does."""
    from fuzz.findings import checked
    from fuzz.targets import gathered, mask_mods

    case, source, signature = checked(given)
    if not any(signature.kind in kinds for kinds in KINDS.values()):
        return None
    with gathered(source) as found:
        return Diagnoses(mask_mods(found), source=source).of_call(case.call, seconds)


HELP = """\
exit status: 0 each has a diagnosis; 1 nothing that can be proved explains one; 2 bad usage or no
sound finding; 3 it could not run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    from fuzz.replay import loaded
    from fuzz.run import CannotRun, Parser, expected, said
    from fuzz.state import write

    parser = Parser(prog="python -m fuzz.diagnose", epilog=HELP, allow_abbrev=False,
                    description="Prove what is behind findings, and write it into them.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("findings", type=Path, nargs="+", help="finding-<fingerprint>.json")
    status = 0
    try:
        for path in parser.parse_args(arguments).findings:
            given = loaded(path)
            if importlib.util.find_spec("z3") is None:
                raise CannotRun("z3 is not installed, and nothing can be proved")
            found = diagnosis(given)
            status = status if found else 1
            if found:
                write(path, json.dumps({**given, "diagnosis": found}, indent=1) + "\n")
            sys.stdout.write(f"{path}: {found['sentence'] if found else 'nothing explains it'}\n")
    except Exception as error:
        if (told := expected(error)) is None:
            raise
        return said(told, str(error), "fuzz.diagnose")
    return status


if __name__ == "__main__":
    sys.exit(main())
