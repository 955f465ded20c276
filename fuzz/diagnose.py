"""Names a fault by the variation of the spec that the code provably equals, where z3 is there."""

from __future__ import annotations

import importlib.util
import json
import mmap
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.target import Target

ROOM = 2**16
# Seconds for one target; most take one to three.
MOST = 20.0


@dataclass(slots=True)
class Diagnoses:
    """One diagnosis for each target, made when it is first asked for, in a child process."""

    targets: Mapping[str, Target]
    made: dict[str, dict[str, str] | None] = field(default_factory=dict)

    def of(self, name: str | None, seconds: float) -> dict[str, str] | None:
        if name is None or name not in self.targets or importlib.util.find_spec("z3") is None:
            return None
        if name not in self.made:
            self.made[name] = _diagnosed(self.targets[name], min(seconds, MOST))
        return self.made[name]


def _diagnosed(target: Target, seconds: float) -> dict[str, str] | None:
    from kernels.run_cute import CannotRun, in_child

    shared = mmap.mmap(-1, ROOM)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        said = _sentence(target)
        if said is not None and len(text := json.dumps(said).encode()) < ROOM:
            shared.write(text)

    try:
        in_child(work, seconds)
    except CannotRun:
        return None
    text = shared[:].rstrip(b"\0")
    return json.loads(text) if text else None


def _sentence(target: Target) -> dict[str, str] | None:
    from proofs.checks import Options, check
    from spec.from_file import resolve

    options = Options(obligations=("equals-spec", "reads-in-bounds"))
    for row in check([target], resolve, options):
        if row.diagnosis is not None:
            return {"sentence": row.diagnosis.sentence, "variation": row.diagnosis.variation,
                    "verdict": row.diagnosis.verdict.value,
                    "obligation": row.result.obligation.name}
    return None
