"""Calls of FA4 that a release or a user makes: the masks that they mean, and those they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kernels.dispatch import Effective, Flags, of_flags
from kernels.forward import RANGE_ROWS, TENSOR, Called, Layer, along, knows, root_of
from kernels.forward import MaskMod as Asked
from kernels.from_cute import Lifted, lift
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.release import Release
from kernels.stand_in import Number, Paths, explore
from kernels.target import Target
from kernels.vllm import Loaded, VllmError, _without_cache, load
from spec.domain import BOTTOM_RIGHT, INT32_MAX, PARAMS, Param
from spec.masks import Mask, find
from spec.term import Term, ite, read, substitute, sym
from spec.to_text import to_text

WINDOWS: tuple[Any, ...] = (None, (-1, -1), ("w", 0), ("w", "w"), ("w", -1), (-1, "w"))
# The layer's window where the mask has a window of its own.
OTHER = Param("layer_window", 1, INT32_MAX, "window of the layer, which the mask does not have")


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
    # For each way, which field of the metadata each length, offset and table of pages is.
    handed: tuple[tuple[Term, Mapping[str, str | None]], ...] = ()

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
    ), constants, tuple(lifted.values()), tuple((c, each.handed) for c, each in found))


def low_level(provider: Provider, flags: Flags, spec: str) -> Case:
    """A call of `_flash_attn_fwd` itself, and what it means."""
    found = explore(lambda paths: of_flags(provider, flags, paths))
    return Case(str(flags), find(spec), tuple(
        (condition, one, BOTTOM_RIGHT(one.mask)) for condition, one in found
        if one.mask is not None), {})


def groups(provider: Provider) -> dict[str, list[Layer]]:
    """The units of a release: the layers of each target, as they mean the same mask."""
    found: dict[str, list[Layer]] = {}
    for layer in layers(provider):
        if (name := intended(layer)) is not None:
            found.setdefault(GROUPS[name], []).append(layer)
    return found


def meaning(provider: Provider) -> str:
    """What a mask_mod given together with causal=True means to this FA4, in one sentence."""
    try:
        one = of_flags(provider, Flags(True, None, None, False, True), Paths([]))
    except CannotLift as refusal:
        said = f"it is refused ({refusal})"
    else:
        said = "the flag is cleared and the mask_mod is the whole mask" if one.mask is None else \
            f"the mask_mod is never called and the mask is `{to_text(one.mask)}`"
    return f"{provider.name} on SM90: a mask_mod given with causal=True: {said}"


def not_stated(provider: Provider) -> list[str]:
    """What the calls do that nobody has said the meaning of: outside the verdicts."""
    lines: list[str] = []
    if root_of(provider) is None:
        return lines
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


@contextmanager
def opened(provider: Provider) -> Iterator[MaskMods]:
    """Serves a provider and, where it is part of a release, the release's mask_mods."""
    root = root_of(provider)
    loaded: Loaded | str = f"{provider.name} has no mask_mods"
    with ExitStack() as scope:
        if root is not None:
            release = Release(provider.name, None, root, "", provider.folder)
            try:
                loaded = scope.enter_context(load(release))
            except VllmError as error:
                loaded = str(error)
        if isinstance(loaded, str):
            scope.enter_context(provider.served())
        yield MaskMods(loaded)
