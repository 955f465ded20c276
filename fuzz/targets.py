"""The real mask_mods that a campaign or a finding is about, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, NoReturn

from kernels.fa4 import BATCHED, PAGED, UPSTREAM, VARLEN, VLLM, Call
from kernels.target import Target
from spec.from_file import resolve
from spec.term import Term, sym

OWN, GENERATED, BUILT_IN = "maskproof/", "generated/", "/built-in/"
BESIDE = " beside causal=True"
KV, Q = sym("kv"), sym("q")
# What calls on a GPU differ in, the plainest first, and a number for all that is compiled in. Each
# is a kernel of its own, so that a campaign compiles each once, and shrinking none. The first of
# each layout has a small number, with which a fault shows on few keys. Kernels for few sequences
# have another scheduler.
Variant = tuple[dict[str, Any], int]
VARIANTS: tuple[Variant, ...] = (
    ({}, 3),
    ({"layout": VARLEN, "q_heads": 16}, 2),
    ({"layout": BATCHED, "q_heads": 24, "few": True}, 4),
    ({"page_size": 16, "q_heads": 8, "few": True}, 129),
    ({"layout": VARLEN, "head_dim": 192, "sink": True, "few": True}, 176),
    ({"layout": BATCHED, "q_heads": 8}, 1),
    ({"num_splits": 3, "page_size": 64, "q_heads": 12, "few": True}, 1),
    ({"head_dim": 64, "head_dim_v": 64, "dtype": "fp16", "q_heads": 20}, 65),
    ({"page_size": 256, "q_heads": 32, "pack_gqa": False}, 100),
    ({"page_size": 1, "q_heads": 28}, 128),
    ({"head_dim": 256, "head_dim_v": 256, "q_heads": 8}, 127),
    ({"num_splits": 100, "layout": VARLEN, "q_heads": 8}, 64),
    ({"page_size": 64, "q_heads": 64, "sink": True}, 300),
    ({"layout": VARLEN, "head_dim": 96, "head_dim_v": 96, "q_heads": 36, "few": True}, 80),
    ({"num_splits": 0, "page_size": 16, "q_heads": 4}, 511),
)
KEY_HEADS = 4
# Calls without a mask_mod: the spec, and how what they differ in follows from its window.
Flags = Callable[[int], dict[str, Any]]
FLAGS: dict[str, tuple[str, Flags]] = {
    "full": ("full", lambda window: {}),
    "causal": ("causal", lambda window: {"causal": True}),
    "window": ("window", lambda window: {"causal": True, "window_size_left": window - 1}),
    "window, right 0": ("window", lambda window: {
        "window_size_left": window - 1, "window_size_right": 0}),
    "window_symmetric": ("window_symmetric", lambda window: {
        "window_size_left": window - 1, "window_size_right": window - 1}),
    "dynamic_causal": ("dynamic_causal", lambda window: {"dynamic_causal": True, "causal": True}),
    "dynamic_causal_window": ("dynamic_causal_window", lambda window: {
        "dynamic_causal": True, "window_size_left": window - 1, "window_size_right": window - 1}),
    # Tiles are 144 keys wide there, which are loaded 32 at a time: the last load leaves the tile.
    "known-bad/paged, head dim 96": ("full", lambda window: {
        "layout": PAGED, "head_dim": 96, "head_dim_v": 96, "page_size": 64}),
    "known-bad/window -1, right 0": ("causal", lambda window: {
        "window_size_left": -1, "window_size_right": 0}),
    "known-bad/dynamic_causal alone": ("dynamic_causal", lambda window: {"dynamic_causal": True}),
    "known-bad/dynamic_causal_window, causal": ("dynamic_causal_window", lambda window: {
        "dynamic_causal": True, "causal": True,
        "window_size_left": window - 1, "window_size_right": window - 1}),
}


# What is known to be wrong is run only where it is named.
WRONG = {"equals-spec": "REFUTED"}


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
        provider = provider_of(found[0].target) if found else UPSTREAM
        right = {target.spec for target in found if not target.expected}
        made = [generated(text, provider) for text in source.generated if text not in right]
        yield {target.target: target for target in [*found, *made]}


def generated(text: str, provider: str = UPSTREAM) -> Target:
    """A mask_mod made from the formula of a mask, for the kernels of a provider."""
    from proofs.generated import constants_of, target

    mask = resolve(text)
    where = "" if provider == UPSTREAM else f"{provider}/"
    made = target(mask, mask.formula, f"{where}{GENERATED}{text}", constants_of(mask))
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


def built_in(found: Mapping[str, Target]) -> dict[str, Target]:
    """Calls of the same providers with the kernel's own flags and no mask_mod, by name."""
    providers = {provider_of(name): None for name in found if not is_file(name)}
    made = (
        Target(target=f"{provider}{BUILT_IN}{name}", spec=spec, make=_no_mask_mod,
               expected=WRONG if name.startswith("known-bad/") else {})
        for provider in providers for name, (spec, _) in FLAGS.items()
    )
    return {target.target: target for target in made}


