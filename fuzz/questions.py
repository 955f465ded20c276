"""What can be proved of a finding, of one release after another.

A question is about one part of the finding's call: its mask_mod; the call that the release makes
for such a layer; the flags as they are given; the tiles that are visited; the built-in masks. The
parts that a release lacks are ABSENT, which is neither good nor bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fuzz.case import Case, stated
from fuzz.releases import release
from fuzz.targets import Source, mask_mods, provider_of
from kernels.fa4 import UPSTREAM, VLLM, Call
from kernels.release import Release
from kernels.target import Target
from spec.from_file import resolve

if TYPE_CHECKING:
    from kernels.provider import Provider
    from proofs.calls import MaskMods
    from proofs.checks import Row

ABSENT, PROVED, REFUTED = "ABSENT", "PROVED", "REFUTED"
SHOWN = ("leak", "loss", "empty-row")
# The kinds of finding that each part can explain; what takes longest to prove comes last.
KINDS: Mapping[str, tuple[str, ...]] = {
    "mask_mod": (*SHOWN, "crash"), "dispatch": SHOWN, "flags": SHOWN,
    "tiles": (*SHOWN, "double"), "builtin": SHOWN,
}
SM90 = "sm_90"
WORST = ("ERROR", "REFUTED", "UNKNOWN", "VACUOUS", "UNSUPPORTED")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is proved: `verdict` is that of a proof, or ABSENT."""

    verdict: str
    obligation: str = ""
    diagnosis: str | None = None
    reason: str | None = None

    @property
    def good(self) -> bool | None:
        """None where it is not decided."""
        return {PROVED: True, REFUTED: False}.get(self.verdict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a question is asked: in a release, or in what is installed with the finding's own
    mask_mods."""

    name: str
    release: Release | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The FA4 and the mask_mods of a place; each is the reason where it is not to be had."""

    provider: Provider | str
    targets: Mapping[str, Target]
    mask_mods: MaskMods | None = None


def has_flags(call: Call) -> bool:
    """Whether the kernel's own flags are part of what the call asks for."""
    windows = call.window_size_left, call.window_size_right
    return call.causal or call.dynamic_causal or windows != (None, None)


def home(source: Source, call: Call) -> Place:
    """The place that a finding is from. Raises ReleaseError or Fa4Error."""
    names = call.provider, provider_of(call.mask_mod or "")
    kernels, own = names if has_flags(call) or call.mask_mod is None else names[::-1]
    name = kernels if kernels != UPSTREAM else own
    if name == UPSTREAM or source.vllm is None and source.targets:
        return Place(UPSTREAM)
    if source.vllm is not None:
        at_hand = release(source.vllm)
        if at_hand.name == name:
            return Place(name, at_hand)
    return Place(name, release(name.removeprefix(f"{VLLM}-")))


@contextmanager
def opened(place: Place, source: Source) -> Iterator[Opened]:
    """Raises VllmError or what `gathered` does."""
    if place.release is None:
        from fuzz.targets import gathered
        from kernels.provider import installed

        with gathered(source) as found:
            yield Opened(installed(), mask_mods(found))
        return
    from kernels.machine import CannotLift
    from kernels.provider import of_release
    from kernels.vllm import VllmError, branches, load
    from proofs.calls import MaskMods

    with ExitStack() as scope:
        provider: Provider | str
        try:
            provider = of_release(place.release)
        except CannotLift as error:
            provider = str(error)
        try:
            loaded = scope.enter_context(load(place.release))
        except VllmError as error:
            if not isinstance(provider, str):
                scope.enter_context(provider.served())
            yield Opened(provider, {}, MaskMods(str(error)))
            return
        yield Opened(provider, {each.target: each for each in branches(loaded)}, MaskMods(loaded))


def alike(case: Case, targets: Mapping[str, Target], place: Place) -> Target | None:
    """The mask_mod of a place that takes the part of the case's: the one of that name; or one of
    the same family for the same spec, with room for all ranges of the case."""
    name = case.call.mask_mod
    if name is None or name in targets:
        return targets.get(name or "")
    if place.release is None or provider_of(name) == UPSTREAM:
        return None
    own = name.partition("/")[2]
    for target in targets.values():
        if target.target.partition("/")[2] == own and target.spec == case.call.spec:
            return target
    same = [t for t in targets.values() if t.spec == case.call.spec or t.unsupported]
    same = [t for t in same
            if t.target.partition("/")[2].partition("[")[0] == own.partition("[")[0]]
    most = _most_ranges(case)
    roomy = [t for t in same if t.constants.get("num_ranges", most) >= most]
    return min(roomy or same, key=lambda t: t.constants.get("num_ranges", 0), default=None)


def _most_ranges(case: Case) -> int:
    if "ranges" not in stated(resolve(case.call.spec)):
        return 0
    return max(len(sequence.tables["ranges"]) for sequence in case.sequences)


Question = Callable[[Case, str, Place, Opened], "Answer | None"]


def of_mask_mod(case: Case, kind: str, place: Place, at: Opened) -> Answer | None:
    """That the mask_mod equals its spec; of one that crashes, that it reads inside its tables."""
    if case.call.mask_mod is None:
        return None
    target = alike(case, at.targets, place)
    if target is None:
        return Answer(ABSENT, reason=f"{place.name} has no {_short(case.call.mask_mod)}")
    from proofs.checks import Options, check

    name = "reads-in-bounds" if kind == "crash" else "equals-spec"
    options = Options(obligations=("equals-spec", "no-overflow", "reads-in-bounds"))
    rows = list(check([target], resolve, options))
    return _answer([row for row in rows if row.result.obligation.name == name] or rows)


def _short(name: str) -> str:
    return name.partition("/")[2] if name.startswith(f"{VLLM}-") else name


def of_dispatch(case: Case, kind: str, place: Place, at: Opened) -> Answer | None:
    """That the calls which the release makes for layers of this mask have this mask."""
    from proofs.calls import GROUPS, groups
    from proofs.dispatch import of_group

    unit = GROUPS.get(case.call.spec)
    if unit is None or place.release is None or case.call.arch != SM90:
        return None

    def ask(provider: Provider) -> Answer:
        assert at.mask_mods is not None
        if unit not in (found := groups(provider)):
            return Answer(ABSENT, reason=f"{place.name} has no layers of {case.call.spec}")
        return _answer(of_group(provider, at.mask_mods, unit, found[unit]), "effective-mask")

    return _of_provider(at, ask)


def of_flags(case: Case, kind: str, place: Place, at: Opened) -> Answer | None:
    """That the call as it is given has the mask that it claims."""
    from proofs.given_call import of_call

    if not has_flags(case.call) or case.call.arch != SM90:
        return None
    target = alike(case, at.targets, place)
    if case.call.mask_mod is not None and target is None:
        return Answer(ABSENT, reason=f"{place.name} has no {_short(case.call.mask_mod)}")
    return _of_provider(at, lambda provider: _answer(
        of_call(provider, case.call, target), "effective-mask"))


def of_builtin(case: Case, kind: str, place: Place, at: Opened) -> Answer | None:
    """That FA4's element masks, on the tiles of the call, keep what the flags say."""
    from proofs import builtin

    def ask(provider: Provider) -> Answer:
        inside = case.call.mask_mod is not None
        rows: list[Row] = []
        for mode, tile, _ in tiled(provider, case.call):
            one = builtin.Configuration(builtin.MASK_MOD if inside else mode, tile, inside)
            rows += builtin.of_configuration(provider, one)
        return _answer(rows)

    return None if case.call.arch != SM90 else _of_provider(at, ask)


def of_tiles(case: Case, kind: str, place: Place, at: Opened) -> Answer | None:
    """That the call visits every tile that holds a visible cell, and each once."""
    from proofs import tiles

    def ask(provider: Provider) -> Answer:
        rows: list[Row] = []
        for mode, tile, overlap in tiled(provider, case.call):
            one = tiles.Configuration(mode, tile, case.call.num_splits != 1, overlap)
            rows += tiles.of_configuration(provider, one)
        return _answer(rows)

    return None if case.call.arch != SM90 else _of_provider(at, ask)


def tiled(provider: Provider, call: Call) -> list[tuple[str, Any, bool]]:
    """Mode, tile and overlap of the kernels that a call may compile to: with query heads packed
    into rows and without. Raises CannotLift."""
    from kernels.dispatch import of_flags as effective
    from kernels.machine import CannotLift
    from kernels.stand_in import Paths
    from proofs.element_replay import mode_of
    from proofs.given_call import flags_of
    from spec.tiles import Tile

    how = effective(provider, flags_of(call), Paths([])).compiled
    mode = mode_of(how)
    if mode is None:
        raise CannotLift(f"no mode of the kernel has the flags {flags_of(call)}")
    made = provider.tile_size_sm90(call.head_dim, call.head_dim_v, how.is_causal, how.is_local)
    ratio = 1 if call.pack_gqa is False else call.q_heads // call.kv_heads
    return [(mode, Tile(made.m_block_size, made.n_block_size, pack), made.intra_wg_overlap)
            for pack in dict.fromkeys((1, ratio))]


def _of_provider(at: Opened, ask: Callable[[Provider], Answer]) -> Answer:
    from kernels.machine import CannotLift

    if isinstance(at.provider, str):
        return Answer("UNSUPPORTED", reason=at.provider)
    try:
        return ask(at.provider)
    except CannotLift as refusal:
        return Answer("UNSUPPORTED", reason=str(refusal))


def _answer(rows: list[Row], name: str | None = None) -> Answer:
    """The worst of what was proved; with a `name` only rows of that obligation count."""
    rows = [row for row in rows if name in (None, row.result.obligation.name)]

    def rank(row: Row) -> int:
        verdict = row.result.verdict.value
        return WORST.index(verdict) if verdict in WORST else len(WORST)

    worst = min(rows, key=rank)
    found = worst.result
    return Answer(
        found.verdict.value, f"{found.obligation.target} {found.obligation.name}",
        worst.diagnosis.sentence if worst.diagnosis is not None else None, found.reason)


QUESTIONS: Mapping[str, Question] = {
    "mask_mod": of_mask_mod, "dispatch": of_dispatch, "flags": of_flags, "tiles": of_tiles,
    "builtin": of_builtin,
}


def explaining(
    case: Case, kind: str, place: Place, at: Opened, note: Callable[[str], None] = lambda text: None
) -> tuple[str | None, dict[str, Answer]]:
    """The first part of the call of which the place's own proof is refuted, and all answers on the
    way there. What a release does is asked only where it makes such a call itself."""
    told: dict[str, Answer] = {}
    for name, ask in QUESTIONS.items():
        if kind not in KINDS[name] or name == "dispatch" and not _makes(case.call, place, at):
            continue
        note(f"{place.name}: {name}")
        answer = ask(case, kind, place, at)
        if answer is None:
            continue
        told[name] = answer
        if answer.verdict == REFUTED:
            return name, told
    return None, told


def _makes(call: Call, place: Place, at: Opened) -> bool:
    from kernels.machine import CannotLift
    from proofs.given_call import made_by

    if place.release is None or isinstance(at.provider, str):
        return False
    try:
        return made_by(at.provider, call) is not None
    except CannotLift:
        return False
