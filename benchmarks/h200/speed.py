"""The pipeline beside the usual test, and read-out data beside random data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.h200.feed import Feed
from benchmarks.h200.inputs import RANGES, V33, ahead, drawn, params_of, random_data
from benchmarks.h200.record import Record
from benchmarks.h200.usual import measured
from fuzz.strategies import Space
from kernels.derived import on_device
from kernels.fa4 import MANY, VARLEN, Call, Sequences, provider, shapes
from kernels.pages import NOWHERE, pages
from kernels.readout import Reader
from spec.masks import MASKS

# Key heads and their dims show 512 keys in one launch, most quickly so with few wide heads.
COUNT, LONGEST, HEADS, DIM = 16384, 512, 2, 256
DRAWING, DEPTH, SECONDS, WARM = 12, 4, 1.0, 24
SAMPLED = 48  # sequences of each of the first batches that the usual test is given
LONG, LONG_COUNT, LONG_HEADS = 4096, 16, 32
REPEATS, WARM_LAUNCHES = 9, 3
MEMORY = 24 << 30
SLEEP = 2_000_000  # cycles: 1 ms
# The release's own mask_mods; all others are generated from the formula.
OWN = {"mm_prefix": "mm_prefix[window]", "mm_prefix_no_window": "mm_prefix[no-window]",
       "mm_prefix_clamped": "mm_prefix[clamp]", "rswa": "rswa"}


def call_of(spec: str, **fields: Any) -> Call:
    mask_mod = f"{V33}/{OWN[spec]}" if spec in OWN else "generated"
    params = params_of(spec)
    if spec in OWN:  # these are given the own range of each query
        params.pop("num_ranges", None)
    return Call(provider=V33, spec=spec, mask_mod=mask_mod, params=params, **fields)


def calls_of(spec: str) -> dict[str, Call]:
    """The call of the pipeline, of the usual test, and of the longest sequences."""
    return {
        "pipeline": call_of(spec, kv_heads=HEADS, q_heads=HEADS, head_dim=DIM, head_dim_v=DIM),
        "usual": call_of(spec, layout=VARLEN),
        "long": call_of(spec, kv_heads=LONG_HEADS, q_heads=LONG_HEADS),
    }


def run(options: Any) -> Record:
    specs = options.spec or list(MASKS)
    calls = {spec: calls_of(spec) for spec in specs}
    causal = Call(provider=V33, spec="causal", causal=True, kv_heads=LONG_HEADS,
                  q_heads=LONG_HEADS)
    spaces = [Space(call=calls[spec]["pipeline"], mask=MASKS[spec], longest=LONGEST,
                    constants={**calls[spec]["pipeline"].params, "num_ranges": RANGES})
              for spec in specs]
    with provider(V33) as source:
        feed = Feed(spaces, COUNT, DRAWING)  # before this process touches CUDA
        try:
            reader = Reader(source, memory=MEMORY)
            ahead([partial(source.compile, causal, LONG_COUNT),
                   *(job for each in calls.values() for job in to_compile(reader, each))])
            found = [of_spec(source, reader, feed, which, calls[spec], causal)
                     for which, spec in enumerate(specs)]
        finally:
            feed.stop()
    return {"provider": V33, "sequences": COUNT, "longest": LONGEST, "processes": DRAWING,
            "in_flight": DEPTH, "long_keys": LONG, "long_sequences": LONG_COUNT, "specs": found}


def to_compile(reader: Reader, calls: dict[str, Call]) -> list[Callable[[], None]]:
    call = calls["pipeline"]
    like = drawn(1, call.spec, MANY + 1, LONGEST)
    return [partial(reader.prepare, call, like, nan=NOWHERE),
            partial(reader.source.compile, calls["usual"], 1),
            partial(reader.source.compile, calls["long"], LONG_COUNT)]


def of_spec(
    source: Any, reader: Reader, feed: Feed, which: int, calls: dict[str, Call], causal: Call
) -> Record:
    spec = calls["pipeline"].spec
    found: Record = {"spec": spec, "mask_mod": calls["pipeline"].mask_mod}
    found["pipeline"], some = pipeline(reader, feed, which, calls["pipeline"])
    found["usual"] = measured(source, calls["usual"], some)
    for name, per in (("cells", "cells_per_second"), ("sequences", "sequences_per_second")):
        usual = found["usual"][per if name == "cells" else "cases_per_second"]
        found[f"{name}_ratio"] = found["pipeline"][per] / usual
    found["long"] = longest(source, calls["long"], causal)
    print(spec, {name: f"{found[name]:.4g}" for name in ("cells_ratio", "sequences_ratio")},
          {name: found["pipeline"][name] for name in
           ("cells_per_second", "sequences_per_second", "kernel_share", "wrong")},
          found["usual"]["variant"], found["long"], flush=True)
    return found


def pipeline(
    reader: Reader, feed: Feed, which: int, call: Call
) -> tuple[Record, list[Sequences]]:
    """End to end: drawn by other processes, started DEPTH deep, held against the spec. The clock
    starts when WARM batches have gone through; some sequences of each of these are given back. As
    many slots are full at its end as were at its start."""
    feed.ask(which)
    waiting: deque[Any] = deque()
    done: list[Any] = []
    counts: list[Any] = []
    some: list[Sequences] = []
    begin = 0.0
    while not begin or perf_counter() - begin < SECONDS:
        for child, _, slot, sequences in feed.ready():
            if len(some) < WARM:
                some.append(sampled(sequences, len(some)))
            waiting.append(reader.start(call, sequences, nan=NOWHERE))
            # The usual test is not given those without a cell.
            counts.append(np.count_nonzero(sequences.seqlens_q * sequences.seqlens_k))
            feed.again(child, which, slot)
            if len(waiting) > DEPTH:
                done.append(waiting.popleft().finish())
        if not begin and len(done) >= WARM:
            while waiting:
                waiting.popleft().finish()
            done.clear()
            counts.clear()
            begin = perf_counter()
    while waiting:
        done.append(waiting.popleft().finish())
    wall = perf_counter() - begin
    feed.drain()
    cells, kernel = sum(one.cells for one in done), sum(one.kernel_seconds for one in done)
    return {
        "batches": len(done), "sequences": int(sum(counts)), "cells": cells,
        "wrong": sum(one.total for one in done), "seconds": wall, "kernel_seconds": kernel,
        "compare_seconds": sum(one.compare_seconds for one in done),
        "cells_per_second": cells / wall, "sequences_per_second": int(sum(counts)) / wall,
        "kernel_share": kernel / wall, "kernel_cells_per_second": cells / kernel,
    }, some


def sampled(sequences: Sequences, seed: int) -> Sequences:
    """A copy of some of the sequences, in any order."""
    which = np.random.default_rng(seed).permutation(len(sequences))[:SAMPLED]
    kept = sequences.select(which)
    return Sequences(kept.seqlens_q, kept.seqlens_k,
                     {name: np.array(table) for name, table in kept.tables.items()})


def longest(source: Any, call: Call, causal: Call) -> Record:
    """Median kernel seconds of one launch at LONG keys: of read-out data, of random data with the
    same mask_mod, and of read-out data with the built-in causal mask."""
    lengths = np.arange(LONG - LONG_COUNT + 1, LONG + 1, dtype=np.int32)
    tables = drawn(7, call.spec, LONG_COUNT, LONG).tables  # of other lengths, which none minds
    sequences = Sequences(lengths, lengths, tables)
    launches = {
        "readout": prepared(source, call, sequences, readout_data(call, sequences)),
        "random": prepared(source, call, sequences, random_data(call, sequences)),
        "built_in_causal": prepared(source, causal, sequences, readout_data(causal, sequences)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in launches}
    for i in range(WARM_LAUNCHES + REPEATS):
        for name, launch in launches.items():
            took = launch()
            if i >= WARM_LAUNCHES:
                seconds[name].append(took)
    found = {f"{name}_seconds": median(each) for name, each in seconds.items()}
    return {**found, "to_random": found["readout_seconds"] / found["random_seconds"],
            "to_causal": found["readout_seconds"] / found["built_in_causal_seconds"]}


def prepared(source: Any, call: Call, sequences: Sequences, given: dict[str, Any]) -> Any:
    """A function that launches the kernel once and gives the seconds that it took on the GPU."""
    import torch

    on = on_device(call, source.layout(call), sequences, "cuda")

    def launch() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)  # so that the kernel is enqueued before its turn comes
        begin.record()
        source.launch(call, on, **given)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return launch


def readout_data(call: Call, sequences: Sequences) -> dict[str, Any]:
    """What a read-out gives the kernel of its first launch: Q = K = 0, and shared pages."""
    import torch

    shared = pages(call, NOWHERE, "cuda")
    given = {name: torch.zeros(shape, dtype=dtype, device="cuda")
             for name, (shape, dtype) in shapes(call, sequences).items() if name not in ("k", "v")}
    lengths = torch.from_numpy(sequences.seqlens_k).cuda()
    width = given["page_table"].shape[1]
    return {**given, "k": shared.k, "v": shared.v, "page_table": shared.table(0, lengths, width)}
