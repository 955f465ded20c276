"""Obligations of host flags: the mask that a call of FA4 compiles is the one that its caller means.

A unit is one target: a few layers and batches that mean masks of one family. vLLM's real `forward`
makes the call, FA4's real host code turns it into flags of the kernel, and what these flags mean
for an element is a term; `effective-mask` claims that it is the mask of the catalogue. What each
branch of `apply_mask` computes is the claim of the layer `builtin`, which tiles are visited that
of `tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernels.dispatch import Compiled, Effective, Flags, MaskMod, effective, of_flags
from kernels.forward import RANGE_ROWS, TENSOR, Called, Layer, along, call, knows, root_of
from kernels.forward import MaskMod as Asked
from kernels.from_cute import Lifted, lift
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.release import Release
from kernels.run_cute import Agreement
from kernels.stand_in import Number, Paths, explore
from kernels.target import Target
from kernels.vllm import Loaded, VllmError, _without_cache, load
from proofs.checks import REAL, TERM_ONLY, Announce, Options, Row
from proofs.counterexample import Counterexample, Picture
from proofs.diagnosis import Diagnosis, diagnose
from proofs.mutants import _distinct
from proofs.obligation import (
    Limits,
    Mutant,
    Obligation,
    Result,
    Verdict,
    prove,
    range_of,
)
from proofs.variations import Variation
from spec.domain import (
    BOTTOM_RIGHT,
    INT32_MAX,
    PADDING,
    PARAMS,
    TABLES,
    Param,
    guarantees,
    lengths,
)
from spec.masks import MASKS, Mask, find
from spec.sample import Array, Batch, batch, evaluate
from spec.term import (
    Term,
    and_,
    bind,
    iff,
    implies,
    ite,
    not_,
    postorder,
    read,
    substitute,
    sym,
    symbols,
    tables,
)
from spec.to_text import to_text

LAYER, ARCH = "dispatch", "sm_90"
LONGEST_PROVED = INT32_MAX - PADDING + 1
FEW_BITS, MUTANTS, CELLS = 16, 12, 600
WINDOWS: tuple[Any, ...] = (None, (-1, -1), ("w", 0), ("w", "w"), ("w", -1), (-1, "w"))
# The layer's window where the mask has a window of its own.
OTHER = Param("layer_window", 1, INT32_MAX, "window of the layer, which the mask does not have")
FLAG = read("dynamic_causal", sym("b"))
RESTS_ON = ("what the branches of apply_mask compute is the layer builtin's claim, which tiles are "
            "visited that of tiles")
NO_BOUND = "window(-1,0)"


def intended(layer: Layer) -> str | None:
    """The mask of the catalogue that a layer and a batch mean; None where none is stated."""
    left = layer.window is not None and layer.window[0] == "w"
    if layer.mm_prefix and layer.rswa:
        return None
    if layer.mm_prefix or layer.rswa:
        if layer.causal is not True:
            return None
        if layer.rswa:
            return "rswa"
        return "mm_prefix_no_window" if not left else (
            "mm_prefix_clamped" if layer.clamp else "mm_prefix")
    if layer.causal is True:
        return "window" if left else "causal"
    if layer.window in (("w", -1), (-1, "w")):
        return None
    if layer.causal == TENSOR:
        return "dynamic_causal_window" if left else "dynamic_causal"
    return "window_symmetric" if left else "full"


GROUPS: Mapping[str, str] = {
    "mm_prefix": "mm_prefix[window]", "mm_prefix_no_window": "mm_prefix[no-window]",
    "mm_prefix_clamped": "mm_prefix[clamp]", "rswa": "rswa",
    "dynamic_causal_window": "dynamic_causal[window]",
    "dynamic_causal": "dynamic_causal[no-window]", "causal": "plain[causal]",
    "window": "plain[causal,window]", "full": "plain[bidirectional]",
    "window_symmetric": "plain[bidirectional,window]",
}


def layers(provider: Provider) -> Iterator[Layer]:
    """Every combination that the release has."""
    for causal in (True, False, TENSOR):
        for window in WINDOWS:
            for mm_prefix in (False, True):
                for clamp in (False, True):
                    for rswa in (False, True):
                        layer = Layer(causal, window, mm_prefix, clamp, rswa)
                        if knows(provider, layer):
                            yield layer


Path = tuple[Term, Effective, Term]


@dataclass(frozen=True)
class Case:
    """One call: its ways through the host code with condition, flags and mask; and the mask that
    is meant. Masks are in the kernel's indices."""

    name: str
    mask: Mask
    paths: tuple[Path, ...]
    constants: Mapping[str, int]
    lifted: tuple[Lifted, ...] = ()

    @property
    def got(self) -> Term:
        return one_term([(condition, got) for condition, _, got in self.paths])

    @cached_property
    def meant(self) -> Term:
        return self.mask.framed(**self.constants)

    @property
    def numbers(self) -> Iterator[Number]:
        """The symbolic numbers that the host hands on."""
        for _, one, _ in self.paths:
            how = one.compiled
            given = [how.window_size_left, how.window_size_right]
            if isinstance(how.mask_mod, Asked):
                given += how.mask_mod.arguments.values()
            yield from (each for each in given if isinstance(each, Number))


