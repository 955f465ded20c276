"""What the proofs say that kernels of released versions do, as calls to make of a GPU.

    python -m benchmarks.claims CHECK.json          writes it, from what `spec.check --json` wrote

A claim is a refuted obligation. It holds the call that is wrong, the mask that the proof says the
kernel applies in place of the one that is meant, and the proof's witness. The section `confirm` of
`python -m benchmarks.h200` reads the masks out of the kernels, where there is no solver.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from kernels.fa4 import UPSTREAM, Call, release_of
from kernels.keyed_mask_mods import PARTS
from kernels.machine import CannotLift
from kernels.provider import Provider, installed, of_release
from proofs.baseline import digest, wrong
from spec.from_file import resolve
from spec.to_text import to_text

Record = dict[str, Any]
FILE = Path(__file__).with_name("claims.json")
# The window where a proof needs none, but the call has one.
WINDOW = 8
NO_BOUND = "window(-1,0)"
FORWARD = "_flash_attn_fwd"


def claims(records: Iterable[Record]) -> list[Record]:
    """One for each refuted obligation about what a kernel does; `left_out` says why there is no
    call."""
    return [claim(one) for one in records if wrong(one) and one["layer"] in MAKERS]


def claim(one: Record) -> Record:
    known = {name: one[name] for name in ("target", "obligation", "layer", "spec")}
    known |= {"digest": digest(one), "sentence": one["diagnosis"]["sentence"]}
    try:
        return known | MAKERS[one["layer"]](one)
    except CannotLift as refusal:
        return known | {"left_out": str(refusal)}


def of_mask_mod(one: Record) -> Record:
    """The mask_mod of a release, with no flag beside it."""
    call = Call(provider=provider_name(one), spec=one["spec"], mask_mod=one["target"],
                params=params(one))
    return {**masks(one), "call": plain(call)}


def of_flags(one: Record) -> Record:
    """Flags as they reach FA4: -1 for no left bound, or what the release's `forward` hands on."""
    unit = one["target"].partition("/")[2].partition("/")[2]
    name, spec = provider_name(one), one["spec"]
    if not unit:
        return {**masks(one), "call": plain(Call(
            provider=name, spec=spec, window_size_left=-1, window_size_right=0))}
    from kernels.forward import call

    left = one["witness"].get("layer_window" if spec == "rswa" else "window", WINDOW) - 1
    found = call(provider(one), wrong_layer(one, unit), left)
    flags, asked = found.flags, found.flags["mask_mod"]
    made = {} if asked is None else {"factory": {
        "name": asked.factory, "arguments": dict(asked.arguments), "layout": found.layout}}
    shown = asked and ", ".join(f"{k}={v}" for k, v in asked.arguments.items())
    return {**masks(one), **made, "call": plain(Call(
        provider=name, spec=spec, params=params(one), causal=bool(flags["causal"]),
        window_size_left=flags["window_size_left"], window_size_right=flags["window_size_right"],
        dynamic_causal=flags["dynamic_causal"] is not None,
        mask_mod=asked and f"{name}/{asked.factory}({shown})"))}


def wrong_layer(one: Record, unit: str) -> Any:
    """The layer that the diagnosis is about: the first whose call is wrong."""
    from proofs.calls import groups

    named = one["reason"].partition("are wrong: ")[2].partition("; ")[0]
    return next(layer for layer in groups(provider(one))[unit] if named in ("", str(layer)))


def masks(one: Record) -> Record:
    return {"kind": "mask", "effective": readable(one["diagnosis"]["variation"]),
            "witness": witness(one)}


def readable(formula: str) -> str:
    """As a spec that a call can have: a bare name would be one of the catalogue."""
    return f"({formula})" if formula.isidentifier() else formula


def of_keys(one: Record) -> Record:
    """Two calls with one compile key, the mask of each, and how to make its mask_mod."""
    first, then = (asked(one, one["witness"][name]) for name in ("first", "then"))
    return {"kind": "key", "first": first, "then": then}


