"""Random data beside a float32 reference, and the tiles of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.h200.inputs import FIXED, UPSTREAM, V33, ahead, drawn
from benchmarks.h200.record import Record
from kernels.fa4 import BATCHED, VARLEN, Call, Fa4Error, provider, supported
from kernels.readout import NOWHERE, Reader

WINDOW = {"window": FIXED["window"]}
Item = tuple[str, Call, Record]
SEQUENCES = 20  # sequences of random data


Seen = Callable[[Reader, Call, Record], Record]


def each(items: Iterable[Item], seen: Seen, prepare: Callable[..., None]) -> list[Record]:
    """What is seen of each call; what a provider does not do is said instead. All is compiled by
    `prepare` in processes forked from this one before it touches CUDA."""
    work = list(items)
    with ExitStack() as scope:
        readers = {name: Reader(scope.enter_context(provider(name)))
                   for name in dict.fromkeys(call.provider for _, call, _ in work)}
        ahead([partial(prepare, readers[call.provider], call, options)
               for _, call, options in work if supported(call) is None])
        return [one(item, readers, seen) for item in work]


def one(item: Item, readers: dict[str, Reader], seen: Seen) -> Record:
    label, call, options = item
    found: Record = {"provider": call.provider, "label": label}
    try:
        if reason := supported(call):
            raise Fa4Error(reason)
        found |= seen(readers[call.provider], call, options)
    except Fa4Error as error:
        found["not_done"] = str(error)
    except Exception as error:  # noqa: BLE001  the others are still of use
        found["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
    print(found, flush=True)
    return found


def numeric_calls() -> Iterator[Item]:
    shapes: tuple[Record, ...] = (
        {}, {"page_size": 16}, {"layout": VARLEN}, {"layout": BATCHED}, {"dtype": "fp16"},
        {"dtype": "fp16", "layout": VARLEN}, {"softcap": 15.0}, {"softcap": 15.0, "dtype": "fp16"},
        {"sink": True}, {"sink": True, "layout": VARLEN}, {"q_heads": 16}, {"num_splits": 3},
        {"num_splits": 3, "dtype": "fp16"}, {"head_dim": 64, "head_dim_v": 64},
        {"head_dim": 256, "head_dim_v": 256},
    )
    for name in (V33, UPSTREAM):
        for fields in shapes:
            label = ", ".join(f"{key}={value}" for key, value in fields.items()) or "plain"
            yield label, Call(provider=name, spec="causal", causal=True, kv_heads=2,
                              **{"q_heads": 4, **fields}), {}
        yield "mask_mod mm_prefix", Call(
            provider=name, spec="mm_prefix", mask_mod="maskproof/mm_prefix[window]", kv_heads=2,
            q_heads=4, params=WINDOW), {}


def measured(reader: Reader, call: Call, options: Record) -> Record:
    found = reader.measure(call, drawn(3, call.spec, SEQUENCES, 700))
    return {**asdict(found), "agrees": found.agrees}


def compiled(reader: Reader, call: Call, options: Record) -> None:
    reader.source.compile(call, SEQUENCES)


def numerics(options: Any) -> Record:
    return {"calls": each(numeric_calls(), measured, compiled)}


def tune(options: Any) -> Record:
    """Seconds of the comparison by its tile, span, warps and stripe, of one large batch."""
    from kernels import readout

    call = Call(provider=V33, spec="mm_prefix", mask_mod=f"{V33}/mm_prefix[window]",
                params=WINDOW, kv_heads=4, q_heads=4)
    found = []
    with provider(V33) as source:
        reader, sequences = Reader(source), drawn(1, call.spec, 4096, 512)
        for tile, span, warps, stripe in readout.SIZES:
            readout.TILE, readout.SPAN, readout.WARPS, readout.STRIPE = tile, span, warps, stripe
            reader.read(call, sequences, nan=NOWHERE)
            begin = perf_counter()
            readings = [reader.read(call, sequences, nan=NOWHERE) for _ in range(10)]
            found.append({
                "tile": tile, "span": span, "warps": warps, "stripe": stripe,
                "wrong": readings[0].total,
                "compare_seconds": min(one.compare_seconds for one in readings),
                "wall_seconds": (perf_counter() - begin) / len(readings)})
            print(found[-1], flush=True)
    return {"cells": readings[0].cells, "tried": found}
