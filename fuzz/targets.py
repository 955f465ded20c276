"""The real mask_mods that a campaign or a finding is about, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kernels.fa4 import Call
from kernels.target import Target
from spec.from_file import resolve

OWN, GENERATED = "maskproof/", "generated/"


class TargetError(Exception):
    """A target that is not there; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where targets come from: a release, the project itself, or files (`path.py::name`)."""

    vllm: str | None = None
    fa4: str | None = None
    targets: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    against: str = "full"
    aux: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()


def source_from(given: Mapping[str, Any]) -> Source:
    return Source(**{name: tuple(value) if isinstance(value, list) else value
                     for name, value in given.items()})


@contextmanager
def gathered(source: Source, progress: Any = None) -> Iterator[dict[str, Target]]:
    """The targets by name, usable inside the scope."""
    from proofs.replay import gather

    with gather(
        source.targets, vllm=source.vllm, fa4=source.fa4, call=source.call,
        against=source.against, aux=source.aux, progress=progress,
    ) as found:
        made = [generated(text) for text in source.generated]
        yield {target.target: target for target in [*found, *made]}


def generated(text: str) -> Target:
    """A mask_mod made from the formula of a mask."""
    from proofs.generated import constants_of, target

    mask = resolve(text)
    made = target(mask, mask.formula, f"{GENERATED}{text}", constants_of(mask))
    return replace(made, spec=text)


def is_file(text: str) -> bool:
    return ":" in text


def chosen(
    found: Mapping[str, Target], named: Sequence[str], specs: Sequence[str]
) -> dict[str, Target]:
    """The targets that a person names; without names every one that is not known to be bad.
    Raises TargetError for a name that no target has."""
    if not named:
        return {name: target for name, target in found.items()
                if not target.expected and (not specs or target.spec in specs)}
    kept = {}
    for text in named:
        full = next((name for name in found if text in (name, name.partition("/")[2])), None)
        if full is None:
            raise TargetError(f"no target {text!r}; there are {', '.join(found)}")
        if specs and found[full].spec not in specs:
            raise TargetError(f"{full} is to compute {found[full].spec}, not {' or '.join(specs)}")
        kept[full] = found[full]
    return kept


def call_of(target: Target, arch: str) -> Call:
    """The plainest call with this mask_mod."""
    top = target.target.partition("/")[0]
    provider = top if top.startswith("vllm-") else "upstream"
    constants = {k: v for k, v in target.constants.items() if k != "num_ranges"}
    return Call(provider=provider, spec=target.spec, mask_mod=target.target, arch=arch,
                params=constants)
