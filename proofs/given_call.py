"""The obligation of one call of FA4 as it is given: its flags, its numbers, its mask_mod.

`proofs.dispatch` speaks of the calls that a release makes; here a call is asked about that anyone
may make, with every parameter a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.dispatch import NEGATIVE, Effective, Flags, of_flags
from kernels.fa4 import Call
from kernels.forward import along
from kernels.from_cute import Lifted, lift
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.stand_in import explore
from kernels.target import Target
from proofs import mask_mod
from proofs.calls import GROUPS, Case, groups
from proofs.checks import REAL, TERM_ONLY, Options, Row
from proofs.dispatch import (
    LAYER,
    Subject,
    _again,
    _no_bound,
    compare_elements,
    failed,
    of_subject,
    subject_of,
)
from proofs.element_replay import Disagreement
from proofs.obligation import Limits, Verdict, prove
from spec.domain import BOTTOM_RIGHT
from spec.from_file import resolve
from spec.masks import Mask
from spec.term import Term, not_, sym

# The mask does not depend on how many keys a table of ranges has room for.
ROWS = 2


def flags_of(call: Call) -> Flags:
    return Flags(call.causal, call.window_size_left, call.window_size_right, call.dynamic_causal,
                 call.mask_mod is not None)


def of_call(
    provider: Provider, call: Call, target: Target | None, options: Options = Options()
) -> list[Row]:
    """The rows of a call, whose mask_mod is `target`. The provider is served."""
    name = f"{provider.name}/{LAYER}/{flags_of(call)}"
    try:
        case = case_of(provider, call, target, options.limits)
        subject = subject_of(name, [case], _again(provider), options.limits)
        real = options.thorough and compare_elements(provider, subject)
        found = list(of_subject(provider, subject, options))
        if NEGATIVE in (call.window_size_left, call.window_size_right):
            found = [_explained(row, subject, options) for row in found]
    except CannotLift as refusal:
        return [failed(name, call.spec, Verdict.UNSUPPORTED, str(refusal))]
    except Disagreement as error:
        return [failed(name, call.spec, Verdict.ERROR, str(error))]
    return [replace(row, replayed=REAL if real else TERM_ONLY) for row in found]


def _explained(row: Row, subject: Subject, options: Options) -> Row:
    """What -1 for no bound is taken for."""
    if row.result.verdict is not Verdict.REFUTED:
        return row
    case = subject.cases[0]
    empty = prove(subject.obligation("effective-mask", not_(case.got)), options.limits).verdict
    return replace(row, diagnosis=_no_bound(case, empty))


def case_of(provider: Provider, call: Call, target: Target | None, limits: Limits) -> Case:
    """The mask that the call compiles beside the one that it claims; raises CannotLift."""
    mask, constants = resolve(call.spec), dict(call.params)
    found = explore(lambda paths: of_flags(provider, flags_of(call), paths))
    called = any(one.mask is None for _, one in found)
    if "num_ranges" in mask.params:
        constants["num_ranges"] = ROWS
    if not called:
        return Case(str(flags_of(call)), mask, tuple(
            (condition, one, BOTTOM_RIGHT(one.mask)) for condition, one in found), constants)
    if target is None:
        raise CannotLift(f"{call.mask_mod} is not at hand")
    own = lifted(target, mask, {**constants, **target.constants}, limits)
    layout = own.layout
    return Case(str(flags_of(call)), mask.given(layout), tuple(
        (condition, one, _mask(one, own)) for condition, one in found
    ), {**constants, **target.constants}, (own,))


def _mask(one: Effective, own: Lifted) -> Term:
    return own.lanes[0] if one.mask is None else BOTTOM_RIGHT(one.mask)


def lifted(target: Target, mask: Mask, constants: Mapping[str, int], limits: Limits) -> Lifted:
    """A mask_mod in the symbols of the spec, with every constant a number; raises CannotLift."""
    if target.unsupported is not None:
        raise CannotLift(target.unsupported)
    found = lift(target)
    if len(found.lanes) != 1:
        raise CannotLift(f"{target.target} answers for {len(found.lanes)} keys at once")
    plain = mask_mod.Subject(target, found, mask, constants, limits).plain
    return replace(
        found, lanes=(plain(found.lanes[0]),),
        arithmetic=tuple((plain(p), plain(v), w, at) for p, v, w, at in found.arithmetic),
        conditions=tuple((plain(p), plain(c), at) for p, c, at in found.conditions),
    )


def made_by(provider: Provider, call: Call) -> str | None:
    """The unit of `proofs.dispatch` in which the release itself makes such a call for a layer that
    means the same mask; None where it makes no such call. Raises CannotLift."""
    unit = GROUPS.get(call.spec)
    if unit is None:
        return None
    wanted = (call.causal, call.window_size_left is not None, call.window_size_right is not None,
              call.dynamic_causal, call.mask_mod is not None)
    for layer in groups(provider).get(unit, ()):
        made = explore(lambda paths, layer=layer: along(provider, layer, sym("window") - 1, paths))
        if any(_shape(called.flags) == wanted for _, called in made):
            return unit
    return None


def _shape(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which flags are given."""
    given = (flags[name] is not None for name in (
        "window_size_left", "window_size_right", "dynamic_causal", "mask_mod"))
    return (bool(flags["causal"]), *given)
