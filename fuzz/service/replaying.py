"""Cases of findings run again with the targets of a campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fuzz.backends import Backend
from fuzz.case import Case
from fuzz.findings import checked
from fuzz.investigate import signatures
from fuzz.sequences import pack
from fuzz.service.records import AGAIN, FAILED, GONE
from fuzz.targets import mask_mods
from fuzz.worker import SKIP, Failure, Worker
from kernels.fa4 import VLLM, Call
from kernels.target import Target
from spec.from_file import resolve


@dataclass(frozen=True, slots=True)
class Result:
    """What a finding's case came to with the code of a release: AGAIN, GONE or FAILED."""

    fingerprint: str
    release: str
    result: str
    text: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(slots=True)
class Replayer:
    """Runs cases on a worker of its own; `targets` are a campaign's, by name."""

    backend: Backend
    worker: Worker
    targets: Mapping[str, Target]

    def replay(self, document: Mapping[str, Any], release: str) -> Result | None:
        """Its case with the code of a release; None where that has no such call. Raises
        FindingError."""
        case, _, signature = checked(document)
        call = moved(case, release, mask_mods(self.targets))
        if call is None:
            return None
        name = document["fingerprint"]
        if reason := self.backend.refuses(call):
            return Result(name, release, FAILED, reason)
        mask = resolve(call.spec)
        packed = pack(mask, case.sequences)
        result = self.worker.run(call, packed)
        if isinstance(result, Failure) and result.kind == SKIP:
            return Result(name, release, FAILED, result.text)
        found = signatures(mask, call, packed, result, self.backend.name)
        wanted = signature.kind, signature.region
        again = any((one.kind, one.region) == wanted for one in found)
        text = (f"{result.kind} at {result.stage}: {result.text}" if isinstance(result, Failure)
                else f"{result.wrong.total} of {result.cells} cells are wrong")
        if again or not found:
            return Result(name, release, AGAIN if again else GONE, text)
        # A case that is wrong in another way, or does not run, is not right.
        return Result(name, release, FAILED, f"not this fault, but another: {text}")


def moved(case: Case, release: str, mods: Mapping[str, Target]) -> Call | None:
    """The call of a case with the code of a release, if there is such code: in place of another
    release's mask_mod the one of that name for that mask, or else one of the same family with room
    for the case's ranges."""
    call, name = case.call, case.call.mask_mod
    if name is None:
        return replace(call, provider=release)
    if call.provider == release:
        return call if name in mods else None
    if not (release.startswith(f"{VLLM}-") and name.startswith(f"{VLLM}-")):
        return None
    own = name.partition("/")[2]
    rows = max(len(sequence.tables.get("ranges", ())) for sequence in case.sequences)
    able = [each for each, target in mods.items()
            if each.startswith(f"{release}/") and target.spec == call.spec
            and target.constants.get("num_ranges", rows) >= rows
            and each.partition("/")[2].partition("[")[0] == own.partition("[")[0]]
    if not able:
        return None
    exact = f"{release}/{own}"
    best = exact if exact in able else min(
        able, key=lambda each: (mods[each].constants.get("num_ranges", 0), each))
    return replace(call, provider=release, mask_mod=best)
