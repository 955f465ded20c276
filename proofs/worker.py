"""A part of a check, done by the compiler of the environment whose interpreter runs this file.

The request is JSON on the standard input: the folder of a release and what to prove of it. Answers
are lines of JSON: `progress` texts, then `records`, or `refused` with the reason. What a compiler
prints goes to the standard error.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    request = json.load(sys.stdin)
    place_project()
    end_with(request["parent"])
    if why := unfit(request):
        answer(refused=why)
    else:
        answer(records=records(request, lambda text: answer(progress=text)))


def place_project() -> None:
    """This project is found after the environment's own packages, and before all others: neither
    the installed compiler nor another copy of the project is taken for these."""
    own = Path(sys.prefix).resolve()
    first = next((i for i, place in enumerate(sys.path)
                  if Path(place).name in ("site-packages", "dist-packages")
                  and own not in Path(place).resolve().parents), len(sys.path))
    sys.path.insert(first, str(PROJECT))


def end_with(parent: int) -> None:
    """Ends this process when its parent ends. Ctrl-C is for the parent, which ends this one."""
    from proofs.layers import end_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)


def unfit(request: Mapping[str, Any]) -> str:
    """Why what is here is not what was asked for; empty where it is."""
    import cutlass

    from kernels import release
    from proofs import compilers
    from proofs.report import versions

    if Path(sys.prefix).resolve() not in Path(cutlass.__file__).resolve().parents:
        return f"cutlass was imported from {cutlass.__file__}"
    if why := compilers.differs(request["pins"]):
        return why
    solver = versions()["z3-solver"]
    if solver != request["solver"]:
        return f"z3-solver {request['solver']} is wanted and {solver} is there"
    return compilers.refusal(release.find(request["root"]), request["layers"])


def records(request: Mapping[str, Any], announce: Callable[[str], None]) -> list[Record]:
    """Records that say which compiler they come from."""
    from proofs import compilers
    from proofs.checks import Options
    from proofs.obligation import Limits

    given = request["options"]
    limits = Limits(given["rlimit"], given["timeout"],
                    Path(given["smtlib"]) if given["smtlib"] else None)
    options = Options(limits, tuple(given["obligations"]), given["thorough"], given["constants"])
    found = [*_mask_mods(request, options, announce), *_surroundings(request, options, announce)]
    here = compilers.versions()
    named = ", ".join(" ".join(pair) for pair in here.items())
    return [{**one, "fa4": f"{one['fa4'] or request['own']}, compiled by {named}",
             "extra": {**one["extra"], "versions": here}} for one in found]


def _mask_mods(
    request: Mapping[str, Any], options: Any, announce: Callable[[str], None]
) -> list[Record]:
    from proofs.checks import check
    from proofs.replay import gather
    from proofs.report import record
    from spec.from_file import resolve
    from spec.screen import call

    if "mask_mod" not in request["layers"]:
        return []
    with gather(vllm=request["root"]) as targets:
        return [record(row, call(row.result.obligation.target, request["source"]))
                for row in check(targets, resolve, options, announce)]


def _surroundings(
    request: Mapping[str, Any], options: Any, announce: Callable[[str], None]
) -> list[Record]:
    from kernels import release
    from kernels.provider import of_release
    from proofs.layers import check, units

    layers = [layer for layer in request["layers"] if layer != "mask_mod"]
    if not layers:
        return []
    provider = of_release(release.find(request["root"]))
    cache = Path(request["cache"]) if request["cache"] else None
    return check(units(provider, layers, full=request["full"]), options, announce, cache)


if __name__ == "__main__":
    main()
