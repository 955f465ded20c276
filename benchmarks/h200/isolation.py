"""Launches that hang, write out of bounds or trap, and campaigns whose processes are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.h200 import processes
from benchmarks.h200.processes import Running
from benchmarks.h200.record import Record
from fuzz.state import State, open_state

PLANTED = {"spins": "hang", "writes_out_of_bounds": "crash", "traps": "crash"}
FILE = "tests/gpu/planted.py"
DEADLINE, BUDGET, WORKERS, COMPILED = 5, 60, "4", "4"
# Launches that have ended before a process is killed, and seconds that they may take.
BEFORE, PATIENCE = 8, 120
RESTARTED = 30
KILLED = "rswa"
COUNTS = ("launches", "cells", "sequences", "wrong_cells")


def run(options: Any) -> Record:
    """Each planted mask_mod in a campaign of its own, at once."""
    jobs = [partial(planted, name, kind) for name, kind in PLANTED.items()]
    found = processes.at_once(jobs if options.backend == "gpu" else [], len(jobs))
    return {"deadline_seconds": DEADLINE, "planted": found}


def kill(options: Any) -> Record:
    (found,) = processes.at_once([partial(killed, options.backend)], 1)
    return {"killed": found}


def planted(name: str, kind: str, folder: Path) -> Record:
    """A campaign on a mask_mod that breaks what runs it, at one cell."""
    summary, target = folder / "summary.json", ["--target", f"{FILE}::{name}", "--spec", "causal"]
    compiled = [sys.executable, "-m", "fuzz.compile", *target, "--variants", COMPILED,
                "--workers", WORKERS]
    processes.run(compiled, processes.python(folder), BUDGET + 60)
    words = [
        sys.executable, "-m", "fuzz.run", "--backend", "gpu", *target, "--deadline", str(DEADLINE),
        "--budget", f"{BUDGET}s", "--workers", WORKERS, "--findings", str(folder / "findings"),
        "--json", str(summary), "--seed", "1",
    ]
    ended = processes.run(words, processes.python(folder), BUDGET + 60)
    found: Record = {"mask_mod": name, "expected": kind, "status": ended.status,
                     "command": processes.shown(words)}
    if not summary.is_file() or not summary.stat().st_size:
        return {**found, "told": ended.told}
    told = json.loads(summary.read_text())
    now = told["run"]
    kinds = [one["kind"] for one in told["findings"]]
    found |= {
        "kinds": {each: kinds.count(each) for each in sorted(set(kinds))},
        **{each: now.get(each, 0) for each in COUNTS},
        "children_restarted": told["children_restarted"],
        **{each: now[each] for each in ("skipped", "infrastructure") if now.get(each)},
        "cases": [size_of(path) for path in sorted((folder / "findings").glob("finding-*.json"))],
    }
    print(found, flush=True)
    return found


def size_of(path: Path) -> Record:
    finding = json.loads(path.read_text())
    sizes = [(one["seqlen_q"], one["seqlen_k"]) for one in finding["case"]["sequences"]]
    return {"kind": finding["kind"], "text": finding["text"], "shrunk": finding["shrunk"],
            "sequences": len(sizes), "queries": max(q for q, _ in sizes),
            "keys": max(k for _, k in sizes)}


def killed(backend: str, folder: Path) -> Record:
    """kill -9 of the child that runs launches, then of the campaign itself, then a restart."""
    findings, env = folder / "findings", processes.python(folder)

    def words(name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "fuzz.run", "--backend", backend, "--target", KILLED,
                "--workers", "1", "--findings", str(findings), "--json", str(folder / name), *more]

    first = processes.started(words("first.json", "--budget", "10m"), env)
    found: Record = {"command": processes.shown(words("first.json"))}
    try:
        before = after_launches(first, findings, BEFORE)
        found["child_killed_after_launches"] = before
        os.kill(child_of(first.process.pid), signal.SIGKILL)
        found["launches_after_the_child"] = after_launches(first, findings, before + BEFORE)
        os.kill(first.process.pid, signal.SIGKILL)
    finally:
        first.ended(0)
    gone = on_disk(findings, folder / "copy")
    found["when_the_campaign_was_killed"] = sums(gone.totals)
    found["begun_and_not_ended"] = len(gone.unfinished)
    found["position"] = max(gone.position.values(), default=0)
    second = processes.run(words("second.json", "--budget", f"{RESTARTED}s"), env, 120)
    told = json.loads((folder / "second.json").read_text())
    totals, now = sums(told["totals"]), sums(told["run"])
    after = on_disk(findings, folder / "copy")
    found |= {
        "restarted_status": second.status, "second_run": now, "in_all": totals,
        "nothing_lost": all(totals[name] - now[name] == count for name, count in
                            found["when_the_campaign_was_killed"].items()),
        "position_after": max(after.position.values(), default=0),
        "same_seed": gone.seed == after.seed, "findings": len(told["findings"]),
        "infrastructure": told["totals"].get("infrastructure", {}),
    }
    found["resumed"] = (len(after.position) == 1 and now["launches"] > 0
                        and found["position_after"] > found["position"] and found["same_seed"])
    print(found, flush=True)
    return found


def sums(given: Record) -> Record:
    return {name: given.get(name, 0) for name in COUNTS}


def on_disk(findings: Path, copy: Path) -> State:
    """What a folder holds, read from a copy: reading it tidies it up."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(findings, copy)
    with closing(open_state(copy)) as state:
        return state


def after_launches(campaign: Running, findings: Path, count: int) -> int:
    """Waits until `count` launches have ended, by what the journal says; gives their number."""
    until = monotonic() + PATIENCE
    while monotonic() < until:
        done = ended_launches(findings / "state")
        if done >= count:
            return done
        if not campaign.is_running():
            raise RuntimeError(f"the campaign ended: {campaign.ended(0).told}")
        sleep(0.05)
    raise RuntimeError(f"{done} launches in {PATIENCE} s, not {count}")


def ended_launches(folder: Path) -> int:
    count = 0
    with suppress(OSError, ValueError):
        if (snapshot := folder / "snapshot.json").is_file():
            count = json.loads(snapshot.read_text())["totals"].get("launches", 0)
        for journal in folder.glob("journal-*.jsonl"):
            count += journal.read_bytes().count(b'{"end":')
    return count


def child_of(parent: int) -> int:
    """The child that runs launches: the one that has opened the GPU's memory or, where none can be
    seen to, the one that was begun last."""
    children = children_of(parent)
    using = [pid for pid in children if has_open(pid, lambda name: "nvidia-uvm" in name)]
    return max(using or children, key=begun)


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after[1]) == parent and after[0] != "Z":
                    found.append(int(entry.name))
    if not found:
        raise RuntimeError(f"process {parent} has no child")
    return found


def begun(pid: int) -> tuple[int, int]:
    """When a process began, in ticks; its number tells apart what began in one tick."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid


def has_open(pid: int, wanted: Callable[[str], bool]) -> bool:
    with suppress(OSError):
        return any(wanted(os.readlink(each)) for each in Path(f"/proc/{pid}/fd").iterdir())
    return False