def one_term(found: Sequence[tuple[Term, Term]]) -> Term:
    """The mask of whichever condition holds."""
    (_, mask), *others = reversed(found)
    for condition, other in others:
        mask = mask if other is mask else ite(condition, other, mask)
    return mask


class MaskMods:
    """The mask_mods of a release as terms, for the arguments that `forward` gives their factory."""

    def __init__(self, loaded: Loaded | str) -> None:
        self.loaded = loaded
        self.known: dict[Any, tuple[Term, Lifted]] = {}

    def lifted(self, asked: Asked, layout: tuple[str, ...]) -> tuple[Term, Lifted]:
        arguments = {name: value.term if isinstance(value, Number) else value
                     for name, value in asked.arguments.items()}
        key = (asked.factory, tuple(arguments.items()), layout)
        if key not in self.known:
            self.known[key] = self._lift(asked.factory, arguments, layout)
        return self.known[key]

    def _lift(self, name: str, arguments: Mapping[str, Any], layout: tuple[str, ...]
              ) -> tuple[Term, Lifted]:
        if isinstance(self.loaded, str) or isinstance(self.loaded.factories.get(name), str):
            raise CannotLift(str(self.loaded) if isinstance(self.loaded, str)
                             else str(self.loaded.factories[name]))
        factory: Callable[..., Any] = _without_cache(self.loaded.factories[name])
        values = dict.fromkeys(v for v in arguments.values() if isinstance(v, Term))
        names = {value: f"argument_{i}" for i, value in enumerate(values)}

        def make(run_time: Mapping[str, Any]) -> Any:
            return factory(**{k: run_time[names[v]] if isinstance(v, Term) else v
                              for k, v in arguments.items()})

        found = lift(Target(target=name, spec="full", make=make, symbols=tuple(names.values()),
                            layouts=(layout,)))
        if len(found.lanes) != 1:
            raise CannotLift(f"{name} answers for {len(found.lanes)} keys at once")
        back = {sym(symbol): value for value, symbol in names.items()}
        # A tensor of one element that holds a parameter of the spec.
        back |= {read(table, 0): sym(table) for table in layout if table in PARAMS}
        put = {key: substitute(key, back) for key in [
            found.lanes[0], *(t for entry in (*found.arithmetic, *found.conditions)
                              for t in entry[:2] if isinstance(t, Term))]}
        return put[found.lanes[0]], replace(
            found, lanes=(put[found.lanes[0]],),
            arithmetic=tuple((put[p], put[v], w, at) for p, v, w, at in found.arithmetic),
            conditions=tuple((put[p], put[c], at) for p, c, at in found.conditions),
        )


