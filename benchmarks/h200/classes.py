"""The boundary classes of `fuzz.boundaries`, and which of them a call cannot have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fuzz.boundaries import classes
from fuzz.case import stated
from fuzz.findings import path_of
from fuzz.sequences import Sequences
from fuzz.strategies import NO_MORE_QUERIES
from fuzz.targets import Source, built_in, chosen, gathered, in_turn
from kernels.fa4 import Call, supported
from kernels.target import Target
from spec.from_file import resolve
from spec.masks import Mask

# The table that a class is told by, and what a mask without it is said to have.
NEEDS = {"ranges": "no ranges", "prefix_lens": "no prefix", "dynamic_causal": "no flags"}


def names() -> list[str]:
    """Every class that there is."""
    return [name for group in by_table().values() for name in group]


def by_table() -> dict[str, list[str]]:
    """The classes by what they are told by: a table of NEEDS, "window", or "" for lengths."""
    found: dict[str, list[str]] = {"": list(_named("full"))}
    for key, spec in (("window", "window"), ("ranges", "same_range"),
                      ("prefix_lens", "prefix_lm"), ("dynamic_causal", "dynamic_causal")):
        found[key] = [name for name in _named(spec) if name not in found[""]]
    return found


def _named(spec: str) -> Iterable[str]:
    mask, one = resolve(spec), np.ones(1, dtype=np.int64)
    tables = {"ranges": np.zeros((1, 1, 2)), "prefix_lens": one, "dynamic_causal": one}
    tables = {name: table for name, table in tables.items() if name in stated(mask)}
    call = Call(provider="", spec=spec, params=dict.fromkeys(mask.params, 1))
    return classes(mask, call, Sequences(one, one, tables))


def impossible(mask: Mask, calls: Sequence[Call], name: str, longest: int = 512) -> str | None:
    """Why no sequence of up to `longest` keys in any of the calls can be in a class, or None.

    A parameter that a call leaves out is drawn; one that it holds is compiled in, or is a flag.
    """
    table = next(key for key, group in by_table().items() if name in group)
    if name == "more queries than keys" and NO_MORE_QUERIES in mask.assume:
        return "not defined for more queries than keys"
    if table in NEEDS and table not in stated(mask):
        return NEEDS[table]
    if table != "window":
        return None
    if "window" not in mask.params:
        return "no window"
    windows = [call.params.get("window") for call in calls]
    if None in windows:
        return None
    if any(_holds(name, window, longest) for window in windows if window is not None):
        return None
    return "its windows are " + ", ".join(str(window) for window in sorted(set(windows)))


def _holds(name: str, window: int, longest: int) -> bool:
    """Whether a window class holds for some number of keys."""
    keys = np.arange(longest + 1)
    call = Call(provider="", spec="window", params={"window": window})
    found = classes(resolve("window"), call, Sequences(keys, keys, {}))
    return bool(found[name].any())


Groups = dict[str, tuple[str, str, list[Call]]]


def groups(vllm: str | None, specs: Sequence[str], gpu: bool = True) -> dict[str, Groups]:
    """What campaigns on each spec may run: of each path the target, its layout, and the calls."""
    with gathered(Source(vllm=vllm, generated=tuple(specs))) as found:
        every = {**found, **(built_in(found) if gpu else {})}
        return {spec: _paths(chosen(every, [], [spec]), gpu) for spec in specs}


def _paths(targets: Mapping[str, Target], gpu: bool) -> Groups:
    paths: Groups = {}
    for target, call in in_turn(targets.values(), gpu=gpu):
        if target.unsupported or gpu and supported(call):
            continue
        layout = call.layout if gpu else "any"
        path = path_of(call, "gpu" if gpu else "cpu")
        entry = paths.setdefault(path, (target.target, layout, []))
        assert entry[0] == target.target, path
        entry[2].append(call)
    return paths


def counted(
    mask: Mask, paths: Groups,
    seen: Mapping[str, Mapping[str, int]],
) -> list[dict]:
    """For each target and layout the sequences in each class, or why there can be none."""
    calls: dict[tuple[str, str], list[Call]] = {}
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for path, (target, layout, own) in paths.items():
        key = target, layout
        calls.setdefault(key, []).extend(own)
        into = sums.setdefault(key, {})
        for name, count in seen.get(path, {}).items():
            into[name] = into.get(name, 0) + count
    return [
        {"target": target, "layout": layout, "classes": {
            name: sums[target, layout].get(name, 0)
            or impossible(mask, calls[target, layout], name) or 0
            for name in names()}}
        for target, layout in calls
    ]