def _no_mask_mod(at: Mapping[str, object]) -> NoReturn:
    raise TargetError("a call with built-in flags has no mask_mod")


def beside(found: Mapping[str, Target]) -> dict[str, Target]:
    """Calls with the same mask_mods and `causal=True`, by name.

    A kernel may apply both, or only one of them. Where the spec lies within causal these are one
    mask. Elsewhere they are not, and the call counts as known to be wrong.
    """
    made = (
        replace(target, target=name + BESIDE,
                expected={**target.expected, **({} if within_causal(target.spec) else WRONG)})
        for name, target in found.items() if not (is_file(name) or target.unsupported)
    )
    return {target.target: target for target in made}


def within_causal(spec: str) -> bool:
    """Whether no query sees a key behind it, as the structure of the formula shows: where that
    shows nothing the answer is False. (The tests try sampled cells.)"""
    return _past(resolve(spec).formula, True)


def _past(term: Term, value: bool) -> bool:
    """Whether `term` has this value only where kv <= q."""
    match term.op:
        case "const":
            return term.value is not value
        case "not":
            return _past(term.args[0], not value)
        case "and" | "or":
            some = any if (term.op == "and") == value else all
            return some(_past(part, value) for part in term.args)
        case "ite":
            return all(_past(part, value) for part in term.args[1:])
        case "any":
            return value and _past(term.args[1], value)
        case "le" | "lt":
            return term.args == ((KV, Q) if value else (Q, KV))
    return term.op == "eq" and value and {*term.args} == {KV, Q}


def mask_mods(targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets by the names that calls have for their mask_mods."""
    return {mask_mod_of(name): target for name, target in targets.items() if BUILT_IN not in name}


def mask_mod_of(name: str) -> str:
    """What a call with the target of this name has for its mask_mod: one that is made from a
    formula is the same for every provider."""
    name = name.removesuffix(BESIDE)
    return name[name.find(GENERATED):] if f"/{GENERATED}" in name else name


def provider_of(name: str) -> str:
    top = name.partition("/")[0]
    return top if top.startswith(f"{VLLM}-") else UPSTREAM


def call_of(target: Target, arch: str) -> Call:
    """The plainest call with this mask_mod."""
    constants = {k: v for k, v in target.constants.items() if k != "num_ranges"}
    return Call(provider=provider_of(target.target), spec=target.spec,
                mask_mod=mask_mod_of(target.target), causal=target.target.endswith(BESIDE),
                arch=arch, params=constants)


def in_turn(
    targets: Iterable[Target], arch: str = "sm_90", *, gpu: bool, most: int | None = None
) -> list[tuple[Target, Call]]:
    """The calls that a campaign takes in turn: of every target the plainest, then others, at most
    `most` of each."""
    rows = [[(target, call) for call in (islice(_variants(target, arch), most) if gpu else
                                         [call_of(target, arch)])] for target in targets]
    return [pair for column in zip_longest(*rows) for pair in column if pair is not None]


def _variants(target: Target, arch: str) -> Iterator[Call]:
    plain = replace(call_of(target, arch), kv_heads=KEY_HEADS, q_heads=KEY_HEADS)
    params = resolve(target.spec).params
    for fields, number in VARIANTS:
        call = replace(plain, **fields)
        names = target.symbols
        if BUILT_IN in target.target:
            flags = FLAGS[target.target.partition(BUILT_IN)[2]][1]
            names = tuple(params)
            call = replace(call, mask_mod=None, **flags(number))
        compiled_in = {name: max(params[name].low, min(number, params[name].high))
                       for name in names}
        yield replace(call, params={**call.params, **compiled_in})