def own_mask(mask_mods: MaskMods, one: Effective, layout: tuple[str, ...]) -> Term:
    """The effective mask in the kernel's indices; that of a mask_mod is its own term."""
    if one.mask is not None:
        return BOTTOM_RIGHT(one.mask)
    return mask_mods.lifted(one.compiled.mask_mod, layout)[0]


def case_of(provider: Provider, mask_mods: MaskMods, layer: Layer) -> Case:
    """A layer's call; raises CannotLift."""
    name = intended(layer)
    assert name is not None
    window = (sym("window") if name != "rswa" else sym(OTHER.name)) - 1
    found: list[tuple[Term, Called]] = explore(
        lambda paths: along(provider, layer, window, paths))
    layout = found[0][1].layout
    mask = find(name).given(layout)
    constants = {"num_ranges": RANGE_ROWS} if "ranges" in layout else {}
    lifted = {id(one): one for one in (
        mask_mods.lifted(each.effective.compiled.mask_mod, layout)[1]
        for _, each in found if each.effective.mask is None)}
    return Case(str(layer), mask, tuple(
        (condition, each.effective, own_mask(mask_mods, each.effective, layout))
        for condition, each in found
    ), constants, tuple(lifted.values()))


@dataclass(frozen=True)
class Subject:
    """One target. `again` gives the mask of other flags, for mutants."""

    target: str
    cases: tuple[Case, ...]
    again: Callable[[Compiled, Path], Term | None]
    limits: Limits
    params: Mapping[str, Param]

    @property
    def spec(self) -> str:
        return self.cases[0].mask.name

    @cached_property
    def tables(self) -> Mapping[str, Any]:
        used = tables(*(t for case in self.cases for t in (case.got, case.meant)))
        known = {name: t for case in self.cases for name, t in case.mask.tables.items()}
        return {name: {**TABLES, **known}[name] for name in sorted(used)}

    @cached_property
    def constants(self) -> Mapping[str, int]:
        return {name: value for case in self.cases for name, value in case.constants.items()}

    @cached_property
    def assumptions(self) -> tuple[Term, ...]:
        given = guarantees(self.params, self.tables, self.constants, BOTTOM_RIGHT)
        return (*lengths(LONGEST_PROVED, False), *given)

    @property
    def bounds(self) -> str:
        ranges = [f"{p.low} <= {p.name} <= {p.high}" for p in self.params.values()
                  if p.name not in self.constants]
        return ", ".join([f"N = {LONGEST_PROVED}", "seqlen_q and seqlen_k <= N", *ranges,
                          f"{len(self.cases)} calls: {'; '.join(c.name for c in self.cases)}",
                          RESTS_ON])

    @cached_property
    def corpus(self) -> tuple[Batch, ...]:
        facts = tuple(fact for fact in self.assumptions)
        return tuple(
            batch(np.random.default_rng(seed), self.params, self.tables, assume=facts,
                  constants=self.constants, cells=CELLS, longest=12, sequences=8)
            for seed in range(12)
        )

    def obligation(self, name: str, claim: Term, **fields: Any) -> Obligation:
        return Obligation(target=self.target, name=name, spec=self.spec, claim=claim,
                          assumptions=self.assumptions, bounds=self.bounds, layer=LAYER,
                          arch=ARCH, **fields)

    def knows(self, mask: Term) -> bool:
        """Whether the assumptions are about all that the mask names."""
        free = symbols(mask) - symbols(*self.assumptions)
        return not free and tables(mask) <= self.tables.keys()

    def holds(self, claim: Term) -> Array:
        return np.concatenate([evaluate(claim, at) for at in self.corpus])


def subject_of(target: str, cases: Sequence[Case], again: Any, limits: Limits) -> Subject:
    used = symbols(*(t for case in cases for t in (case.got, case.meant)),
                   *(n.term for case in cases for n in case.numbers))
    known = {**PARAMS, OTHER.name: OTHER,
             **{p.name: p for case in cases for p in case.mask.params.values()}}
    params = {name: p for name, p in known.items() if name in used or any(
        name in case.constants for case in cases)}
    return Subject(target, tuple(cases), again, limits, params)