def asked(one: Record, text: str) -> Record:
    aspect = one["target"].rpartition("/")[2]
    part = aspect.removeprefix("mask_mod.")
    name = provider_name(one)
    if part in PARTS:
        label, make = next(((label, make) for label, make in PARTS[part][1]
                            if text == f"{FORWARD}(mask_mod={label})"), (text, None))
        if make is not None:
            return {"part": part, "call": plain(Call(
                provider=name, spec=computed(make), mask_mod=label))}
    tensor = re.fullmatch(rf"{FORWARD}\(dynamic_causal=(None|int32\[\d+\])\)", text)
    if aspect != "dynamic_causal" or not tensor:
        raise CannotLift(f"no read-out of {text}")
    return {"call": plain(Call(provider=name, dynamic_causal=tensor[1] != "None",
                               spec=flagged(one, tensor[1] != "None")))}


def computed(make: Callable[[], Any]) -> str:
    """The mask that a mask_mod without tables computes, in a kernel's indices."""
    from kernels.from_cute import lift
    from kernels.target import Target

    found = lift(Target(target="keyed", spec="full", make=lambda symbols: make(), layouts=((),)))
    return to_text(found.lanes[0])


def flagged(one: Record, dynamic_causal: bool) -> str:
    from kernels.dispatch import Flags
    from kernels.dispatch import of_flags as meant
    from kernels.stand_in import Paths

    mask = meant(provider(one), Flags(False, None, None, dynamic_causal, False), Paths([])).mask
    assert mask is not None
    return readable(to_text(mask))


def of_sampling(one: Record) -> Record:
    """The mask_mod with which FA4 is to classify blocks, and the cell that each thread looks at."""
    from kernels.block_info import lifted
    from kernels.sampling import NAMES, _work
    from kernels.vllm import branches, load
    from spec.tiles import Tile

    name, spec = provider_name(one), one["spec"]
    m, n = map(int, re.findall(r"\[(\d+)x(\d+)\]", one["target"])[0])
    with load(release_of(name)) as loaded:
        mask_mod = next(each.target for each in branches(loaded) if each.spec == spec)
    with provider(one).served() as served:
        point, _ = lifted(_work(served, Tile(m, n)), NAMES)
    return {
        "kind": "blocks", "tile": [m, n], "point": [to_text(each) for each in point],
        "witness": {**witness(one), **{k: one["witness"][k] for k in ("m_block", "n_block")}},
        "call": plain(Call(provider=name, spec=spec, mask_mod=mask_mod, params=params(one))),
    }


def provider_name(one: Record) -> str:
    top = one["target"].partition("/")[0]
    return top if top.startswith("vllm-") else UPSTREAM


def provider(one: Record) -> Provider:
    name = provider_name(one)
    return installed() if name == UPSTREAM else of_release(release_of(name))


def params(one: Record) -> dict[str, int]:
    """Those of the spec that are no counts."""
    names = resolve(one["spec"]).params.keys() - {"num_ranges"}
    return {name: one["witness"].get(name, WINDOW) for name in sorted(names)}


def plain(call: Call) -> Record:
    """Only what a call does not have by default."""
    return {f.name: value for f in fields(call) if (value := asdict(call)[f.name]) != (
        {} if f.name == "params" else f.default)}


def witness(one: Record) -> Record:
    """The cell, and its sequence: lengths and what each table says of it."""
    found = one["witness"]
    tables = nested(found["tables"])
    if "query_ranges" in tables:
        raise CannotLift("the witness is of rows and not of ranges")
    given = {name: table[found.get("b", 0)].tolist() for name, table in tables.items()
             if name != "cu_seqlens_q"}
    return {**{k: found[k] for k in ("seqlen_q", "seqlen_k", "q_idx", "kv_idx")}, "tables": given}


def nested(tables: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Tables whose elements may each be given by themselves, as `ranges[0, 1, 0]`."""
    found = {name: np.array(table) for name, table in tables.items() if "[" not in name}
    single: dict[str, dict[tuple[int, ...], int]] = {}
    for text, value in tables.items():
        name, _, index = text.partition("[")
        if index:
            single.setdefault(name, {})[tuple(map(int, index[:-1].split(",")))] = value
    for name, elements in single.items():
        shape = np.max(list(elements), axis=0) + 1
        found[name] = np.full(shape, -1 if "ranges" in name else 0)
        for index, value in elements.items():
            found[name][index] = value
    return found


MAKERS: Mapping[str, Callable[[Record], Record]] = {
    "mask_mod": of_mask_mod, "dispatch": of_flags, "keys": of_keys, "sampling": of_sampling,
}


def main() -> None:
    (check,) = sys.argv[1:]
    found = claims(json.loads(Path(check).read_text())["results"])
    lines = ",\n".join(" " + json.dumps(one) for one in found)
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
