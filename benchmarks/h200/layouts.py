"""Two masks through every layout, wrong calls, numerics, and the tiles of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.h200.inputs import FIXED, RANGES, UPSTREAM, V24, V33, ahead, drawn
from benchmarks.h200.record import Record
from kernels.fa4 import BATCHED, VARLEN, Call, Fa4Error, Sequences, provider, supported
from kernels.readout import EVERY, SLOTS, Reader

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


@dataclass(frozen=True, slots=True)
class Read:
    """A read-out of `count` sequences of up to `longest` keys."""

    count: int
    longest: int
    seed: int

    def drawn(self, call: Call, options: Record) -> tuple[Sequences, Record]:
        more = {name: value for name, value in options.items() if name != "ranges"}
        ranges = options.get("ranges", RANGES)
        return drawn(self.seed, call.spec, self.count, self.longest, ranges=ranges), more

    def prepare(self, reader: Reader, call: Call, options: Record) -> None:
        sequences, more = self.drawn(call, options)
        reader.prepare(call, sequences, **more)

    def seen(self, reader: Reader, call: Call, options: Record) -> Record:
        sequences, more = self.drawn(call, options)
        reading = reader.read(call, sequences, **more)
        return {"cells": reading.cells, "rows": reading.rows, "launches": reading.launches,
                "wrong": reading.total, "counts": dict(reading.counts),
                "kernels_of": reading.fa4}


def layout_calls(name: str) -> Iterator[Item]:
    """The same two masks through every layout, page size, head count and dtype."""
    base = Call(provider=name, spec="causal", causal=True, kv_heads=2, q_heads=2)
    own = replace(base, causal=False, spec="mm_prefix", params=WINDOW,
                  mask_mod="maskproof/mm_prefix[window]")
    variants: list[Item] = [
        (label, replace(base, **fields), options) for label, fields, options in (
            ("varlen", {"layout": VARLEN}, {}), ("batched", {"layout": BATCHED}, {}),
            *((f"page size {size}", {"page_size": size}, {}) for size in (1, 16, 48, 64, 128, 256)),
            ("fp16", {"dtype": "fp16"}, {}), ("sink", {"sink": True}, {}),
            ("GQA 8", {"q_heads": 16}, {}), ("GQA 3", {"q_heads": 6}, {}),
            ("GQA 8, every head", {"q_heads": 16}, {"heads": EVERY}),
            ("GQA 8, unpacked", {"q_heads": 16, "pack_gqa": False}, {}),
            ("head dim 64", {"head_dim": 64, "head_dim_v": 64}, {}),
            ("head dims 192, 128", {"head_dim": 192}, {}),
            ("head dim 256", {"head_dim": 256, "head_dim_v": 256}, {}),
            ("3 splits", {"num_splits": 3}, {}), ("100 splits", {"num_splits": 100}, {}),
        )
    ]
    for label, varied, options in variants:
        fields = {key: getattr(varied, key) for key in (
            "layout", "page_size", "dtype", "sink", "q_heads", "pack_gqa", "head_dim",
            "head_dim_v", "num_splits")}
        yield f"causal, {label}", replace(base, **fields), options
        yield f"mm_prefix, {label}", replace(own, **fields), options
    # With a mask_mod the first page is read even of a sequence without keys: no NaN for that.
    for size in (128, 16):
        yield (f"causal, NaN behind the last key, page size {size}",
               replace(base, page_size=size), {"nan": SLOTS})


def layouts(options: Any) -> Record:
    how = Read(100, 700, 2)
    items = [item for name in (V33, UPSTREAM) for item in layout_calls(name)]
    return summed(each(items, how.seen, how.prepare))


def summed(found: list[Record]) -> Record:
    return {"cells": sum(one.get("cells", 0) for one in found),
            "wrong": sum(one.get("wrong", 0) for one in found), "calls": found}


def wrong_calls() -> Iterator[Item]:
    """Calls that do not compute what they are taken for."""
    base = Call(provider=V33, spec="full", kv_heads=4, q_heads=4)
    sides = {"window_size_left": FIXED["window"] - 1, "window_size_right": FIXED["window"] - 1}
    yield "a mask_mod beside causal=True", replace(
        base, spec="mm_prefix", mask_mod=f"{V33}/mm_prefix[window]", causal=True, params=WINDOW), {}
    yield "R-SWA as vLLM calls it", replace(
        base, spec="rswa", mask_mod=f"{V33}/rswa", causal=True, params=WINDOW), {}
    yield "dynamic_causal beside causal=False", replace(
        base, spec="dynamic_causal", dynamic_causal=True), {}
    yield "dynamic_causal beside causal=True and a window", replace(
        base, spec="dynamic_causal_window", dynamic_causal=True, causal=True, params=WINDOW,
        **sides), {}
    for name in (UPSTREAM, V33):
        yield "window (-1, 0)", replace(
            base, provider=name, spec="causal", window_size_left=-1, window_size_right=0), {}
        yield "no window term", replace(
            base, provider=name, spec="mm_prefix", params=WINDOW,
            mask_mod="maskproof/known-bad/no-window-term"), {}
    yield "vLLM 0.24.0's mm_prefix", replace(
        base, provider=V24, spec="mm_prefix", mask_mod=f"{V24}/mm_prefix[window,ranges=8]",
        params=WINDOW), {"ranges": 8}


def wrong(options: Any) -> Record:
    how = Read(300, 1024, 1)
    return summed(each(wrong_calls(), how.seen, how.prepare))


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
            reader.read(call, sequences)
            begin = perf_counter()
            readings = [reader.read(call, sequences) for _ in range(10)]
            found.append({
                "tile": tile, "span": span, "warps": warps, "stripe": stripe,
                "wrong": readings[0].total,
                "compare_seconds": min(one.compare_seconds for one in readings),
                "wall_seconds": (perf_counter() - begin) / len(readings)})
            print(found[-1], flush=True)
    return {"cells": readings[0].cells, "tried": found}