def effective_mask(subject: Subject) -> Obligation:
    claims = [iff(case.got, case.meant) for case in subject.cases]
    tried = [Variation(phrase, iff(wrong, case.meant), 0)
             for case in subject.cases for phrase, wrong in faults(subject, case)
             if subject.knows(wrong)]
    found = _distinct(tried, lambda v: subject.holds(v.term), MUTANTS)
    return subject.obligation("effective-mask", and_(*dict.fromkeys(claims)), mutants=tuple(
        Mutant(v.phrase, v.term) for v in found))


def faults(subject: Subject, case: Case) -> Iterator[tuple[str, Term]]:
    """The case's mask with one fault in the flags of the kernel, or in a mask_mod's argument."""
    for i, (_, one, own) in enumerate(case.paths):
        def put(wrong: Term, i: int = i) -> Term:
            return one_term([(condition, wrong if i == j else got)
                             for j, (condition, _, got) in enumerate(case.paths)])

        for phrase, how in wrong_flags(one.compiled):
            if (wrong := subject.again(how, case.paths[i])) is not None:
                yield f"{case.name}: {phrase}", put(wrong)
        if "dynamic_causal" in tables(own):
            negated = substitute(own, {FLAG: 1 - FLAG})
            yield f"{case.name}: dynamic_causal negated", put(negated)
        if one.mask is None and "window" in symbols(own):
            for by in (1, -1):
                wrong = substitute(own, {sym("window"): sym("window") + by})
                yield f"{case.name}: the mask_mod's window off by {by}", put(wrong)
        for node in postorder(own):
            if one.mask is None and node.op == "read":
                yield f"{case.name}: {to_text(node)} off by one", put(
                    substitute(own, {node: node + 1}))


def wrong_flags(how: Compiled) -> Iterator[tuple[str, Compiled]]:
    """The flags of a kernel with one fault each."""
    plain = replace(how, is_causal=False, is_local=False)
    if how.is_causal or how.is_local:
        yield "causal and local dropped", plain
    if not how.is_causal:
        yield "causal left on", replace(plain, is_causal=True)
    if how.dynamic_causal is not None:
        yield "dynamic_causal dropped", replace(how, dynamic_causal=None)
    if how.mask_mod is not None:
        yield "mask_mod dropped", replace(how, mask_mod=None)
    left, right = how.window_size_left, how.window_size_right
    if how.is_local and (left is not None or right is not None):
        yield "window sides swapped", replace(
            how, window_size_left=right, window_size_right=left)
        for side in ("window_size_left", "window_size_right"):
            if getattr(how, side) is not None:
                for by in (1, -1):
                    yield f"{side} off by {by}", replace(how, **{side: getattr(how, side) + by})
                yield f"{side} dropped", replace(how, **{side: None})


def no_overflow(subject: Subject) -> Obligation | None:
    """The numbers that the host hands on fit int32, and so does all that a mask_mod computes."""
    handed = dict.fromkeys(n.term for case in subject.cases for n in case.numbers)
    claims = [range_of(value, 32) for value in handed]
    computed = dict.fromkeys(entry for case in subject.cases for one in case.lifted
                             for entry in one.arithmetic)
    claims += [implies(path, range_of(value, bits)) for path, value, bits, _ in computed]
    claims += [implies(path, claim) for case in subject.cases for one in case.lifted
               for path, claim, _ in one.conditions]
    if not claims:
        return None
    values = [*handed, *(v for _, v, _, _ in computed if symbols(v) & {"seqlen_k", "window"})]
    mutants = tuple(Mutant(f"`{to_text(v)[:60]}` in {FEW_BITS} bits", range_of(v, FEW_BITS))
                    for v in values[:4])
    return subject.obligation("no-overflow", and_(*dict.fromkeys(claims)), mutants=mutants)


