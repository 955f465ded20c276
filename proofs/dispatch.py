"""Obligations of host flags: the mask that a call of FA4 compiles is the one that its caller means.

A unit is one target: a few layers and batches that mean masks of one family. vLLM's real `forward`
makes the call, FA4's real host code turns it into flags of the kernel, and what these flags mean
for an element is a term; `effective-mask` claims that it is the mask of the catalogue. What each
branch of `apply_mask` computes is the claim of the layer `builtin`, which tiles are visited that
of `tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernels.dispatch import Compiled, Flags, effective
from kernels.forward import Layer, call, root_of
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import Agreement
from proofs import handed_on
from proofs.calls import (
    OTHER,
    Case,
    MaskMods,
    Path,
    case_of,
    groups,
    intended,
    low_level,
    meaning,
    not_stated,
    one_term,
    opened,
    own_mask,
)
from proofs.checks import REAL, TERM_ONLY, Announce, Options, Row
from proofs.counterexample import Counterexample, Picture
from proofs.diagnosis import Diagnosis, diagnose
from proofs.element_replay import agrees
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
from proofs.sound import Disagreement, counted, undecided
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
from spec.masks import MASKS, Mask
from spec.sample import Array, Batch, batch, evaluate
from spec.term import (
    Term,
    and_,
    iff,
    implies,
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
FLAG = read("dynamic_causal", sym("b"))
RESTS_ON = ("decoder layers without context parallelism, cascades or splits; lengths, offsets and "
            "page tables are the metadata's, field by field; what the branches of "
            "apply_mask compute is the layer builtin's claim, which tiles are visited that of "
            "tiles, that a mask_mod reads inside its tables that of mask_mod")
NO_BOUND = "window(-1,0)"


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
    claims = [claim for case in subject.cases
              for claim in (iff(case.got, case.meant), *handed_on.claims(case))]
    tried = [Variation(phrase, iff(wrong, case.meant), 0)
             for case in subject.cases for phrase, wrong in faults(subject, case)
             if subject.knows(wrong)]
    found = _distinct(tried, lambda v: subject.holds(v.term), MUTANTS)
    more = dict(fault for case in subject.cases for fault in handed_on.faults(case))
    return subject.obligation("effective-mask", and_(*dict.fromkeys(claims)), mutants=(
        *(Mutant(v.phrase, v.term) for v in found),
        *(Mutant(phrase, claim) for phrase, claim in more.items())))


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
    results = [counted(prove(o, options.limits)) for o in made if o is not None
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


def refuted(subject: Subject, result: Result) -> Row:
    """The row of a refutation: a short sequence that shows it, and what went wrong."""
    quick = replace(subject.limits, smtlib=None)
    wrong = [case for case in subject.cases if prove(
        subject.obligation("effective-mask", iff(case.got, case.meant)), quick
    ).verdict is Verdict.REFUTED]
    if not wrong:
        return misplaced(subject, result)
    calls = f": {'; '.join(c.name for c in wrong)}" if len(wrong) < len(subject.cases) else ""
    share = f"{len(wrong)} of {len(subject.cases)} calls are wrong{calls}"
    cell, picture = shown(subject, wrong[0])
    return Row(replace(result, reason=share), TERM_ONLY, counterexample=cell, picture=picture,
               diagnosis=why(subject, wrong[0], quick))


def misplaced(subject: Subject, result: Result) -> Row:
    """The row of calls whose mask is right, of other lengths, offsets or pages."""
    found = {case.name: said for case in subject.cases if (said := handed_on.wrong(case))}
    if not found:
        return Row(replace(result, verdict=Verdict.ERROR, reason="no call by itself is wrong"))
    sentence = "; ".join(dict.fromkeys(text for said in found.values() for text in said))
    share = f"{len(found)} of {len(subject.cases)} calls are wrong"
    return Row(replace(result, reason=share), TERM_ONLY, diagnosis=Diagnosis(
        f"the kernel is told of another sequence than the metadata: {sentence}", sentence,
        Verdict.PROVED))


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


def compare_host(provider: Provider, mask_mods: MaskMods, group: Sequence[Layer],
                 subject: Subject) -> Agreement:
    """Runs the real host code on numbers in place of symbols, and compares the masks."""
    cells = visible = 0
    name = OTHER.name if OTHER.name in subject.params else "window"
    for layer, case in zip(group, subject.cases, strict=True):
        for at in subject.corpus[:3]:
            window = at.params.get(name, 1) - 1
            found = call(provider, layer, window)
            answers = evaluate(own_mask(mask_mods, found.effective, found.layout), at)
            if (answers != evaluate(case.got, at)).any():
                raise Disagreement(f"{case.name} with a window of {window} to the left differs")
            cells, visible = cells + answers.size, visible + int(answers.sum())
    return Agreement(cells=cells, visible=visible, left_out=0, uncovered=(), mismatch=None)


def compare_elements(provider: Provider, subject: Subject) -> bool:
    """Whether the real `apply_mask` could be run with the flags of every call."""
    found = [agrees(provider, one) for case in subject.cases for _, one, _ in case.paths]
    return all(cells is not None for cells in found)


def failed(target: str, spec: str, verdict: Verdict, reason: str) -> Row:
    return Row(undecided(target, "effective-mask", spec, verdict, reason, layer=LAYER, arch=ARCH))


def of_group(provider: Provider, mask_mods: MaskMods, name: str, group: Sequence[Layer],
             options: Options = Options()) -> list[Row]:
    """The rows of one unit. The provider is served, and its mask_mods are loaded."""
    target = f"{provider.name}/{LAYER}/{name}"
    spec = intended(group[0]) or ""
    try:
        cases = [case_of(provider, mask_mods, layer) for layer in group]
        subject = subject_of(target, cases, _again(provider), options.limits)
        compared, real = None, False
        if options.thorough:
            compared = compare_host(provider, mask_mods, group, subject)
            real = compare_elements(provider, subject)
    except CannotLift as refusal:
        return [failed(target, spec, Verdict.UNSUPPORTED, str(refusal))]
    except Disagreement as error:
        return [failed(target, spec, Verdict.ERROR, str(error))]
    replayed = REAL if real else TERM_ONLY
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


def of_no_bound(provider: Provider, options: Options = Options()) -> list[Row]:
    """Windows with -1 for no left bound, given to `_flash_attn_fwd` itself."""
    target = f"{provider.name}/{NO_BOUND}"
    try:
        case = low_level(provider, Flags(False, -1, 0, False, False), "causal")
        subject = subject_of(target, [case], _again(provider), options.limits)
        real = options.thorough and compare_elements(provider, subject)
        found = list(of_subject(provider, subject, options))
        said = meaning(provider)
    except CannotLift as refusal:
        return [failed(target, "causal", Verdict.UNSUPPORTED, str(refusal))]
    except Disagreement as error:
        return [failed(target, "causal", Verdict.ERROR, str(error))]
    empty = prove(subject.obligation("effective-mask", not_(case.got)), options.limits).verdict
    return [replace(
        row, fa4=provider.name, replayed=REAL if real else TERM_ONLY,
        result=replace(row.result, extra={**row.result.extra, "meaning": said}),
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


def units(provider: Provider) -> list[str]:
    """The targets of a provider, each of which is proved by itself; raises CannotLift."""
    return [NO_BOUND, *(groups(provider) if root_of(provider) is not None else ())]


def of_unit(provider: Provider, mask_mods: MaskMods, unit: str, options: Options = Options()
            ) -> list[Row]:
    """The rows of one unit, inside `opened`."""
    if unit == NO_BOUND:
        return of_no_bound(provider, options)
    return of_group(provider, mask_mods, unit, groups(provider)[unit], options)


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None
         ) -> Iterator[Row]:
    """Every obligation of an FA4's host flags, and of the release that it is a part of.

    `extra["not_stated"]` of the first row says what calls do that nobody has given a meaning.
    """
    try:
        named, outside = units(provider), not_stated(provider)
    except CannotLift as refusal:
        named, outside = [NO_BOUND], []
        yield failed(f"{provider.name}/{LAYER}/plain", "full", Verdict.UNSUPPORTED, str(refusal))
    with opened(provider) as mask_mods:
        for unit in named:
            announce(f"{provider.name}/{unit if unit == NO_BOUND else f'{LAYER}/{unit}'}")
            for row in of_unit(provider, mask_mods, unit, options):
                extra = {**row.result.extra, "not_stated": outside}
                yield replace(row, result=replace(row.result, extra=extra))
                outside = []
