"""What a loop draws for: the targets of one source or several, each with its own ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fuzz.backends import Backend
from fuzz.case import DERIVED, stated
from fuzz.strategies import Space
from fuzz.targets import Source, TargetError, in_turn
from kernels.fa4 import Call
from kernels.target import Target
from spec.from_file import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Targets of one source: `longest` keys in a sequence, parameters in `ranges`, both ends
    included."""

    source: Source
    targets: Mapping[str, Target]
    longest: int = 512
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def spaces_of(
    parts: Sequence[Part], arch: str, backend: Backend
) -> tuple[list[Space], dict[str, int]]:
    """What is drawn for each target, of every part in turn; and how many calls cannot run here,
    by reason. Raises TargetError."""
    refused: dict[str, int] = {}
    each = [_spaces(part, arch, backend, refused) for part in parts]
    return [space for row in zip_longest(*each) for space in row if space is not None], refused


def _spaces(
    part: Part, arch: str, backend: Backend, refused: dict[str, int]
) -> Iterator[Space]:
    for target, call in in_turn(part.targets.values(), arch, gpu=backend.name == "gpu"):
        if reason := backend.refuses(call) or _outside(call, part.ranges):
            why = f"{target.target}: {reason}"
            refused[why] = refused.get(why, 0) + 1
            continue
        mask = resolve(target.spec)
        has = {*stated(mask), *DERIVED, *mask.params}
        for table in (name for layout in target.layouts for name in layout if name not in has):
            raise TargetError(f"--aux {table}: {target.spec} has no such table or parameter; "
                              f"it has {', '.join(sorted(has))}")
        yield Space(
            call=call, mask=mask, constants={**target.constants, **call.params},
            domain=backend.domain(call), longest=part.longest, source=part.source,
            ranges={name: ends for name, ends in part.ranges.items() if name in mask.params},
        )


def _outside(call: Call, ranges: Mapping[str, tuple[int, int]]) -> str | None:
    """Why a call has a compiled-in parameter that is not asked for."""
    for name, (low, high) in ranges.items():
        if not low <= call.params.get(name, low) <= high:
            return f"{name}={call.params[name]} is compiled in, outside of {low} to {high}"
    return None