def of_subject(provider: Provider, subject: Subject, options: Options) -> Iterator[Row]:
    made = [effective_mask(subject), no_overflow(subject)]
    results = [_shown(prove(o, options.limits)) for o in made if o is not None
               and (not options.obligations or o.name in options.obligations)]
    fits = all(r.verdict is Verdict.PROVED for r in results
               if r.obligation.name == "no-overflow") and (
        made[1] is None or not options.obligations or "no-overflow" in options.obligations)
    for result in results:
        if result.verdict is Verdict.PROVED and not fits:
            result = replace(result, verdict=Verdict.UNKNOWN, killed=0,
                             reason="shown in unbounded integers, but no-overflow is not proved")
        if result.verdict is Verdict.REFUTED and result.obligation.name == "effective-mask":
            yield refuted(subject, result)
        else:
            yield Row(result, TERM_ONLY, fa4=provider.name)


def _shown(result: Result) -> Result:
    if result.verdict is Verdict.PROVED and not result.killed:
        return replace(result, verdict=Verdict.UNKNOWN,
                       reason="the claim holds, but no cell was found that shows a mutant wrong")
    return result


def refuted(subject: Subject, result: Result) -> Row:
    """The row of a refutation: a short sequence that shows it, and what went wrong."""
    quick = replace(subject.limits, smtlib=None)
    wrong = [case for case in subject.cases if prove(
        subject.obligation("effective-mask", iff(case.got, case.meant)), quick
    ).verdict is Verdict.REFUTED]
    if not wrong:
        return Row(replace(result, verdict=Verdict.ERROR, reason="no call by itself is wrong"))
    calls = "; ".join(case.name for case in wrong)
    share = f"{len(wrong)} of {len(subject.cases)} calls are wrong: {calls}"
    cell, picture = shown(subject, wrong[0])
    return Row(replace(result, reason=share), TERM_ONLY, counterexample=cell, picture=picture,
               diagnosis=why(subject, wrong[0], quick))


def why(subject: Subject, case: Case, limits: Limits) -> Diagnosis | None:
    """What the kernel never reads of what it is given, and which mask it is in its place."""
    _, one, _ = case.paths[0]
    how = one.compiled
    found = diagnose(
        case.mask, case.got, subject.corpus,
        lambda formula: prove(subject.obligation(
            "effective-mask", iff(case.got, Mask.framed(replace(case.mask, formula=formula),
                                                        **case.constants))), limits),
        lambda formula: replace(case.mask, formula=formula).framed(**case.constants),
    )
    built = "causal=True" if how.is_causal else "a built-in window" if how.is_local else \
        "causal=False"
    causes = {"mask_mod": f"the mask_mod is never called under {built}",
              "dynamic_causal": f"the tensor dynamic_causal is never read under {built}"}
    cause = "; ".join(text for part, text in causes.items() if part in one.ignored)
    named = [each.name for each in MASKS.values() if len(case.paths) == 1
             and each.formula is one.mask]
    if cause and named:
        return Diagnosis(f"{cause}: the mask is {named[0]}", to_text(one.mask), Verdict.PROVED)
    if found is None:
        text = to_text(one.mask) if one.mask is not None else to_text(case.got)
        sentence = cause or "the flags mean another mask"
        return Diagnosis(f"{sentence}; the mask is `{text[:200]}`", text, Verdict.PROVED)
    if not cause and one.mask is None:
        cause = "the flags are right and the mask_mod is not"
    return replace(found, sentence=f"{cause}: the mask {found.sentence}" if cause
                   else f"the mask {found.sentence}")


def shown(subject: Subject, case: Case) -> tuple[Counterexample | None, Picture | None]:
    """A cell of the shortest sequence found on which the call is wrong, and a whole sequence."""
    first: Counterexample | None = None
    rng = np.random.default_rng(5)
    for longest in (1, 2, 3, 4, 5, 6, 8, 10):
        for _ in range(12):
            at = batch(rng, subject.params, subject.tables, assume=subject.assumptions,
                       constants=subject.constants, sequences=1, longest=longest, cells=900)
            got, meant = evaluate(case.got, at), evaluate(case.meant, at)
            wrong = np.flatnonzero(got != meant)
            if not len(wrong):
                continue
            cell = int(wrong[0])
            values = {name: value for name, value in at.params.items() if name in subject.params}
            first = first or Counterexample(
                {**{k: int(v[cell]) for k, v in at.cells.items()}, **values}, at.tables,
                bool(got[cell]), bool(meant[cell]))
            shape = (int(at.cells["seqlen_q"][0]), int(at.cells["seqlen_k"][0]))
            if longest >= 8 and got.size == shape[0] * shape[1]:
                tables = {name: array.tolist() for name, array in at.tables.items()}
                return first, Picture({**values, **tables}, meant.reshape(shape),
                                      got.reshape(shape), shape[1] - shape[0])
    return first, None


