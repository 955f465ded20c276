"""What a verdict rests on, for every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from proofs.obligation import Obligation, Result, Verdict
from spec.term import sym


class Disagreement(Exception):
    """The real code and the terms lifted from it differ: nothing that follows can be believed."""


def counted(result: Result) -> Result:
    """A proof counts only beside a mutant that it could have passed and did not."""
    if result.verdict is Verdict.PROVED and not result.killed:
        return replace(result, verdict=Verdict.UNKNOWN,
                       reason="the claim holds, but no cell was found that shows a mutant wrong")
    return result


def resting(results: Sequence[Result], on: Mapping[str, Sequence[str]]) -> Iterator[Result]:
    """The results, each as good as those of the obligations that `on` says it rests on: one in
    unbounded integers is about the code only where nothing overflows, for example."""
    proved: dict[str, bool] = {}
    for result in results:
        name = result.obligation.name
        proved[name] = proved.get(name, True) and result.verdict is Verdict.PROVED
    for result in results:
        missing = [name for name in on.get(result.obligation.name, ()) if not proved.get(name)]
        if result.verdict is Verdict.PROVED and missing:
            why = f"shown in unbounded integers, but {missing[0]} is not proved"
            result = replace(result, verdict=Verdict.UNKNOWN, killed=0, reason=why)
        yield result


def undecided(
    target: str, name: str, spec: str, verdict: Verdict, reason: str, *, layer: str, arch: str
) -> Result:
    """Of an obligation that could not even be stated."""
    nothing = Obligation(target=target, name=name, spec=spec, claim=sym("?") < 0, assumptions=(),
                         bounds="none", layer=layer, arch=arch)
    return Result(nothing, verdict, reason=reason)
