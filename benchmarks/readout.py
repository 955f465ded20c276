"""What the read-out sees in real kernels, and how fast: needs a GPU.

    python benchmarks/readout.py --json OUT.json [--only SECTION ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from kernels.fa4 import (
    BATCHED,
    VARLEN,
    Call,
    Fa4Error,
    Sequences,
    compile_key,
    provider,
    supported,
)  # fmt: skip
from kernels.readout import EVERY, NOWHERE, SLOTS, Reader, Reading
from spec.from_file import resolve

Rng = np.random.Generator
Record = dict[str, Any]
RANGES = 4
FIXED = {"window": 129, "chunk": 100, "sink": 5}


def drawn(
    rng: Rng, spec: str, count: int, longest: int, *, prefill: float = 0.5, empty: bool = True
) -> Sequences:
    """`count` sequences of up to `longest` keys, with the tables that the spec reads."""
    mask = resolve(spec)
    seqlens_k = rng.integers(0, longest + 1, count)
    seqlens_q = np.where(
        rng.random(count) < prefill, rng.integers(0, seqlens_k + 1), np.minimum(seqlens_k, 1)
    )
    more = rng.random(count) < (0 if mask.assume else 0.05)
    seqlens_q = np.where(more, rng.integers(0, longest // 2 + 1, count), seqlens_q)
    if not empty:
        seqlens_q = np.where(seqlens_k > 0, seqlens_q, 0)
    lengths = seqlens_q.astype(np.int32), seqlens_k.astype(np.int32)
    tables: dict[str, Any] = {}
    names = set(mask.tables)
    if "ranges" in names:
        edges = np.sort(rng.integers(0, longest + 40, (count, 2 * RANGES)), axis=1)
        edges += np.arange(2 * RANGES)
        ranges = edges.reshape(count, RANGES, 2)
        ranges[rng.random((count, RANGES)) < 0.3] = -1
        tables["query_ranges"] = own_rows(ranges, *lengths)
        tables["ranges"] = ranges
    if "prefix_lens" in names:
        tables["prefix_lens"] = rng.integers(0, seqlens_k + 3)
    if "dynamic_causal" in names:
        tables["dynamic_causal"] = rng.integers(0, 2, count)
    if "document_ids" in names:
        tables["document_ids"] = np.sort(rng.integers(0, 6, longest + 1))
    return Sequences(*lengths, {k: np.ascontiguousarray(v, np.int32) for k, v in tables.items()})


def own_rows(ranges: Any, seqlens_q: Any, seqlens_k: Any) -> Any:
    """For each packed query the range that holds it, or (-1, -1)."""
    b = np.repeat(np.arange(len(seqlens_q)), seqlens_q)
    start = np.cumsum(seqlens_q) - seqlens_q
    q = np.arange(len(b)) - start[b] + seqlens_k[b] - seqlens_q[b]
    rows = np.full((len(b), 2), -1, np.int64)
    for r in range(ranges.shape[1]):
        first, last = ranges[b, r].T
        inside = (first <= q) & (q <= last)
        rows[inside] = ranges[b[inside], r]
    return rows


def shown(reading: Reading) -> Record:
    record = asdict(reading)
    record["wrong"] = [asdict(each) for each in reading.wrong[:4]]
    record["by_sequence"] = len(reading.by_sequence)
    record["kernel_cells_per_second"] = reading.cells / max(reading.kernel_seconds, 1e-9)
    return record


class Readers:
    """One open reader a provider."""

    def __init__(self, scope: ExitStack) -> None:
        self.scope, self.found = scope, dict[str, Reader]()

    def __getitem__(self, name: str) -> Reader:
        if name not in self.found:
            self.found[name] = Reader(self.scope.enter_context(provider(name)))
        return self.found[name]


V33, V24, UP = "vllm-0.33.0", "vllm-0.24.0", "upstream"


def right_calls(name: str) -> Iterator[tuple[str, Call]]:
    """Calls that are to be right on a provider."""
    base = Call(provider=name, spec="full", kv_heads=4, q_heads=4)
    window = FIXED["window"]
    yield "full", base
    yield "causal", replace(base, spec="causal", causal=True)
    sliding = {"spec": "window", "params": {"window": window}}
    yield "window", replace(base, causal=True, window_size_left=window - 1, **sliding)
    yield "window, right 0", replace(
        base, window_size_left=window - 1, window_size_right=0, **sliding
    )
    yield "window_symmetric", replace(
        base, spec="window_symmetric", params={"window": window},
        window_size_left=window - 1, window_size_right=window - 1,
    )
    if name != UP:
        yield "dynamic_causal", replace(
            base, spec="dynamic_causal", dynamic_causal=True, causal=True
        )
        yield "dynamic_causal_window", replace(
            base, spec="dynamic_causal_window", params={"window": window}, dynamic_causal=True,
            window_size_left=window - 1, window_size_right=window - 1,
        )
    for kind, spec in (("window", "mm_prefix"), ("no-window", "mm_prefix_no_window"),
                       ("clamp", "mm_prefix_clamped")):
        params = {"window": window} if kind != "no-window" else {}
        for origin in ("maskproof", V33):
            if origin != V33 or name == V33:
                yield f"{origin}/mm_prefix[{kind}]", replace(
                    base, spec=spec, params=params, mask_mod=f"{origin}/mm_prefix[{kind}]"
                )
    for origin in ("maskproof", V33):
        if origin != V33 or name == V33:
            yield f"{origin}/rswa", replace(
                base, spec="rswa", params={"window": window}, mask_mod=f"{origin}/rswa"
            )
    for spec in ("prefix_lm", "chunked_local", "sink_window", "document", "same_range",
                 "dynamic_causal_window", "mm_prefix"):
        used = {k: v for k, v in FIXED.items() if k in resolve(spec).params}
        counts = {"num_ranges": RANGES} if "num_ranges" in resolve(spec).params else {}
        yield f"generated/{spec}", replace(
            base, spec=spec, params={**used, **counts}, mask_mod="generated"
        )


def wrong_calls() -> Iterator[tuple[str, Call]]:
    """Calls that FACTS says are wrong."""
    base = Call(provider=V33, spec="full", kv_heads=4, q_heads=4)
    window = {"params": {"window": FIXED["window"]}}
    yield "mask_mod with causal=True ignored", replace(
        base, spec="mm_prefix", mask_mod=f"{V33}/mm_prefix[window]", causal=True, **window
    )
    yield "rswa as vLLM calls it", replace(
        base, spec="rswa", mask_mod=f"{V33}/rswa", causal=True, **window
    )
    yield "dynamic_causal with causal=False", replace(
        base, spec="dynamic_causal", dynamic_causal=True
    )
    yield "dynamic_causal with causal=True and a window", replace(
        base, spec="dynamic_causal_window", dynamic_causal=True, causal=True,
        window_size_left=FIXED["window"] - 1, window_size_right=FIXED["window"] - 1, **window
    )
    for name in (UP, V33):
        yield f"{name}: window (-1, 0)", replace(
            base, provider=name, spec="causal", window_size_left=-1, window_size_right=0
        )
    yield "vLLM 0.24.0's mm_prefix", replace(
        base, provider=V24, spec="mm_prefix", mask_mod=f"{V24}/mm_prefix[window,ranges=8]",
        params={"window": FIXED["window"]},
    )
    for name in (UP, V33):
        for twin in ("no-window-term", "unclamped-lookup"):
            yield f"{name}: known-bad/{twin}", replace(
                base, provider=name, spec="mm_prefix", mask_mod=f"maskproof/known-bad/{twin}",
                **window
            )


def tried(readers: Readers, label: str, call: Call, sequences: Sequences, **options: Any) -> Record:
    begin = time.perf_counter()
    record: Record = {"label": label, "provider": call.provider}
    try:
        record |= shown(readers[call.provider].read(call, sequences, **options))
    except Fa4Error as error:
        record["skipped"] = str(error)
    except Exception as error:  # noqa: BLE001  a benchmark goes on
        record["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
    record["wall_seconds"] = time.perf_counter() - begin
    brief = {k: record[k] for k in ("counts", "skipped", "error") if k in record}
    print(f"{record['wall_seconds']:7.2f} s  {call.provider} {label}: {brief}", flush=True)
    return record


def right(readers: Readers) -> list[Record]:
    """Small and large batches. With NaN in the unused pages no sequence is without keys: with a
    mask_mod both providers then read the page that the first entry of its page table names."""
    found = []
    for name in (V33, UP):
        for label, call in right_calls(name):
            rng = np.random.default_rng(1)
            some = drawn(rng, call.spec, 300, 1024, empty=False)
            found.append(tried(readers, label, call, some))
            many = drawn(rng, call.spec, 2048, 512)
            found.append(tried(readers, f"{label}, many", call, many, nan=NOWHERE))
    return found


def beyond(readers: Readers) -> list[Record]:
    """What is read beyond a sequence."""
    found = []
    empty = Sequences(np.array([3, 2], np.int32), np.array([0, 2], np.int32))
    for name in (V33, UP):
        for label, fields in (("built-in causal", {"causal": True}),
                              ("mask_mod", {"mask_mod": "generated"})):
            call = Call(provider=name, spec="causal", **fields)
            for size in (128, 16):
                paged = replace(call, page_size=size)
                found.append(tried(readers, f"no keys, {label}, page size {size}", paged, empty))
                found.append(tried(readers, f"a page not full, {label}, page size {size}", paged,
                                   empty.select([1]), nan=SLOTS))
    return found


def wrong(readers: Readers) -> list[Record]:
    found = []
    for label, call in wrong_calls():
        sequences = drawn(np.random.default_rng(1), call.spec, 300, 1024)
        if "0.24" in label:
            tables = dict(sequences.tables)
            tables["ranges"] = np.concatenate([tables["ranges"], tables["ranges"] * 0 - 1], 1)
            sequences = replace(sequences, tables=tables)
        found.append(tried(readers, label, call, sequences))
    return found


def layout_calls(name: str) -> Iterator[tuple[str, Call, Record]]:
    """The same two masks through every layout, page size, head count and dtype."""
    base = Call(provider=name, spec="causal", causal=True, kv_heads=2, q_heads=2)
    own = replace(base, causal=False, spec="mm_prefix", params={"window": 129},
                  mask_mod="maskproof/mm_prefix[window]")
    variants: list[tuple[str, Record, Record]] = [
        ("varlen", {"layout": VARLEN}, {}), ("batched", {"layout": BATCHED}, {}),
        *((f"page size {size}", {"page_size": size}, {}) for size in (1, 16, 48, 64, 256)),
        ("NaN behind the last key", {}, {"nan": SLOTS}),
        ("NaN behind the last key, page size 16", {"page_size": 16}, {"nan": SLOTS}),
        ("fp16", {"dtype": "fp16"}, {}), ("sink", {"sink": True}, {}),
        ("GQA 8", {"q_heads": 16}, {}), ("GQA 3", {"q_heads": 6}, {}),
        ("GQA 8, every head", {"q_heads": 16}, {"heads": EVERY}),
        ("GQA 8, unpacked", {"q_heads": 16, "pack_gqa": False}, {}),
        ("head dim 64", {"head_dim": 64, "head_dim_v": 64}, {}),
        ("head dims 192, 128", {"head_dim": 192}, {}),
        ("head dim 256", {"head_dim": 256, "head_dim_v": 256}, {}),
        ("3 splits", {"num_splits": 3}, {}), ("100 splits", {"num_splits": 100}, {}),
    ]
    for label, fields, options in variants:
        for kind, call in (("causal", base), ("mm_prefix", own)):
            yield f"{kind}, {label}", replace(call, **fields), options


def layouts(readers: Readers) -> list[Record]:
    return [
        tried(readers, label, call, drawn(np.random.default_rng(2), call.spec, 100, 700), **options)
        for name in (V33, UP) for label, call, options in layout_calls(name)
    ]


def numerics(readers: Readers) -> list[Record]:
    found = []
    for name in (V33, UP):
        base = Call(provider=name, spec="causal", causal=True, kv_heads=2, q_heads=4)
        for label, fields in (
            ("plain", {}), ("softcap", {"softcap": 15.0}), ("sink", {"sink": True}),
            ("fp16", {"dtype": "fp16"}), ("varlen", {"layout": VARLEN}),
            ("batched", {"layout": BATCHED}), ("splits", {"num_splits": 3}),
        ):
            call = replace(base, **fields)
            try:
                sequences = drawn(np.random.default_rng(3), call.spec, 20, 700)
                record = asdict(readers[name].measure(call, sequences))
            except Exception as error:  # noqa: BLE001
                record = {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
            found.append({"label": f"{name} {label}", **record})
            print(found[-1], flush=True)
    return found


def longest(readers: Readers) -> list[Record]:
    """One leaked key in the last chunk of a prefill of 147,456 keys, and what allclose sees."""
    keys, queries = 147_456, 2048
    leaky = f"causal or q == {keys - 100} and kv == {keys - 99}"
    sequences = Sequences(np.array([queries], np.int32), np.array([keys], np.int32))
    found = []
    for mask_mod in (f"generated/{leaky}", "generated/causal"):
        call = Call(provider=V33, spec="causal", mask_mod=mask_mod, kv_heads=8, q_heads=8)
        tried(readers, f"147,456 keys, {mask_mod}, compiling", call, sequences)
        record = tried(readers, f"147,456 keys, {mask_mod}", call, sequences)
        few = Sequences(np.array([256], np.int32), np.array([keys], np.int32))
        one = replace(call, kv_heads=1, q_heads=1)
        record["allclose"] = asdict(readers[V33].measure(one, few))
        record["allclose"]["agrees"] = readers[V33].measure(one, few).agrees
        print(record["allclose"], flush=True)
        found.append(record)
    return found


def speed(readers: Readers) -> list[Record]:
    """Batches one after the other, each started before the ones before it are finished."""
    found = []
    for spec, mask_mod, params in (
        ("mm_prefix", f"{V33}/mm_prefix[window]", {"window": 129}), ("causal", None, {}),
        ("rswa", "maskproof/rswa", {"window": 129}),
        ("chunked_local", "generated", {"chunk": 100}),
    ):
        for count, most, heads in (
            (2048, 512, 4), (8192, 512, 4), (2048, 1024, 8), (256, 4096, 32)
        ):
            call = Call(provider=V33, spec=spec, mask_mod=mask_mod, params=params,
                        causal=mask_mod is None, kv_heads=heads, q_heads=heads)
            found.append(paced(readers[V33], call, count, most))
    return found


def paced(reader: Reader, call: Call, count: int, most: int, repeats: int = 5) -> Record:
    batches = [
        drawn(np.random.default_rng(i), call.spec, count, most, prefill=1.0, empty=False)
        for i in range(4)
    ]
    if call.spec == "mm_prefix":
        # Of ranges and own rows the comparison is given the rows, as the mask_mod is.
        batches = [
            replace(each, tables={"query_ranges": each.tables["query_ranges"]}) for each in batches
        ]
    for each in batches:
        reader.read(call, each)
    host, waiting, done = 0.0, [], []
    begin = time.perf_counter()
    for i in range(repeats * len(batches)):
        start = time.perf_counter()
        waiting.append(reader.start(call, batches[i % len(batches)]))
        host += time.perf_counter() - start
        if len(waiting) > 2:
            done.append(waiting.pop(0).finish())
    done += [each.finish() for each in waiting]
    wall = time.perf_counter() - begin
    cells, kernel = sum(d.cells for d in done), sum(d.kernel_seconds for d in done)
    record = {
        "spec": call.spec, "mask_mod": call.mask_mod, "sequences": count, "longest": most,
        "heads": call.q_heads, "cells": cells, "wrong": sum(d.total for d in done),
        "wall_seconds": wall, "host_seconds": host, "kernel_seconds": kernel,
        "compare_seconds": sum(d.compare_seconds for d in done),
        "cells_per_second": cells / wall, "kernel_share": kernel / wall,
        "kernel_cells_per_second": cells / kernel,
        "sequences_per_second": count * len(done) / wall,
    }
    print({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in record.items()}, flush=True)
    return record


def tune(readers: Readers) -> list[Record]:
    """Tile, span and warps of the comparison; the fastest is used from here on."""
    from kernels import readout

    found = []
    call = Call(provider=V33, spec="mm_prefix", mask_mod=f"{V33}/mm_prefix[window]",
                params={"window": 129}, kv_heads=4, q_heads=4)
    sizes = (
        (2048, 128, 4), (1024, 128, 4), (1024, 128, 2), (1024, 128, 1), (512, 128, 1),
        (1024, 64, 2), (2048, 128, 2),
    )
    for tile, span, warps in sizes:
        readout.TILE, readout.SPAN, readout.WARPS = tile, span, warps
        found.append({"tile": tile, "span": span, "warps": warps,
                      **paced(readers[V33], call, 2048, 512)})
    best = min(found, key=lambda each: each["compare_seconds"])
    readout.TILE, readout.SPAN, readout.WARPS = best["tile"], best["span"], best["warps"]
    print("best:", readout.TILE, readout.SPAN, readout.WARPS, flush=True)
    return found


def compiled(readers: Readers, processes: int, sections: list[str]) -> Record:
    """Compiles ahead in processes forked from one that has imported; no CUDA in this one."""
    begin, found = time.perf_counter(), {}
    for name in (V33, UP):
        work = [(call, 300) for _, call in right_calls(name)]
        if "wrong" in sections:
            work += [(call, 300) for _, call in wrong_calls() if call.provider == name]
        if "layouts" in sections:
            work += [(call, 2) for _, call, _ in layout_calls(name)]
        once = {compile_key(*each): each for each in work if supported(each[0]) is None}
        source = readers[name].source
        children = []
        for i in range(processes):
            if (child := os.fork()) == 0:
                for call, sequences in list(once.values())[i::processes]:
                    try:
                        source.compile(call, sequences)
                    except Exception as error:  # noqa: BLE001
                        print(f"compiling {call}: {str(error)[-300:]}", flush=True)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found[name] = {"kernels": len(once), "seconds": time.perf_counter() - begin}
        print("compiled", name, found[name], flush=True)
    return found


SECTIONS: dict[str, Callable[[Readers], list[Record]]] = {
    "right": right, "wrong": wrong, "layouts": layouts, "numerics": numerics, "longest": longest,
    "beyond": beyond, "speed": speed, "tune": tune,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--processes", type=int, default=16, help="that compile ahead; 0 for none")
    options = parser.parse_args()
    import torch

    record: Record = {"torch": torch.__version__, "python": sys.version}
    with ExitStack() as scope:
        readers = Readers(scope)
        if options.processes:
            record["compiled"] = compiled(readers, options.processes, options.only)
        record["gpu"] = torch.cuda.get_device_name()
        for name in options.only:
            begin = time.perf_counter()
            try:
                record[name] = SECTIONS[name](readers)
            except Exception as error:  # noqa: BLE001
                import traceback

                traceback.print_exc()
                record[name] = f"{type(error).__name__}: {error}"
            print(f"== {name}: {time.perf_counter() - begin:.1f} s", flush=True)
            record["fa4"] = {n: reader.source.fa4 for n, reader in readers.found.items()}
            with open(options.json, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