def compare_with_code(provider: Provider, mask_mods: MaskMods, group: Sequence[Layer],
                      subject: Subject) -> Agreement:
    """Runs the real host code on numbers in place of symbols, and compares the masks."""
    cells = visible = 0
    for layer, case in zip(group, subject.cases, strict=True):
        for at in subject.corpus[:3]:
            name = OTHER.name if OTHER.name in subject.params else "window"
            window = at.params.get(name, 1) - 1
            found = call(provider, layer, window)
            got = bind(own_mask(mask_mods, found.effective, found.layout), {})
            answers = evaluate(got, at)
            if (answers != evaluate(case.got, at)).any():
                raise Disagreement(f"{case.name} with a window of {window} to the left differs")
            cells, visible = cells + answers.size, visible + int(answers.sum())
    return Agreement(cells=cells, visible=visible, left_out=0, uncovered=(), mismatch=None)


class Disagreement(Exception):
    """The host code run on numbers differs from what it is on symbols."""


def failed(target: str, spec: str, verdict: Verdict, reason: str) -> Row:
    nothing = Obligation(target=target, name="effective-mask", spec=spec, claim=sym("?") < 0,
                         assumptions=(), bounds="none", layer=LAYER, arch=ARCH)
    return Row(Result(nothing, verdict, reason=reason))


def groups(provider: Provider) -> dict[str, list[Layer]]:
    """The units of a release: the layers of each target, as they mean the same mask."""
    found: dict[str, list[Layer]] = {}
    for layer in layers(provider):
        if (name := intended(layer)) is not None:
            found.setdefault(GROUPS[name], []).append(layer)
    return found


def of_group(provider: Provider, mask_mods: MaskMods, name: str, group: Sequence[Layer],
             options: Options = Options()) -> list[Row]:
    """The rows of one unit. The provider is served, and its mask_mods are loaded."""
    target = f"{provider.name}/{LAYER}/{name}"
    spec = intended(group[0]) or ""
    try:
        cases = [case_of(provider, mask_mods, layer) for layer in group]
        subject = subject_of(target, cases, _again(provider), options.limits)
        compared = compare_with_code(provider, mask_mods, group, subject) \
            if options.thorough else None
    except CannotLift as refusal:
        return [failed(target, spec, Verdict.UNSUPPORTED, str(refusal))]
    except Disagreement as error:
        return [failed(target, spec, Verdict.ERROR, str(error))]
    replayed = REAL if compared is not None else TERM_ONLY
    return [replace(row, replayed=replayed, compared=compared, fa4=provider.name)
            for row in of_subject(provider, subject, options)]


def _again(provider: Provider) -> Callable[[Compiled, Path], Term | None]:
    def mask(how: Compiled, path: Path) -> Term | None:
        try:
            found = effective(provider, how)
        except CannotLift:
            return None
        return BOTTOM_RIGHT(found.mask) if found.mask is not None else path[2]

    return mask


def low_level(provider: Provider, flags: Flags, spec: str) -> Case:
    """A call of `_flash_attn_fwd` itself, and what it means."""
    found = explore(lambda paths: of_flags(provider, flags, paths))
    return Case(str(flags), find(spec), tuple(
        (condition, one, BOTTOM_RIGHT(one.mask)) for condition, one in found
        if one.mask is not None), {})


