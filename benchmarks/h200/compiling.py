"""Kernels compiled in many processes, beside the same ones one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.h200.inputs import V33, params_of
from benchmarks.h200.processes import python
from benchmarks.h200.processes import run as run_command
from benchmarks.h200.record import Record
from kernels.fa4 import MANY, VARLEN, Call, compile_key, provider
from spec.masks import MASKS

KERNELS, PROCESSES, ALONE = 64, 16, 8
SHAPES: tuple[dict[str, Any], ...] = (
    {}, {"layout": VARLEN}, {"head_dim": 64, "head_dim_v": 64}, {"q_heads": 8}, {"dtype": "fp16"},
)


def run(options: Any) -> Record:
    """KERNELS in PROCESSES at once, and every few of them one after the other."""
    many, few = timed(KERNELS, PROCESSES), timed(ALONE, 1)
    scaled = few["seconds"] * KERNELS / ALONE
    found = {"kernels": KERNELS, "processes": PROCESSES, "alone": ALONE, "parallel": many,
             "one_by_one": few, "one_by_one_seconds_scaled": scaled,
             "ratio": scaled / many["seconds"]}
    print(found, flush=True)
    return found


def timed(kernels: int, processes: int) -> Record:
    """Measured by a Python of its own that has imported everything and has an empty cache."""
    with TemporaryDirectory() as folder:
        cache = Path(folder) / "kernels"
        command = [sys.executable, "-m", "benchmarks.h200.compiling", str(kernels), str(processes)]
        ended = run_command(command, python(Path(folder), cache), 500)
        if ended.status:
            raise RuntimeError(ended.told)
        made = len(list(cache.rglob("fwd/*.o")))
        return {"seconds": float(ended.told.split()[-1]), "kernels_in_the_cache": made}


def main(kernels: int, processes: int) -> None:
    """Writes the seconds from the first fork until all kernels are in the cache."""
    with provider(V33) as source:
        calls = list(islice(distinct(V33), KERNELS))
        calls = calls[:: len(calls) // kernels][:kernels]
        begin, children = perf_counter(), []
        for i in range(processes):
            if (child := os.fork()) == 0:
                work(source, calls[i::processes])
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise RuntimeError("a process that compiles failed")
        print(f"\n{perf_counter() - begin:.4f}")


def work(source: Any, calls: list[Call]) -> None:
    """In a child: compiles, and ends."""
    status = 1
    try:
        for call in calls:
            source.compile(call, MANY + 1)
        status = 0
    finally:
        os._exit(status)


def distinct(name: str) -> Iterator[Call]:
    """Calls no two of which one kernel serves."""
    keys = set()
    for fields, spec in product(SHAPES, MASKS):
        call = Call(provider=name, spec=spec, mask_mod="generated", params=params_of(spec),
                    **{"kv_heads": 4, "q_heads": 4, **fields})
        if (key := compile_key(call, MANY + 1)) not in keys:
            keys.add(key)
            yield call


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
