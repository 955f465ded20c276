"""How soon each faulty call is found, from a cold start: a new process and a new folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.h200 import processes
from benchmarks.h200.record import Record
from fuzz.targets import (
    BESIDE,
    Source,
    beside,
    built_in,
    gathered,
    in_turn,
    provider_of,
    within_causal,
)
from kernels.fa4 import supported
from kernels.target import Target

AT_ONCE, WORKERS = 8, 2
BUDGET, CONTROL = 60, 45
# The seed whose finding is replayed from its shell line.
REPLAYED = 1
WRONG = "equals-spec"
LOOK = 0.05
# The releases whose calls are tried; of 0.24.0 every mask_mod for windowed layers is wrong.
OWN, V33, V24 = None, "0.33.0", "0.24.0"
FAULTY_RELEASES = {V24: "mm_prefix"}


@dataclass(frozen=True, slots=True)
class Faulty:
    """A call that is wrong, in the words of the command line, and the right ones beside it."""

    vllm: str | None
    target: str
    spec: str
    backend: str
    twins: tuple[str, ...]


def run(options: Any) -> Record:
    """Each faulty call with each seed, AT_ONCE at a time."""
    faulty = asked(options)
    compiled = prepared([(each.vllm, each.target) for each in faulty if each.backend == "gpu"])
    jobs = [partial(search, each, seed) for seed in range(1, options.seeds + 1)
            for each in faulty]
    # What is not begun in time is not in the record, which then falls short of its goals.
    found = processes.at_once(jobs, AT_ONCE, options.limit)
    return {
        "compiled": compiled, "at_once": AT_ONCE, "budget_seconds": BUDGET,
        "wanted": [each.target for each in faulty], "searches": [one for one in found if one],
    }


def controls(options: Any) -> Record:
    """Each right call beside a faulty one, AT_ONCE at a time."""
    twins = dict.fromkeys((each.vllm, each.backend, twin) for each in asked(options)
                          for twin in each.twins)
    compiled = prepared([(vllm, twin) for vllm, backend, twin in twins if backend == "gpu"])
    found = processes.at_once([partial(control, *twin) for twin in twins], AT_ONCE)
    return {"compiled": compiled, "at_once": AT_ONCE, "control_seconds": CONTROL,
            "controls": found}


def asked(options: Any) -> list[Faulty]:
    return [each for each in every(options.backend)
            if not options.target or any(text in each.target for text in options.target)]


def prepared(calls: Sequence[tuple[str | None, str]]) -> list[Record]:
    """The plainest kernel of each call compiled, before the first process is timed."""
    targets: dict[str | None, list[str]] = {}
    for vllm, target in calls:
        targets.setdefault(vllm, []).append(target)
    return processes.at_once(
        [partial(compiling, *each) for each in targets.items()], max(len(targets), 1))


def compiling(vllm: str | None, targets: Sequence[str], folder: Path) -> Record:
    """The plainest kernel of each target, compiled into the cache."""
    where = ["--vllm", processes.release(vllm)] if vllm else []
    words = [sys.executable, "-m", "fuzz.compile", "--variants", "1", *where,
             *(word for target in dict.fromkeys(targets) for word in ("--target", target))]
    ended = processes.run(words, processes.python(folder), 200)
    found = {"command": processes.shown(words), "status": ended.status, "seconds": ended.seconds}
    print(found, ended.told, flush=True)
    return found


def every(backend: str) -> list[Faulty]:
    """What is known to be wrong: of the project, of vLLM 0.33.0, and of vLLM 0.24.0."""
    found = []
    for vllm in (OWN, V33, V24):
        with ExitStack() as scope:
            source = Source(vllm=vllm and processes.release(vllm))
            targets = scope.enter_context(gathered(source))
            more = {**built_in(targets), **(beside(targets) if vllm == V33 else {})}
            found += faulty(vllm, {**targets, **more}, backend)
    return found


def faulty(vllm: str | None, targets: dict[str, Target], backend: str) -> list[Faulty]:
    wrong = {alike(each): each for each in reversed(targets.values()) if is_wrong(vllm, each)}
    found = []
    for each in reversed(wrong.values()):
        if each.unsupported or backend == "gpu" and not runs(each):
            continue
        twins = tuple(twin.target for twin in targets.values()
                      if twin.spec == each.spec and not is_wrong(vllm, twin)
                      and not twin.unsupported and BESIDE not in twin.target
                      and (backend == "cpu" or runs(twin)))
        if backend == "cpu" and ("/built-in/" in each.target or BESIDE in each.target):
            continue
        found.append(Faulty(vllm, each.target, each.spec, backend, twins))
    return found


def runs(target: Target) -> bool:
    return any(supported(call) is None for _, call in in_turn([target], gpu=True))


def is_wrong(vllm: str | None, target: Target) -> bool:
    if vllm in FAULTY_RELEASES:
        return target.spec == FAULTY_RELEASES[vllm]
    # That fork does not call a mask_mod beside causal=True, whatever the mask is.
    return bool(target.expected) or vllm == V33 and BESIDE in target.target


def alike(each: Target) -> tuple[str, ...]:
    """What makes two wrong calls one fault: the first of them is searched for."""
    provider = provider_of(each.target)
    if BESIDE in each.target:
        return provider, BESIDE, "within causal" if within_causal(each.spec) else "not within"
    return (provider, each.spec) if not each.expected else (each.target,)


def command(
    folder: Path, vllm: str | None, backend: str, target: str, seconds: int, *more: str
) -> list[str]:
    where = ["--vllm", processes.release(vllm)] if vllm else []
    return [
        sys.executable, "-m", "fuzz.run", "--backend", backend, "--budget", f"{seconds}s",
        "--findings", str(folder / "findings"), "--json", str(folder / "summary.json"),
        "--workers", str(WORKERS), *where, "--target", target, *more,
    ]


def search(each: Faulty, seed: int, folder: Path) -> Record:
    """Seconds until the first finding lies in the folder, what it shrank to, and its replay."""
    words = command(folder, each.vllm, each.backend, each.target, BUDGET, "--seed", str(seed),
                    "--stop-on-first")
    env = processes.python(folder)
    begin, first = perf_counter(), None
    process = processes.started(words, env)
    while process.is_running() and first is None:
        if any((folder / "findings").glob("finding-*.json")):
            first = perf_counter() - begin
        sleep(LOOK)
    status = process.ended(BUDGET + 60)
    found: Record = {"target": each.target, "release": each.vllm or "", "backend": each.backend,
                     "spec": each.spec, "seed": seed, "seconds": first, "status": status.status,
                     "command": processes.shown(words),
                     "ended_after": perf_counter() - begin}
    stored = sorted((folder / "findings").glob("finding-*.json"))
    if stored:
        if first is None:
            found["seconds"] = found["ended_after"]
        finding = json.loads(stored[0].read_text())
        sizes = [(one["seqlen_q"], one["seqlen_k"]) for one in finding["case"]["sequences"]]
        found |= {"kind": finding["kind"], "region": finding["region"],
                  "shrunk": finding["shrunk"], "sequences": len(sizes),
                  "queries": max(q for q, _ in sizes), "keys": max(k for _, k in sizes)}
        if seed == REPLAYED:
            replayed = processes.run(finding["replay"], env, 120)
            found |= {"replayed": replayed.status == 1, "replay_seconds": replayed.seconds}
    else:
        found["told"] = status.told
    print({name: found.get(name) for name in
           ("target", "seed", "seconds", "kind", "queries", "keys", "replayed")}, flush=True)
    return found


def control(vllm: str | None, backend: str, target: str, folder: Path) -> Record:
    """What a right call comes to: status 0, no finding, and cells that were compared."""
    words = command(folder, vllm, backend, target, CONTROL, "--seed", "1")
    ended = processes.run(words, processes.python(folder), CONTROL + 60)
    summary = folder / "summary.json"
    told = json.loads(summary.read_text()) if summary.is_file() and summary.stat().st_size else {}
    found = {"target": target, "release": vllm or "", "backend": backend,
             "status": ended.status, "findings": len(told.get("findings", [])),
             "cells": told.get("run", {}).get("cells", 0), "command": processes.shown(words)}
    print(found, flush=True)
    return found