def of_no_bound(provider: Provider, options: Options = Options()) -> list[Row]:
    """Windows with -1 for no left bound, given to `_flash_attn_fwd` itself."""
    target = f"{provider.name}/{NO_BOUND}"
    try:
        case = low_level(provider, Flags(False, -1, 0, False, False), "causal")
        subject = subject_of(target, [case], _again(provider), options.limits)
        found = list(of_subject(provider, subject, options))
        said = meaning(provider)
    except CannotLift as refusal:
        return [failed(target, "causal", Verdict.UNSUPPORTED, str(refusal))]
    empty = prove(subject.obligation("effective-mask", not_(case.got)), options.limits).verdict
    return [replace(
        row, fa4=provider.name, result=replace(row.result, reason=said),
        diagnosis=_no_bound(case, empty) if row.result.verdict is Verdict.REFUTED else None,
    ) for row in found]


def _no_bound(case: Case, empty: Verdict) -> Diagnosis:
    _, one, _ = case.paths[0]
    text = "the mask_mod's" if one.mask is None else to_text(one.mask)
    how = one.compiled
    if how.window_size_left is None and how.window_size_right is None and not how.is_causal:
        said = "window_size_left=-1 drops the bound on the right too: every key is visible"
    elif empty is Verdict.PROVED:
        said = "window_size_left=-1 is a distance and not the lack of a bound: no key is visible"
    else:
        said = f"window_size_left=-1 is not the lack of a bound: the mask is `{text}`"
    return Diagnosis(said, text, Verdict.PROVED)


def meaning(provider: Provider) -> str:
    """What a mask_mod given together with causal=True means to this FA4, in one sentence."""
    one = of_flags(provider, Flags(True, None, None, False, True), Paths([]))
    assert isinstance(one.compiled.mask_mod, MaskMod)
    if one.mask is None:
        said = "the flag is cleared and the mask_mod is the whole mask"
    else:
        said = f"the mask_mod is never called and the mask is `{to_text(one.mask)}`"
    return f"{provider.name} on SM90: a mask_mod given with causal=True: {said}"


def not_stated(provider: Provider) -> list[str]:
    """What the calls do that nobody has said the meaning of: outside the verdicts."""
    lines = []
    for layer in layers(provider):
        if intended(layer) is None:
            try:
                found = explore(lambda paths, layer=layer: along(
                    provider, layer, sym("window") - 1, paths))
            except CannotLift as refusal:
                lines.append(f"{layer}: {refusal}")
                continue
            lines.append(f"{layer}: {' or '.join(dict.fromkeys(_does(c) for _, c in found))}")
    return lines


def _does(found: Called) -> str:
    one, asked = found.effective, found.effective.compiled.mask_mod
    if one.mask is None:
        name = asked.factory.removeprefix("_make_").removesuffix("_mask_mod")
        return f"the mask_mod {name} alone"
    ignored = f", {' and '.join(sorted(one.ignored))} never read" if one.ignored else ""
    return f"`{to_text(one.mask)}`{ignored}"


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None
         ) -> Iterator[Row]:
    """Every obligation of an FA4's host flags, and of the release that it is a part of."""
    with provider.served():
        announce(f"{provider.name}/{NO_BOUND}")
        yield from of_no_bound(provider, options)
    root = root_of(provider)
    if root is None:
        return
    release = Release(provider.name, None, root, "", provider.folder)
    try:
        units, outside = groups(provider), not_stated(provider)
    except CannotLift as refusal:
        yield failed(f"{provider.name}/{LAYER}/plain", "full", Verdict.UNSUPPORTED, str(refusal))
        return
    with ExitStack() as scope:
        try:
            loaded: Loaded | str = scope.enter_context(load(release))
        except VllmError as error:
            loaded = str(error)
        mask_mods = MaskMods(loaded)
        for i, (name, group) in enumerate(units.items()):
            announce(f"{provider.name}/{LAYER}/{name}")
            for row in of_group(provider, mask_mods, name, group, options):
                extra = {**row.result.extra, "not_stated": outside if i == 0 else []}
                yield replace(row, result=replace(row.result, extra=extra))
