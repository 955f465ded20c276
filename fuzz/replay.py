"""`python -m fuzz.replay FINDING.json`: run the case of a finding again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fuzz.run import ARCHES, CannotRun, Parser, Usage, expected, said

HELP = """\
exit status: 1 the finding is there again, or another fault; 0 it is gone; 2 bad usage or no sound
finding; 3 it could not run.
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a case comes to now: whether the finding is there again, and all that is wrong.

    Of `runs` the finding was there in `seen`, and something was wrong in `faulty`. `wrong` cells of
    `cells` are those of the run that is told; None where it did not come to an end."""

    again: bool
    text: str
    runs: int = 1
    seen: int = 0
    faulty: int = 0
    wrong: int | None = None
    cells: int | None = None


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.replay", epilog=HELP, allow_abbrev=False,
        description="Run the case of a finding again, and compare.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("finding", type=Path, help="finding-<fingerprint>.json")
    add("--backend", choices=("auto", "cpu", "gpu"), help="default: the one it was found with")
    add("--provider", metavar="NAME",
        help="other kernels: upstream, or a release as vllm-0.33.0; the mask_mod stays")
    add("--arch", choices=ARCHES, help="another code path")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        given = loaded(options.finding)
        return replay_document(given, backend=options.backend, provider=options.provider,
                               arch=options.arch)
    except Exception as error:
        if (status := expected(error)) is None:
            raise
        return said(status, str(error), "fuzz.replay")
    except KeyboardInterrupt:
        return said(3, "interrupted", "fuzz.replay")


def loaded(path: Path) -> dict[str, Any]:
    from fuzz.findings import FindingError, load

    try:
        return load(path)
    except FindingError as error:
        raise Usage(str(error)) from None


def replay_document(given: Mapping[str, Any], **changes: str | None) -> int:
    """Replays a finding, writes what became of it, and returns the exit status."""
    found = replay(given, **changes)
    sys.stdout.write(found.text + "\n")
    return 1 if found.faulty else 0


def replay(
    given: Mapping[str, Any], *, backend: str | None = None, provider: str | None = None,
    arch: str | None = None, repeat: int = 1,
) -> Replayed:
    """The case of a finding, run again `repeat` times. Raises FindingError, Usage or CannotRun."""
    from fuzz.backends import take
    from fuzz.findings import checked
    from fuzz.investigate import signatures
    from fuzz.sequences import pack
    from fuzz.targets import gathered
    from fuzz.worker import SKIP, Deadlines, Failure, Worker
    from spec.from_file import resolve

    case, source, signature = checked(given)
    if provider is not None and provider != "upstream" and not provider.startswith("vllm-"):
        raise Usage(f"--provider {provider}: write upstream, or a release as vllm-0.33.0")
    call = replace(case.call, **{name: value for name, value in
                                 (("provider", provider), ("arch", arch)) if value is not None})
    with gathered(source) as targets:
        device = take(backend or given["backend"], targets)
        if reason := device.refuses(call):
            raise CannotRun(reason)
        mask = resolve(call.spec)
        packed = pack(mask, case.sequences)
        worker = Worker(device, Deadlines(run=20.0))
        results = [worker.run(call, packed) for _ in range(repeat)]
        worker.stop()
        for result in results:
            if isinstance(result, Failure) and result.kind == SKIP:
                raise CannotRun(result.text)
        each = [signatures(mask, call, packed, result, device.name) for result in results]
    wanted = signature.kind, signature.region
    there = [any((one.kind, one.region) == wanted for one in found) for found in each]
    told = there.index(True) if any(there) else -1
    result = results[told]
    ended = not isinstance(result, Failure)
    return Replayed(
        any(there), described(given, result, list(each[told]), any(there), device.device),
        repeat, sum(there), sum(map(bool, each)), result.wrong.total if ended else None,
        result.cells if ended else None)


def described(
    given: Mapping[str, Any], result: Any, found: list[Any], again: bool, device: str
) -> str:
    from fuzz.worker import Failure

    lines = [f"{given['kind']} {given['fingerprint']} on {device}: "
             f"{'there again' if again else 'another fault' if found else 'gone'}",
             f"  {given['path']}", f"  {given['region']}"]
    if isinstance(result, Failure):
        lines.append(f"  {result.kind} at {result.stage}: {result.text}")
    else:
        lines.append(f"  {result.wrong.total} of {result.cells} cells are wrong")
    lines += [f"  {one.kind}: {one.region}" for one in found if not again]
    if again and "picture" in given:
        lines += ["", *("  " + line for line in given["picture"])]
    if again and given.get("diagnosis"):
        lines.append(f"  diagnosis: {given['diagnosis']['sentence']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
